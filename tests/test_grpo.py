"""The loss and everything it stands on, against hand-computed values, invariants and TRL."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from crrl_lib import grpo
from crrl_lib.records import Question, Trajectory, Turn
from crrl_lib.views import VIEWS, context_ids

VOCAB = 64
QUESTION = Question("q", "Where is Bonn?", ("Germany",))
FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def tiny(family: str = "qwen2", attention: str = "sdpa", seed: int = 0) -> torch.nn.Module:
    """Make a random model of about 25,000 weights."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,  # far from uniform, so that a wrong token shows
        attn_implementation=attention,
    )
    torch.manual_seed(seed)
    return model_class(config).eval()


def trajectory(rng: random.Random, view: str, turns: int) -> Trajectory:
    """Make a run of random ids under a view, with random engine log-probs."""
    prompt, made = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))], []
    for _ in range(turns):
        thought, query, observation = (
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))) for _ in range(3)
        )
        made.append(
            Turn(
                "t",
                query="q",
                context_ids=context_ids(prompt, made, VIEWS[view]),
                action_ids=thought + query,
                logprobs=tuple(-rng.random() for _ in thought + query),
                thought_ids=thought,
                query_ids=query,
                observation_ids=observation,
            )
        )
    return Trajectory(QUESTION, tuple(made), "budget")


def batch(view: str, count: int = 8, seed: int = 0) -> tuple[list[Trajectory], list[float]]:
    """Trajectories of 1 to 4 turns with advantages of groups of four."""
    rng = random.Random(seed)
    trajectories = [trajectory(rng, view, 1 + i % 4) for i in range(count)]
    rewards = torch.tensor([float(rng.random() < 0.5) for _ in range(count)])
    rewards[:2] = torch.tensor([0.0, 1.0])
    return trajectories, grpo.advantages(rewards, 4).tolist()


def gradient(
    model: torch.nn.Module,
    packs: list[grpo.Pack],
    kl_coef: float = 0.1,
    reference: torch.nn.Module | None = None,
    temperature: float = 0.7,
) -> torch.Tensor:
    """Gradient of the objective, summed over packs, old log-probs slightly off the new ones."""
    model.zero_grad()
    for pack in packs:
        new, _ = grpo.token_logprobs(model, pack, temperature)
        old = new.detach() + 0.3 * torch.sin(pack.labels[pack.loss_mask].float())
        other = None
        if reference is not None:
            with torch.no_grad():
                other, _ = grpo.token_logprobs(reference, pack, temperature)
        loss, _ = grpo.grpo_loss(new, old, other, pack, 0.2, kl_coef if reference else 0.0)
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Hold two gradients to each other, relative to the larger of them."""
    assert a.abs().max() > 1e-4, "a gradient of zero would prove nothing"
    assert (a - b).abs().max() <= tolerance * max(1.0, a.abs().max().item())


# ---------------------------------------------------------------- advantages


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    low, high = 0.5, math.sqrt(4 * 0.25 / 3)  # sample deviations of the two groups
    expected = [0.75 / (low + 1e-6)] + 3 * [-0.25 / (low + 1e-6)]
    expected += 2 * [0.5 / (high + 1e-6)] + 2 * [-0.5 / (high + 1e-6)]
    torch.testing.assert_close(grpo.advantages(rewards, 4), torch.tensor(expected))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -2.7])
def test_equal_rewards_give_exactly_zero(value: float) -> None:
    assert grpo.advantages(torch.full((7,), value), 7).abs().max() == 0.0


def test_a_group_knows_nothing_of_its_neighbour() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 9.0])
    assert torch.equal(grpo.advantages(rewards, 2)[:2], grpo.advantages(rewards[:2], 2))


@pytest.mark.parametrize(
    ("rewards", "group_size", "said"),
    [
        ([1.0, 0.0], 1, "group_size 1"),
        ([1.0, 0.0, 0.0], 2, "whole groups"),
        ([], 2, "whole groups"),
        ([1.0, float("nan")], 2, r"rewards \[1\] are not finite"),
    ],
)
def test_bad_rewards_are_refused(rewards: list[float], group_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        grpo.advantages(torch.tensor(rewards), group_size)


# ---------------------------------------------------------------- rows


def test_full_view_is_one_row_and_masks_observations() -> None:
    run = trajectory(random.Random(1), "full", 3)
    (row,) = grpo.rows([run], [1.0], count=4)
    expected, mask = [], []
    for before, turn in zip((None, *run.turns), run.turns, strict=False):
        seen = turn.context_ids if before is None else before.observation_ids
        expected += [*seen, *turn.action_ids]
        mask += [False] * len(seen) + [True] * len(turn.action_ids)
    assert row.ids == tuple(expected)
    assert row.loss_mask == tuple(mask)
    assert row.weight == 1 / (4 * run.generated_tokens)
    assert row.sampled == sum((t.logprobs for t in run.turns), ())


def test_crrl_view_is_one_row_a_turn_but_for_the_first_two() -> None:
    run = trajectory(random.Random(1), "oq", 4)
    made = grpo.rows([run], [1.0])
    # Nothing is hidden before the third turn, so the second context still extends the first row.
    assert [sum(r.loss_mask) for r in made] == [
        len(run.turns[0].action_ids) + len(run.turns[1].action_ids),
        len(run.turns[2].action_ids),
        len(run.turns[3].action_ids),
    ]
    assert [r.ids for r in made] == [t.context_ids + t.action_ids for t in run.turns[1:]]
    assert len({r.weight for r in made}) == 1
    assert sum(r.weight * sum(r.loss_mask) for r in made) == pytest.approx(1.0)


@pytest.mark.parametrize("view", VIEWS)
def test_trained_ids_are_the_sampled_ids(view: str) -> None:
    trajectories, advantages = batch(view)
    made = grpo.rows(trajectories, advantages)
    for j, run in enumerate(trajectories):
        own = [r for r in made if r.trajectory == j]
        trained = [i for r in own for i, m in zip(r.ids, r.loss_mask, strict=True) if m]
        assert trained == [i for t in run.turns for i in t.action_ids]
        assert sum(r.weight * sum(r.loss_mask) for r in own) == pytest.approx(1 / 8)
        assert {r.advantage for r in own} == {advantages[j]}


def test_a_run_that_generated_nothing_counts_in_n_and_has_no_row() -> None:
    run = trajectory(random.Random(0), "full", 1)
    made = grpo.rows([run, Trajectory(QUESTION)], [1.0, -1.0])
    assert [r.trajectory for r in made] == [0]
    assert made[0].weight == 1 / (2 * run.generated_tokens)


def test_rows_refuse_what_they_cannot_train() -> None:
    with pytest.raises(ValueError, match="context_ids"):
        grpo.rows([Trajectory(QUESTION, (Turn("t", action_ids=(1,)),))], [1.0])
    with pytest.raises(ValueError, match="1 trajectories but 2 advantages"):
        grpo.rows([Trajectory(QUESTION)], [1.0, 2.0])


# ---------------------------------------------------------------- plan


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_plan_is_complete_even_and_within_budget(seed: int, world: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(2, 60) for _ in range(rng.randint(1, 80))] + [150]
    made = [grpo.Row((1,) * n, (True,) * n, 1.0, 1.0, 0) for n in lengths]
    ranks = grpo.plan(made, 100, world)
    bins = [b for rank in ranks for b in rank]
    assert ranks == grpo.plan(made, 100, world)
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert all(load <= 100 for load, b in zip(loads, bins, strict=True) if len(b) > 1)
    assert [len(lengths) - 1] in bins  # longer than the budget: alone
    assert len(bins) <= 1.4 * sum(lengths) / 100 + 1 + world


def test_plan_balances_and_gives_idle_ranks_a_dummy() -> None:
    made = [grpo.Row((1,) * 10, (True,) * 10, 1.0, 1.0, 0)] * 12
    assert [[len(b) for b in rank] for rank in grpo.plan(made, 60, 2)] == [[6], [6]]
    assert grpo.plan(made[:1], 60, 3) == [[[0]], [[]], [[]]]
    assert grpo.plan([], 60, 2) == [[[]], [[]]]
    assert grpo.pack([]).weight.tolist() == [0.0]
    with pytest.raises(ValueError, match="token_budget 0"):
        grpo.plan(made, 0)


# ---------------------------------------------------------------- packing and log-probs


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_do_not_see_each_other(family: str, attention: str) -> None:
    model = tiny(family, attention)
    made = grpo.rows(*batch("oq"))
    together, _ = grpo.token_logprobs(model, grpo.pack(made), 0.7)
    alone = torch.cat([grpo.token_logprobs(model, grpo.pack([r]), 0.7)[0] for r in made])
    assert (together - alone).abs().max() < 5e-6
    assert_same(gradient(model, [grpo.pack(made)]), gradient(model, [grpo.pack([r]) for r in made]))
    # Other tokens in the first row leave every other row's bits as they were.
    other = grpo.Row(made[0].ids[::-1], made[0].loss_mask, 1.0, 1.0, 0)
    changed, _ = grpo.token_logprobs(model, grpo.pack([other, *made[1:]]), 0.7)
    first = sum(made[0].loss_mask)
    assert torch.equal(together[first:], changed[first:])
    assert not torch.equal(together[:first], changed[:first])


def test_merged_turns_have_the_log_probs_of_separate_turns() -> None:
    model, run = tiny(), trajectory(random.Random(3), "full", 3)
    merged = grpo.rows([run], [1.0])
    apart = [r for t in run.turns for r in grpo.rows([Trajectory(QUESTION, (t,))], [1.0])]
    a, _ = grpo.token_logprobs(model, grpo.pack(merged), 1.0)
    b, _ = grpo.token_logprobs(model, grpo.pack(apart), 1.0)
    assert len(merged) == 1 and len(apart) == 3
    assert (a - b).abs().max() < 5e-6


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_log_probs_and_entropy_are_those_of_the_full_forward(temperature: float) -> None:
    model, run = tiny(), trajectory(random.Random(5), "full", 2)
    (row,) = grpo.rows([run], [1.0])
    logits = model(torch.tensor([row.ids])).logits[0, :-1] / temperature
    table = logits.log_softmax(-1)
    where = [t for t in range(1, len(row.ids)) if row.loss_mask[t]]
    expected = torch.stack([table[t - 1, row.ids[t]] for t in where])
    uncertain = torch.stack([-(table[t - 1].exp() * table[t - 1]).sum() for t in where])
    logprobs, entropy = grpo.token_logprobs(model, grpo.pack([row]), temperature, entropy=True)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, uncertain)
    assert logprobs.requires_grad and not entropy.requires_grad


def test_a_small_chunk_of_logits_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packs = tiny(), [grpo.pack(grpo.rows(*batch("oq")))]
    whole = gradient(model, packs)
    monkeypatch.setattr(grpo, "LOGIT_ELEMENTS", 3 * VOCAB)
    assert_same(whole, gradient(model, packs))


def test_logit_rescaling_is_applied_or_refused() -> None:
    model, packed = tiny(), grpo.pack(grpo.rows(*batch("oq")))
    plain, _ = grpo.token_logprobs(model, packed, 1.0)
    model.config.final_logit_softcapping = 1e6  # a cap too wide to matter, then one that does
    torch.testing.assert_close(grpo.token_logprobs(model, packed, 1.0)[0], plain)
    model.config.final_logit_softcapping = 0.5
    assert grpo.token_logprobs(model, packed, 1.0)[0].min() > -math.log(VOCAB) - 1.0
    model.config.logits_scaling = 8.0
    with pytest.raises(ValueError, match="logits_scaling"):
        grpo.token_logprobs(model, packed, 1.0)
    with pytest.raises(ValueError, match="temperature 0"):
        grpo.token_logprobs(model, packed, 0.0)


# ---------------------------------------------------------------- invariants of the gradient


@pytest.mark.parametrize("view", ["full", "oq"])  # observations inside a row, and rows apart
def test_only_targets_of_generated_tokens_matter(view: str) -> None:
    model, packed = tiny(), grpo.pack(grpo.rows(*batch(view)))
    before = gradient(model, [packed])
    outside = torch.where(packed.loss_mask, packed.labels, (packed.labels + 7) % VOCAB)
    inside = torch.where(packed.loss_mask, (packed.labels + 7) % VOCAB, packed.labels)
    assert not torch.equal(outside, packed.labels)
    assert torch.equal(before, gradient(model, [replace(packed, labels=outside)]))
    assert not torch.allclose(before, gradient(model, [replace(packed, labels=inside)]))


@pytest.mark.parametrize("view", ["full", "oq"])
def test_split_accumulation_order_and_ranks_change_nothing(view: str) -> None:
    model, reference = tiny(), tiny(seed=1)
    made = grpo.rows(*batch(view))
    whole = gradient(model, [grpo.pack(made)], reference=reference)
    for budget, world in ((40, 1), (80, 1), (60, 2), (1000, 2), (1000, 16)):
        ranks = grpo.plan(made, budget, world)
        packs = [grpo.pack([made[i] for i in b]) for rank in ranks for b in rank]
        assert_same(whole, gradient(model, packs, reference=reference))


def test_permuting_a_group_changes_nothing() -> None:
    model, (trajectories, _) = tiny(), batch("oq")
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    order = [2, 0, 3, 1, 7, 5, 4, 6]
    one = grpo.rows(trajectories, grpo.advantages(rewards, 4).tolist())
    shuffled = grpo.advantages(rewards[order], 4).tolist()
    two = grpo.rows([trajectories[i] for i in order], shuffled)
    assert_same(gradient(model, [grpo.pack(one)]), gradient(model, [grpo.pack(two)]))


def test_first_pass_has_a_ratio_of_exactly_one() -> None:
    model, packed = tiny(), grpo.pack(grpo.rows(*batch("oq")))
    with torch.no_grad():
        old, _ = grpo.token_logprobs(model, packed, 0.7, entropy=True)
    new, _ = grpo.token_logprobs(model, packed, 0.7)
    assert torch.equal(new, old)
    _, stats = grpo.grpo_loss(new, old, old, packed, 0.2, 0.1)
    assert (stats["ratio_max"], stats["kl"], stats["clip_share"]) == (1.0, 0.0, 0.0)


def test_equal_rewards_and_no_kl_give_a_gradient_of_exactly_zero() -> None:
    model, (trajectories, _) = tiny(), batch("oq")
    equal = grpo.advantages(torch.full((8,), 0.1), 4).tolist()
    assert gradient(model, [grpo.pack(grpo.rows(trajectories, equal))]).abs().max() == 0.0


def test_the_dummy_contributes_exactly_nothing() -> None:
    model = tiny()
    assert gradient(model, [grpo.pack([])], reference=tiny(seed=1)).abs().max() == 0.0
    new = torch.tensor([5.0], requires_grad=True)
    loss, stats = grpo.grpo_loss(new, torch.zeros(1), torch.ones(1), grpo.pack([]), 0.2, 0.1)
    assert loss == 0.0 and not any(stats.values())


# ---------------------------------------------------------------- the loss


def test_loss_by_hand_on_two_groups() -> None:
    """Two groups of two; trajectories of 2, 1, 1 and 1 generated tokens; N = 4."""
    runs = [
        Trajectory(QUESTION, (Turn("t", answer="a", context_ids=(1,), action_ids=ids),))
        for ids in ((2, 3), (4,), (5,), (6,))
    ]
    advantage = [0.7, -0.7, 0.0, 0.0]
    packed = grpo.pack(grpo.rows(runs, advantage))
    ratios, to_reference = [1.5, 0.9, 0.5, 2.0, 1.0], [0.1, 0.0, -0.2, 0.3, 0.0]
    old = torch.tensor([-1.0, -2.0, -0.5, -1.0, -3.0])
    new = old + torch.tensor(ratios).log()
    reference = new + torch.tensor(to_reference)
    k3 = [math.exp(d) - d - 1 for d in to_reference]
    terms = [  # (1 / T_j) * (min(ratio A, clipped A) - 0.1 k3)
        (1.2 * 0.7 - 0.1 * k3[0]) / 2,  # clipped from above
        (0.9 * 0.7 - 0.1 * k3[1]) / 2,
        0.8 * -0.7 - 0.1 * k3[2],  # clipped from below: the minimum is the clipped one
        0.0 - 0.1 * k3[3],  # equal rewards: only the KL
        0.0 - 0.1 * k3[4],
    ]
    loss, stats = grpo.grpo_loss(new, old, reference, packed, 0.2, 0.1)
    assert loss.item() == pytest.approx(-sum(terms) / 4, abs=1e-6)
    assert stats["clip_share"].item() == pytest.approx((1 / 2 + 1) / 4)
    assert stats["kl"].item() == pytest.approx((k3[0] / 2 + k3[1] / 2 + sum(k3[2:])) / 4, abs=1e-6)
    assert stats["ratio_max"].item() == pytest.approx(2.0)
    with pytest.raises(ValueError, match="needs a reference"):
        grpo.grpo_loss(new, old, None, packed, 0.2, 0.1)


def test_loss_is_trls_on_single_turns(tmp_path: Path) -> None:
    """TRL's own trainer, loss_type grpo, on left-padded prompts and right-padded completions."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model, reference = tiny(), tiny(seed=1)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    model.save_pretrained(tmp_path / "base")  # TRL loads its reference by the model's name
    trainer = trl.GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(tmp_path / "base"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            loss_type="grpo",
            use_bias_correction_kl=False,
            beta=0.1,
            epsilon=0.2,
            temperature=0.7,
            num_generations=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1"] * 8}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="0", eos_token="1"
        ),
    )
    runs, advantages = batch("full")
    runs = [Trajectory(QUESTION, run.turns[:1]) for run in runs]
    packed = grpo.pack(grpo.rows(runs, advantages))
    with torch.no_grad():
        other, _ = grpo.token_logprobs(reference, packed, 0.7)
    new, _ = grpo.token_logprobs(model, packed, 0.7)
    old = new.detach() + 0.4 * torch.sin(torch.arange(len(new)).float())
    ours, _ = grpo.grpo_loss(new, old, other, packed, 0.2, 0.1)
    ours.backward()
    inputs = padded(runs) | {
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": by_run(old, runs),
        "ref_per_token_logps": by_run(other, runs),
    }
    trainer.model.eval()  # in training mode it divides by accumulation steps known to its loop
    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()
    both = (model, trainer.model)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert_same(*(torch.cat([p.grad.flatten() for p in m.parameters()]) for m in both))


def padded(runs: list[Trajectory]) -> dict[str, torch.Tensor]:
    """Lay single turns out the way TRL does."""
    turns = [run.turns[0] for run in runs]
    p, c = max(len(t.context_ids) for t in turns), max(len(t.action_ids) for t in turns)
    left = [[0] * (p - len(t.context_ids)) for t in turns]
    right = [[0] * (c - len(t.action_ids)) for t in turns]
    pairs = list(zip(turns, left, right, strict=True))
    return {
        "prompt_ids": torch.tensor([x + list(t.context_ids) for t, x, _ in pairs]),
        "prompt_mask": torch.tensor([x + [1] * len(t.context_ids) for t, x, _ in pairs]),
        "completion_ids": torch.tensor([list(t.action_ids) + x for t, _, x in pairs]),
        "completion_mask": torch.tensor([[1] * len(t.action_ids) + x for t, _, x in pairs]),
    }


def by_run(values: torch.Tensor, runs: list[Trajectory]) -> torch.Tensor:
    """Turn one value a token into a right-padded matrix, a row a run."""
    parts = values.split([run.generated_tokens for run in runs])
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
