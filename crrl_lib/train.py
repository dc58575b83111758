"""The training loop around `update`: roll out, reward, learn; log, watch, save, resume.

Rollouts are the caller's and never collective: each process rolls out its share of the questions,
whole groups, and trajectories are exchanged afterwards.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import load_model, save_model

from crrl_lib import health
from crrl_lib.records import Question, Trajectory
from crrl_lib.update import GRPOConfig, Learner, update

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from crrl_lib.scratch import Scratch

MODEL, BEST, TRAINER, LOG = "model.safetensors", "best.safetensors", "trainer.pt", "log.json"


class TrainingCollapsed(RuntimeError):
    """Training was stopped; the message says what was seen and which checkpoint is good."""


@dataclass
class Training:
    """The course of a run. Seconds are kept apart: they differ between otherwise equal runs."""

    rows: list[dict] = field(default_factory=list)  # one a step
    timing: list[dict] = field(default_factory=list)
    best_step: int = 0  # steps done at the checkpoint with the best recent reward
    best_reward: float = -math.inf


def train(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    questions: Sequence[Question],
    roll: Callable[[Sequence[Question], int, int], list[Trajectory]],
    reward: Callable[[Trajectory], float],
    config: GRPOConfig,
    scratch: Scratch | None,
    log: Callable[[dict, dict], None],
    on_sync: Callable[[], None] = lambda: None,
    evaluate: Callable[[int], Mapping[str, float]] | None = None,
    measures: Mapping[str, Callable[[Trajectory], float]] | None = None,
) -> Training:
    """Train ``model`` in place with GRPO, resuming from ``scratch``, which the caller clears.

    ``roll(questions, step, seed)`` gives ``group_size`` trajectories a question, in order; ``log``
    gets each row and its seconds; ``on_sync`` runs before the first rollout and after each update;
    ``measures`` are means over trajectories to log (EM, say). A resumed run ends with the weights
    and rows of an uninterrupted one. Raises `TrainingCollapsed`.
    """
    state = _restore(learner := _prepare(model, reference, questions, config), scratch)
    on_sync()
    for step in range(len(state.rows), config.steps):
        start = time.perf_counter()
        trajectories = _collect(learner, roll, questions, step)
        rolled = time.perf_counter()
        try:
            row = _learn(learner, trajectories, reward, measures or {}, step)
        except FloatingPointError as error:
            raise _collapsed(str(error), step, state, scratch) from error
        learnt = time.perf_counter()
        on_sync()
        if evaluate and _due(step, config.evaluate_every, config):
            row |= {f"eval_{k}": v for k, v in evaluate(step + 1).items()}
        state.rows.append(row)
        state.timing.append({"step": step, "rollout": rolled - start, "train": learnt - rolled})
        log(row, state.timing[-1])
        if _healthy(state, config, scratch) and _due(step, config.save_every, config):
            _save(learner, state, scratch)
    return state


def choose(questions: Sequence[Question], position: int, config: GRPOConfig) -> list[Question]:
    """Take a step's questions at a data position: one seeded permutation after the other."""
    chosen: list[Question] = []
    while len(chosen) < config.questions_per_step:
        epoch, start = divmod(position + len(chosen), len(questions))
        order = np.random.default_rng([config.seed, epoch]).permutation(len(questions))
        chosen += [questions[i] for i in order[start:]][: config.questions_per_step - len(chosen)]
    return chosen


def _due(step: int, every: int, config: GRPOConfig) -> bool:
    return step + 1 == config.steps or (every > 0 and (step + 1) % every == 0)


def _prepare(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    questions: Sequence[Question],
    config: GRPOConfig,
) -> Learner:
    if len(questions) < config.questions_per_step:
        raise ValueError(
            f"{len(questions)} training questions, fewer than questions_per_step "
            f"{config.questions_per_step}: add questions, or lower it in params.yaml"
        )
    if reference is model or (reference is None and config.kl_coef):
        raise ValueError(
            f"kl_coef {config.kl_coef} needs a reference model of its own, a frozen copy of the "
            "starting policy: pass one, or set kl_coef to 0 and pass None"
        )
    weights = [p for p in model.parameters() if p.requires_grad]
    if any(p.dtype != torch.float32 for p in weights):
        raise ValueError(
            f"trainable weights are {weights[0].dtype}, where small updates round away: load the "
            "policy in float32 and set precision to bf16"
        )
    accelerator = Accelerator(mixed_precision=config.precision)
    if config.questions_per_step % accelerator.num_processes:
        raise ValueError(
            f"questions_per_step {config.questions_per_step} does not divide among "
            f"{accelerator.num_processes} processes; change it in params.yaml"
        )
    # Not wrapped in DDP: `grpo` calls decoder and head by themselves, and the loss is a sum over
    # all processes, not their mean; `update` sums the gradients.
    model.to(accelerator.device)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if reference is not None:
        reference.to(accelerator.device).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(weights, config.learning_rate, weight_decay=config.weight_decay)
    return Learner(model, reference, accelerator.prepare(optimizer), accelerator, config)


def _collect(
    learner: Learner, roll: Callable, questions: Sequence[Question], step: int
) -> list[Trajectory]:
    """Roll out this process's share of the step, then exchange: whole groups, in order."""
    config, rank = learner.config, learner.accelerator.process_index
    batch = choose(questions, step * config.questions_per_step, config)
    share = len(batch) // learner.accelerator.num_processes
    mine, group = batch[rank * share : (rank + 1) * share], config.group_size
    seed = np.random.SeedSequence([config.seed, step, rank]).generate_state(1)[0]
    learner.model.eval()
    trajectories = roll(mine, step, int(seed))
    if [t.question.id for t in trajectories] != [q.id for q in mine for _ in range(group)]:
        raise ValueError(
            f"the rollout's {len(trajectories)} trajectories are not {group} in a row for each of "
            f"{len(mine)} questions: advantages would mix questions; correct roll"
        )
    return gather_object(trajectories)


def _learn(
    learner: Learner,
    trajectories: Sequence[Trajectory],
    reward: Callable[[Trajectory], float],
    measures: Mapping[str, Callable[[Trajectory], float]],
    step: int,
) -> dict[str, float]:
    """Reward and update; return the log row. Nothing is learnt from invalid actions alone."""
    rewards = [float(reward(t)) for t in trajectories]
    row = {"step": step, "reward": sum(rewards) / len(rewards)}
    row |= {k: sum(map(f, trajectories)) / len(trajectories) for k, f in measures.items()}
    row |= health.describe(trajectories)
    if not row["valid_share"]:
        raise FloatingPointError("no action of the whole batch is valid")
    return row | update(learner, trajectories, rewards, step)


def _healthy(state: Training, config: GRPOConfig, scratch: Scratch | None) -> bool:
    """Whether the newest step is in no trouble; raises when too many in a row were."""
    limits = (config.valid_floor, config.reward_drop, config.patience)
    in_a_row = health.streak(state.rows, *limits)
    if in_a_row >= config.patience:
        seen = health.trouble(state.rows, *limits)
        seen += f"; {in_a_row} such steps in a row"
        raise _collapsed(seen, len(state.rows) - 1, state, scratch)
    return not in_a_row  # a step in trouble is not saved: what is saved last is healthy


def _collapsed(seen: str, step: int, state: Training, scratch: Scratch | None) -> TrainingCollapsed:
    saved = scratch.load() if scratch else None
    good = "no checkpoint was saved yet: start again from the initial weights"
    if saved:
        good = (
            f"last healthy checkpoint: {saved[1] / MODEL}, after {saved[0]} steps; best by recent "
            f"reward ({state.best_reward:.4f}): {saved[1] / BEST}, after {state.best_step}"
        )
    return TrainingCollapsed(
        f"training stopped at step {step}: {seen}; {good}. Lower learning_rate or raise kl_coef in "
        "params.yaml; valid_floor, reward_drop and patience set the alarm"
    )


def _save(learner: Learner, state: Training, scratch: Scratch | None) -> None:
    """Save everything a rerun needs; the best checkpoint so far travels along."""
    if scratch is None or not learner.accelerator.is_main_process:
        return
    done, previous = len(state.rows), scratch.load()
    recent = float(np.mean([r["reward"] for r in state.rows[-learner.config.patience :]]))
    best = partial(save_model, learner.model)
    if previous is None or recent > state.best_reward:
        state.best_step, state.best_reward = done, recent
    else:
        best = partial(shutil.copyfile, previous[1] / BEST)
    kept = {"optimizer": learner.optimizer.state_dict(), "random": _random_state()}
    log = json.dumps(asdict(state)).encode()
    files = {MODEL: partial(save_model, learner.model), BEST: best, LOG: log}
    scratch.save(done, files | {TRAINER: partial(torch.save, kept)})


def _restore(learner: Learner, scratch: Scratch | None) -> Training:
    """Continue from what was saved last, if anything was."""
    saved = scratch.load() if scratch else None
    if saved is None:
        return Training()
    path = Path(saved[1])
    load_model(learner.model, path / MODEL, device=str(learner.accelerator.device))
    kept = torch.load(path / TRAINER, weights_only=False)  # our own file: RNG states are objects
    learner.optimizer.load_state_dict(kept["optimizer"])
    random.setstate(kept["random"]["python"])
    np.random.set_state(kept["random"]["numpy"])  # noqa: NPY002 - others may use the global one
    torch.set_rng_state(kept["random"]["torch"])
    if kept["random"]["cuda"]:
        torch.cuda.set_rng_state_all(kept["random"]["cuda"])
    return Training(**json.loads((path / LOG).read_text()))


def _random_state() -> dict:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
