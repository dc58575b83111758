"""The training loop on a random model of 25,000 weights: it learns, it stops, it resumes."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_model, save_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from crrl_lib import health
from crrl_lib.records import Question, Trajectory, Turn
from crrl_lib.scratch import Scratch
from crrl_lib.train import GRPOConfig, TrainingCollapsed, choose, train
from crrl_lib.update import learning_rate
from crrl_lib.views import VIEWS, context_ids

VOCAB, WANTED, GROUP = 32, 7, 4
QUESTIONS = [Question(f"q{i}", f"What is {i}?", ("a",)) for i in range(10)]
BASE = GRPOConfig(
    steps=4,
    learning_rate=1e-2,
    questions_per_step=4,
    group_size=GROUP,
    mini_batch_questions=2,
    kl_coef=0.01,
    temperature=0.9,
    token_budget=64,
    save_every=2,
)


def tiny(seed: int = 0) -> Qwen2ForCausalLM:
    """Make a random model."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def changed(config: GRPOConfig = BASE, **dials: object) -> GRPOConfig:
    """Turn some dials of a config."""
    return GRPOConfig(**(vars(config) | dials))


def sampler(model: Qwen2ForCausalLM, view: str = "oq", turns: int = 3) -> Callable:
    """Roll out by sampling from ``model`` as it is; observations come from the global generators.

    An action that is one token over and over is invalid and ends the run.
    """

    @torch.no_grad()
    def sample(context: Sequence[int], generator: torch.Generator) -> Turn:
        ids, logprobs = list(context), []
        for _ in range(4):
            table = (model(torch.tensor([ids])).logits[0, -1] / BASE.temperature).log_softmax(-1)
            ids.append(int(torch.multinomial(table.exp(), 1, generator=generator)))
            logprobs.append(table[ids[-1]].item())
        action = tuple(ids[len(context) :])
        valid = len(set(action)) > 1
        return Turn(
            "t",
            query="q" if valid else None,
            context_ids=tuple(context),
            action_ids=action,
            logprobs=tuple(logprobs),
            thought_ids=action[:2],
            query_ids=action[2:],
            observation="o",
            observation_ids=(
                int(random.random() * VOCAB),
                int(np.random.rand() * VOCAB),  # noqa: NPY002 - a run must restore this one too
                int(torch.rand(1) * VOCAB),
            ),
        )

    def roll(questions: Sequence[Question], step: int, seed: int) -> list[Trajectory]:
        generator, made = torch.Generator().manual_seed(seed), []
        for question in (q for q in questions for _ in range(GROUP)):
            prompt, done = [1, int(question.id[1:]) + 2], []
            while len(done) < turns and (not done or done[-1].query):
                done.append(sample(context_ids(prompt, done, VIEWS[view]), generator))
            made.append(Trajectory(question, tuple(done), "budget"))
        return made

    return roll


def wanted_share(run: Trajectory) -> float:
    """Reward the share of one token among those generated."""
    ids = [i for t in run.turns for i in t.action_ids]
    return ids.count(WANTED) / len(ids)


def fit(
    model: Qwen2ForCausalLM,
    config: GRPOConfig = BASE,
    scratch: Scratch | None = None,
    **more: object,
):
    """Train with the usual parts; any of them can be replaced."""
    reference = copy.deepcopy(model) if config.kl_coef else None
    parts = {
        "roll": sampler(model),
        "reward": wanted_share,
        "log": lambda row, seconds: None,
    } | more
    reference = parts.pop("reference", reference)
    return train(model, reference, QUESTIONS, config=config, scratch=scratch, **parts)


def reseed(seed: int = 5) -> None:
    """Set the global generators, which every sampler here draws from."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def weights(model: Qwen2ForCausalLM) -> torch.Tensor:
    """Return all weights in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Use as many threads as the processes that tests here start."""
    torch.set_num_threads(1)
    reseed()


# ---------------------------------------------------------------- learning


def test_training_raises_the_reward_of_an_easy_task() -> None:
    done = fit(tiny(), changed(steps=12))
    rewards = [row["reward"] for row in done.rows]
    assert sum(rewards[:2]) / 2 < 0.12
    assert sum(rewards[-2:]) / 2 > 0.4
    assert done.rows[-1]["kl"] > done.rows[0]["kl"]


def test_log_row_and_callbacks() -> None:
    synced, logged, asked = [], [], []
    config = changed(steps=3, evaluate_every=2, mini_batch_questions=4, token_budget=4096)
    done = fit(
        model := tiny(),
        config,
        on_sync=lambda: synced.append(weights(model)),
        log=lambda row, seconds: logged.append((row, seconds)),
        evaluate=lambda step: asked.append(step) or {"em": 0.5},
        measures={"em": lambda run: 1.0},
    )
    assert len(synced) == 4 and asked == [2, 3]
    assert [row for row, _ in logged] == done.rows
    assert [seconds for _, seconds in logged] == done.timing
    first, last = done.rows[0], done.rows[-1]
    assert (first["em"], last["eval_em"], "eval_em" in first) == (1.0, 0.5, False)
    # One mini-batch, one epoch: the policy that sampled is the policy in training.
    assert {row["ratio_max"] for row in done.rows} == {1.0}
    assert (first["kl"], first["clip_share"], first["lr"]) == (0.0, 0.0, 1e-2)
    assert first["sampling_gap"] < 1e-5  # the sampler's log-probs are those of the trainer
    assert 0 < first["entropy"] <= np.log(VOCAB)
    assert first["searches"] == 3.0 and first["generated_tokens"] == 4 * GROUP * 3 * 4
    assert first["valid_share"] == 1.0 and first["think_tokens"] == 2.0
    assert not any("second" in key or "time" in key for key in first)
    json.dumps(done.rows)


def test_token_budget_and_checkpointing_do_not_change_the_weights() -> None:
    ends = []
    for dials in ({}, {"token_budget": 4096}, {"gradient_checkpointing": True}):
        reseed()
        fit(model := tiny(), changed(steps=1, **dials))
        ends.append(weights(model))
    assert (ends[0] - weights(tiny())).abs().max() > 1e-3
    # Adam scales gradients to its rate: what rounds differently shows at 1e-2 times that.
    assert all((ends[0] - end).abs().max() < 1e-4 for end in ends[1:])


def test_equal_rewards_teach_nothing_and_are_forwarded_only_for_the_kl() -> None:
    model = tiny()
    before = weights(model)
    done = fit(model, changed(steps=1, kl_coef=0.0), reward=lambda run: 0.5)
    assert torch.equal(before, weights(model))
    assert done.rows[0]["zero_variance_share"] == 1.0
    assert done.rows[0]["train_tokens"] == 2 * 2  # a dummy for each mini-batch
    assert (done.rows[0]["kl"], done.rows[0]["entropy"]) == (None, None)  # not measured, not 0
    done = fit(model, changed(steps=1), reward=lambda run: 0.5)
    assert done.rows[0]["train_tokens"] > 100


def test_forward_of_zero_variance_groups_is_skipped_without_changing_the_objective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reward(run: Trajectory) -> float:
        return wanted_share(run) if int(run.question.id[1:]) % 2 else 0.0

    fit(skipped := tiny(), changed(steps=1, kl_coef=0.0), reward=reward)
    reseed()
    monkeypatch.setattr("crrl_lib.update._packs", keep_every_row)
    fit(kept := tiny(), changed(steps=1, kl_coef=0.0), reward=reward)
    assert (weights(skipped) - weights(kept)).abs().max() < 1e-4


def keep_every_row(learner, trajectories, advantages):  # noqa: ANN001
    """Pack without the short cut for rows of advantage 0."""
    from crrl_lib import grpo

    return [grpo.pack(grpo.rows(trajectories, advantages.tolist()))]


def test_warm_up_is_linear_then_constant() -> None:
    config = changed(warmup_steps=4)
    assert [learning_rate(config, s) / 1e-2 for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert learning_rate(BASE, 0) == 1e-2


def test_data_position_walks_through_one_permutation_after_the_other() -> None:
    walked = [q.id for step in range(5) for q in choose(QUESTIONS, 4 * step, BASE)]
    assert len(set(walked[:10])) == len(set(walked[10:])) == 10
    assert walked[:10] != walked[10:]
    assert [q.id for q in choose(QUESTIONS, 8, BASE)] == walked[8:12]
    assert [q.id for q in choose(QUESTIONS, 0, changed(seed=1))] != walked[:4]


# ---------------------------------------------------------------- refusing


def test_what_cannot_be_trained_is_refused() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="not a multiple of mini_batch_questions 3"):
        changed(mini_batch_questions=3)
    with pytest.raises(ValueError, match="group_size is 1"):
        changed(group_size=1)
    with pytest.raises(ValueError, match="10 training questions, fewer than .* 12"):
        fit(model, changed(questions_per_step=12))
    with pytest.raises(ValueError, match="reference model of its own"):
        fit(model, reference=model)
    with pytest.raises(ValueError, match="reference model of its own"):
        fit(model, reference=None)
    with pytest.raises(ValueError, match="torch.bfloat16"):
        fit(tiny().to(torch.bfloat16))
    shuffled = sampler(model)
    with pytest.raises(ValueError, match="advantages would mix questions"):
        fit(model, roll=lambda *call: shuffled(*call)[::-1])
    with pytest.raises(ValueError, match=r"rewards \[0\] are not finite"):
        rewards = iter([float("nan")] + [0.0] * 99)
        fit(model, reward=lambda run: next(rewards))


# ---------------------------------------------------------------- health


def row(reward: float, valid: float = 1.0) -> dict:
    """Make the part of a log row that health looks at."""
    return {"reward": reward, "valid_share": valid}


def test_trouble_is_few_valid_actions_or_a_reward_far_below_its_best() -> None:
    limits = (0.2, 0.5, 2)
    rising = [row(0.1), row(0.3), row(0.5), row(0.5)]
    assert health.trouble(rising, *limits) == ""
    assert "valid-action share 0.100" in health.trouble([row(0.5, 0.1)], *limits)
    assert "best mean over 2 steps, 0.5000" in health.trouble([*rising, row(0.2)], *limits)
    assert health.trouble([*rising, row(0.26)], *limits) == ""
    assert (
        health.trouble([row(-1.0), row(-1.0), row(-1.4)], *limits) == ""
    )  # rewards may be negative
    assert health.streak([*rising, row(0.2), row(0.2)], *limits) == 2
    assert health.streak([*rising, row(0.2), row(0.3), row(0.2)], *limits) == 1
    assert health.streak(rising, *limits) == 0


def test_planted_collapse_stops_and_names_a_good_checkpoint(tmp_path: Path) -> None:
    scratch, model = Scratch("test", {"lr": 1}, tmp_path), tiny()
    fit(model, scratch=scratch)
    good = weights(model)
    config = changed(steps=40, learning_rate=30.0, patience=2)
    with pytest.raises(TrainingCollapsed, match=r"stopped at step \d+") as stopped:
        fit(model, config, scratch)
    path = Path(re.search(r"last healthy checkpoint: (\S+), after 4 steps", str(stopped.value))[1])
    load_model(again := tiny(1), path)
    assert torch.equal(weights(again), good)
    assert re.search(r"best by recent reward \(0\.\d+\): \S+best.safetensors", str(stopped.value))


def test_steps_in_trouble_are_not_saved_and_too_many_stop(tmp_path: Path) -> None:
    rewards = iter([0.5] * 4 * 16 + [0.0] * 99 * 16)
    scratch = Scratch("test", {}, tmp_path)
    with pytest.raises(TrainingCollapsed, match=r"step 6: reward 0.0000.*3 such steps in a row"):
        fit(
            tiny(),
            changed(steps=40, save_every=1, patience=3),
            scratch,
            reward=lambda run: next(rewards),
        )
    assert scratch.load()[0] == 4


def test_a_batch_of_invalid_actions_alone_teaches_nothing() -> None:
    model = tiny()
    before, invalid = weights(model), Turn("", context_ids=(1,), action_ids=(2,), note="no tag")
    runs = [
        Trajectory(q, (invalid,), "invalid") for q in choose(QUESTIONS, 0, BASE) for _ in "four"
    ]
    with pytest.raises(TrainingCollapsed, match="no action .* is valid; no checkpoint was saved"):
        fit(model, roll=lambda *_: runs)
    assert torch.equal(before, weights(model))


def test_nan_stops_before_the_weights_take_it() -> None:
    model = tiny()
    roll = sampler(tiny())  # another model, so that sampling goes on
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(TrainingCollapsed, match="loss nan with gradient norm nan"):
        fit(model, roll=roll)
    assert weights(model).isnan().sum() == 1


# ---------------------------------------------------------------- resuming


def run_until(
    folder: Path, steps: int, kill_after: int = 0
) -> tuple[torch.Tensor, list[dict], int]:
    """Train with saves in ``folder``; SIGKILL this process after a step, if asked to."""

    def log(row: dict, seconds: dict) -> None:
        if row["step"] + 1 == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    model = tiny()
    reference = copy.deepcopy(model)
    done = fit(
        model, changed(steps=steps), Scratch("test", {}, folder), log=log, reference=reference
    )
    return weights(model), done.rows, done.best_step


def test_kill_and_resume_equal_an_uninterrupted_run(tmp_path: Path) -> None:
    expected = run_until(tmp_path / "whole", 6)
    killed = start("killed", tmp_path / "killed")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert Scratch("test", {}, tmp_path / "killed").load()[0] == 2  # it died in step 3
    reseed(99)  # what the generators hold now must not matter
    resumed = run_until(tmp_path / "killed", 6)
    assert torch.equal(expected[0], resumed[0])
    assert expected[1:] == resumed[1:]
    assert run_until(tmp_path / "killed", 6)[1] == expected[1]  # finished: nothing is run again


# ---------------------------------------------------------------- two processes


def recorded(questions: Sequence[Question], step: int, seed: int) -> list[Trajectory]:
    """Roll out the same random ids for a question in whatever process."""
    runs = sampler(tiny())
    made = []
    for question in questions:
        reseed(int(question.id[1:]))
        made += runs([question], step, int(question.id[1:]))
    return made


def run_recorded(folder: Path) -> torch.Tensor:
    """Train two steps on recorded runs; the first process writes its weights to ``folder``."""
    model = tiny()
    done = fit(model, changed(steps=2, learning_rate=1e-3, weight_decay=0.0), roll=recorded)
    if int(os.environ.get("RANK", 0)) == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, folder / "model.safetensors")
        (folder / "rows.json").write_text(json.dumps(done.rows))
    return weights(model)


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"ACCELERATE_USE_CPU": "true"}
    ranks = [
        start("recorded", tmp_path / "two", RANK=str(i), LOCAL_RANK=str(i), **shared) for i in "01"
    ]
    expected = run_recorded(tmp_path / "one")
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert rank.returncode == 0, said
    load_model(model := tiny(1), tmp_path / "two" / "model.safetensors")
    assert (weights(model) - expected).abs().max() < 1e-5
    one, two = (json.loads((tmp_path / n / "rows.json").read_text()) for n in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


def start(what: str, folder: Path, **environment: str) -> subprocess.Popen:
    """Run this file in another process."""
    root = str(Path(__file__).parents[1])
    shared = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": root}
    return subprocess.Popen(
        [sys.executable, __file__, what, str(folder)],
        env=os.environ | shared | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    reseed()
    if sys.argv[1] == "killed":
        run_until(Path(sys.argv[2]), 6, kill_after=3)
    else:
        run_recorded(Path(sys.argv[2]))
