"""The optimizer steps of one rollout: mini-batches of whole questions, each a plain weighted sum.

Several processes share the bins of every mini-batch and sum their gradients, so their number cannot
change the objective.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crrl_lib import grpo
from crrl_lib.records import Trajectory

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class GRPOConfig:
    """Every dial of training. A step is one rollout; batches are counted in questions."""

    steps: int
    learning_rate: float = 1e-6
    questions_per_step: int = 32
    group_size: int = 4  # trajectories a question
    mini_batch_questions: int = 8  # an optimizer step: N = this * group_size trajectories
    epochs: int = 1  # passes over a rollout
    warmup_steps: int = 0  # linear, then constant
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    kl_coef: float = 0.001
    clip: float = 0.2
    temperature: float = 0.7  # that of the rollouts
    token_budget: int = (
        8192  # tokens a micro-batch; bounds memory. SDPA's mask is dense: 512 on CPUs
    )
    precision: str = "no"  # of the forward, as accelerate names it: no or bf16
    gradient_checkpointing: bool = False
    save_every: int = 10  # steps
    evaluate_every: int = 0  # steps; 0: after the last one only
    valid_floor: float = 0.2  # a step is in trouble with fewer valid actions, or
    reward_drop: float = 0.5  # with a reward this share below its best running mean;
    patience: int = 5  # that many such steps in a row are a collapse; also the mean's window
    seed: int = 0

    def __post_init__(self) -> None:
        if self.questions_per_step % self.mini_batch_questions:
            raise ValueError(
                f"questions_per_step {self.questions_per_step} is not a multiple of "
                f"mini_batch_questions {self.mini_batch_questions}; change one in params.yaml"
            )
        least = {"group_size": 2, "patience": 1, "save_every": 1, "epochs": 1, "temperature": 1e-6}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected {value} or more: see params.yaml"
                )


@dataclass(frozen=True)
class Learner:
    """What an update works with; all but the config is changed in place."""

    model: PreTrainedModel
    reference: PreTrainedModel | None
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    config: GRPOConfig


def learning_rate(config: GRPOConfig, step: int) -> float:
    """Give the rate of a step: linear warm-up, then constant."""
    return config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1))


def update(
    learner: Learner, trajectories: Sequence[Trajectory], rewards: Sequence[float], step: int
) -> dict[str, float | None]:
    """Learn from one rollout, whole groups in order; return its part of the log row.

    The old and reference log-probs of every pack come first, before any weight moves, so the first
    pass has a ratio of exactly 1; the first mini-batch of a single epoch *is* that first pass, and
    needs no forward of its own. Raises FloatingPointError before a step that is not finite.
    """
    config = learner.config
    size = config.mini_batch_questions * config.group_size
    advantages = grpo.advantages(torch.tensor(rewards), config.group_size)
    learner.model.train(config.gradient_checkpointing)  # off: the sampled policy had no dropout
    for group in learner.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    sums: Counter[str] = Counter()
    parts = zip(_cut(trajectories, size), advantages.split(size), strict=True)
    batches = [
        [
            (pack, *_before(learner, pack, sums, moved=part > 0 or config.epochs > 1))
            for pack in _packs(learner, chosen, advantage)
        ]
        for part, (chosen, advantage) in enumerate(parts)
    ]
    passes = [_step(learner, batch, sums) for batch in batches * config.epochs]
    sums, ratio_max = _across(learner, sums, max(ratio for _, ratio in passes))
    known = sums["known"]
    equal = advantages.view(-1, config.group_size).abs().amax(1) == 0
    return {
        "zero_variance_share": equal.float().mean().item(),
        "advantage_abs": advantages.abs().mean().item(),
        "kl": sums["kl"] / sums["weight"] if sums["weight"] else None,  # None: no row was run
        "clip_share": sums["clip_share"] / max(sums["weight"], 1e-12),
        "ratio_max": ratio_max,
        "entropy": sums["entropy"] / sums["once"] if sums["once"] else None,
        "sampling_gap": sums["gap"] / known if known else None,  # engine against trainer, a token
        "grad_norm": sum(norm for norm, _ in passes) / len(passes),
        "train_tokens": int(sums["tokens"]),  # forwarded with gradient
        "lr": learning_rate(config, step),
    }


def _cut(trajectories: Sequence[Trajectory], size: int) -> list[Sequence[Trajectory]]:
    return [trajectories[i : i + size] for i in range(0, len(trajectories), size)]


def _packs(
    learner: Learner, trajectories: Sequence[Trajectory], advantages: Tensor
) -> list[grpo.Pack]:
    """Make this process's micro-batches of one optimizer step."""
    rows = grpo.rows(trajectories, advantages.tolist())
    if not learner.config.kl_coef:  # nothing to learn from these; they were counted in N
        rows = [row for row in rows if row.advantage]
    accelerator = learner.accelerator
    bins = grpo.plan(rows, learner.config.token_budget, accelerator.num_processes)
    own = bins[accelerator.process_index]
    return [grpo.pack([rows[i] for i in chosen]).to(accelerator.device) for chosen in own]


@torch.no_grad()
def _before(
    learner: Learner, pack: grpo.Pack, sums: Counter[str], moved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Old and reference log-probs (n,) of a pack; no old ones unless weights have ``moved``."""
    temperature, old, reference = learner.config.temperature, None, None
    with learner.accelerator.autocast():
        if moved:
            old, entropy = grpo.token_logprobs(learner.model, pack, temperature, entropy=True)
            _note(pack, old, entropy, sums)
        if learner.reference is not None:
            reference, _ = grpo.token_logprobs(learner.reference, pack, temperature)
    return old, reference


def _note(pack: grpo.Pack, old: Tensor, entropy: Tensor, sums: Counter[str]) -> None:
    """Add a pack's entropy and the gap between engine and trainer to ``sums``."""
    known = torch.isfinite(pack.sampled)
    gap = (old - pack.sampled)[known].abs().sum()
    sums.update(
        once=pack.weight.sum().item(),
        entropy=(pack.weight * entropy).sum().item(),
        known=known.sum().item(),
        gap=gap.item(),
    )


def _step(
    learner: Learner,
    batch: Sequence[tuple[grpo.Pack, Tensor | None, Tensor | None]],
    sums: Counter[str],
) -> tuple[float, float]:
    """One optimizer step over its packs; return the gradient norm and the largest ratio."""
    config, accelerator = learner.config, learner.accelerator
    total, ratio_max = torch.zeros((), device=accelerator.device), 0.0
    for pack, old, reference in batch:
        with accelerator.autocast():
            first = old is None
            new, entropy = grpo.token_logprobs(learner.model, pack, config.temperature, first)
        if first:
            old = new.detach()
            _note(pack, old, entropy, sums)
        loss, stats = grpo.grpo_loss(new, old, reference, pack, config.clip, config.kl_coef)
        accelerator.backward(loss)
        total += loss.detach()
        ratio_max = max(ratio_max, stats.pop("ratio_max").item())
        sums.update({name: value.item() for name, value in stats.items()}, tokens=pack.ids.numel())
    weights = [p for p in learner.model.parameters() if p.requires_grad]
    if accelerator.num_processes > 1:
        total = accelerator.reduce(total, "sum")
        for p in weights:
            own = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = accelerator.reduce(own, "sum")
    norm = float(accelerator.clip_grad_norm_(weights, config.max_grad_norm))
    if not (math.isfinite(norm) and math.isfinite(total)):
        raise FloatingPointError(f"loss {total.item()} with gradient norm {norm}")
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    return norm, ratio_max


def _across(learner: Learner, sums: Counter[str], ratio_max: float) -> tuple[Counter[str], float]:
    """Join what the processes saw: add the sums up, take the largest ratio."""
    accelerator, names = learner.accelerator, sorted(sums)
    if accelerator.num_processes == 1:
        return sums, ratio_max
    own = torch.tensor([[sums[n] for n in names] + [ratio_max]], device=accelerator.device)
    seen = accelerator.gather(own)  # (processes, names + 1)
    added = dict(zip(names, seen[:, :-1].sum(0).tolist(), strict=True))
    return Counter(added), seen[:, -1].max().item()
