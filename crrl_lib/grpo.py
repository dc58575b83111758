"""GRPO on ragged trajectories, as pure tensors: advantages, rows, packing plan, log-probs, loss.

Equations are the CRRL paper's: 8 for the advantage, 4-7 for the loss. A trajectory is a set of
(context, action) pairs that share one advantage; an optimizer step is a plain weighted sum over
generated tokens, so packing, accumulation and ranks cannot change the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crrl_lib.records import Trajectory

EPSILON = 1e-6  # of the advantage; eq. 8 prints none
LOGIT_ELEMENTS = 2**26  # logits alive at once in `token_logprobs`: 256 MiB in fp32


@dataclass(frozen=True)
class Row:
    """One training sequence: the turns of a trajectory that extend one another."""

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True where the policy generated the token
    weight: float  # of each generated token: 1 / (N * T_j)
    advantage: float
    trajectory: int  # index into the trajectories of the optimizer step
    sampled: tuple[float, ...] | None = None  # the engine's log-probs, one a generated token


@dataclass(frozen=True)
class Pack:
    """Rows laid end to end without padding: T tokens, n of them generated."""

    ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T), restarting at 0 with every row
    labels: Tensor  # (1, T), the token that follows in the same row
    loss_mask: Tensor  # (1, T) bool: the label was generated; no other label is ever read
    weight: Tensor  # (n,), and so below: one value a generated token
    advantage: Tensor
    row: Tensor  # index into the packed rows
    sampled: Tensor  # the engine's log-probs, NaN where unknown

    def to(self, device: torch.device | str) -> Pack:
        """Copy the pack to another device."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()})


# Stands in for "no rows": a rank without work still runs a forward and a backward, of weight 0.
DUMMY = Row(ids=(0, 0), loss_mask=(False, True), weight=0.0, advantage=0.0, trajectory=-1)


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Standardise rewards (N,) within groups of neighbours, eq. 8: sample deviation, n - 1.

    Equal rewards give exactly 0. Raises on a group of one, a partial group, a reward not finite.

    >>> advantages(torch.tensor([1.0, 0.0, 0.5, 0.5]), 2)
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    if group_size < 2 or rewards.ndim != 1 or len(rewards) == 0 or len(rewards) % group_size:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} with group_size {group_size}: expected whole "
            "groups of 2 or more in one dimension; change group_size, or what the rollout returns"
        )
    if not torch.isfinite(rewards).all():
        bad = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
        raise ValueError(f"rewards {bad} are not finite; correct the reward function")
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    scaled = centred / (groups.std(1, keepdim=True) + EPSILON)
    # The mean of equal floats can be an ulp off, which EPSILON would blow up into a signal.
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return scaled.masked_fill(equal, 0.0).flatten()


def rows(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], count: int | None = None
) -> list[Row]:
    """Cut the trajectories of one optimizer step into rows; ids stay as they were sampled.

    One row a turn, except that a turn whose context exactly extends the row so far is merged into
    it, the observation between them masked: the full view gives one row a trajectory. ``count`` is
    N of the loss, by default all of ``trajectories``; one without a generated token counts too.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(f"{len(trajectories)} trajectories but {len(advantages)} advantages")
    out: list[Row] = []
    for j, trajectory in enumerate(trajectories):
        weight = 1.0 / ((count or len(trajectories)) * max(trajectory.generated_tokens, 1))
        own: list[Row] = []
        for turn in (t for t in trajectory.turns if t.action_ids):
            if not turn.context_ids:
                raise ValueError(
                    f"a turn of question {trajectory.question.id!r} has no context_ids, so nothing "
                    "predicts its first token; the rollout must keep them"
                )
            ids = turn.context_ids + turn.action_ids
            mask = (False,) * len(turn.context_ids) + (True,) * len(turn.action_ids)
            sampled = turn.logprobs if len(turn.logprobs) == len(turn.action_ids) else None
            row = Row(ids, mask, weight, float(advantages[j]), j, sampled)
            if own and turn.context_ids[: len(own[-1].ids)] == own[-1].ids:
                row = _merged(own.pop(), row)
            own.append(row)
        out += own
    return out


def _merged(head: Row, tail: Row) -> Row:
    """One row out of two, the ids of ``tail`` beginning with those of ``head``."""
    mask = head.loss_mask + tail.loss_mask[len(head.ids) :]
    known = head.sampled is not None and tail.sampled is not None
    return replace(tail, loss_mask=mask, sampled=head.sampled + tail.sampled if known else None)


def plan(rows: Sequence[Row], token_budget: int, world: int = 1) -> list[list[list[int]]]:
    """Share rows out: for each rank its bins of row indices, as many bins on every rank.

    Deterministic. Bins are balanced and hold at most ``token_budget`` tokens, except that a longer
    row gets a bin of its own. A bin may be empty, which `pack` turns into a dummy of weight 0: no
    rank runs short of micro-batches, so unequal work cannot deadlock.
    """
    if token_budget < 1 or world < 1:
        raise ValueError(f"token_budget {token_budget} and world {world} must be 1 or more")
    lengths = [len(row.ids) for row in rows]
    fewest = max(-(-sum(lengths) // token_budget), sum(2 * n > token_budget for n in lengths), 1)
    count = -(-fewest // world) * world
    while (bins := _fill(lengths, count, token_budget)) is None:
        count += world
    bins.sort(key=lambda filled: (-sum(lengths[i] for i in filled), filled))
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    for k, filled in enumerate(bins):  # dealt out in a snake: neighbours run at the same time
        lap, seat = divmod(k, world)
        ranks[seat if lap % 2 == 0 else world - 1 - seat].append(filled)
    return ranks


def _fill(lengths: Sequence[int], count: int, token_budget: int) -> list[list[int]] | None:
    """Longest row first into the lightest of ``count`` bins; None when they do not suffice."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        k = loads.index(min(loads))
        if loads[k] and loads[k] + lengths[i] > token_budget:
            return None
        bins[k].append(i)
        loads[k] += lengths[i]
    return [sorted(filled) for filled in bins]


def pack(rows: Sequence[Row]) -> Pack:
    """Lay rows end to end; no rows give the dummy."""
    rows = rows or [DUMMY]
    counts = torch.tensor([sum(row.loss_mask) for row in rows])
    sampled = [row.sampled or (torch.nan,) * sum(row.loss_mask) for row in rows]
    return Pack(
        ids=torch.tensor([[i for row in rows for i in row.ids]]),
        position_ids=torch.cat([torch.arange(len(row.ids)) for row in rows])[None],
        labels=torch.tensor([[i for row in rows for i in (*row.ids[1:], 0)]]),
        loss_mask=torch.tensor([[m for row in rows for m in (*row.loss_mask[1:], False)]]),
        weight=torch.tensor([row.weight for row in rows]).repeat_interleave(counts),
        advantage=torch.tensor([row.advantage for row in rows]).repeat_interleave(counts),
        row=torch.arange(len(rows)).repeat_interleave(counts),
        sampled=torch.tensor([p for values in sampled for p in values]),
    )


def token_logprobs(
    model: nn.Module, pack: Pack, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (n,) of generated tokens at the sampling temperature, and their entropies (n,).

    Only hidden states before a generated token reach the LM head, a bounded chunk at a time, and a
    chunk's logits are recomputed in backward. Entropies carry no gradient; None unless asked for.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: expected the sampling temperature, above 0")
    config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise ValueError(f"{config.model_type} has {name}, which token_logprobs does not apply")
    # With neither mask nor cache, transformers reads row borders off the restarting position_ids
    # (masking_utils.find_packed_sequence_indices): both arguments matter.
    hidden = model.get_decoder()(
        input_ids=pack.ids, position_ids=pack.position_ids, attention_mask=None, use_cache=False
    ).last_hidden_state[pack.loss_mask]
    chunk = max(1, LOGIT_ELEMENTS // config.vocab_size)
    cap = getattr(config, "final_logit_softcapping", None)
    shared = (model.get_output_embeddings(), temperature, cap, entropy)
    quiet = {"use_reentrant": False, "preserve_rng_state": False}
    recompute = torch.is_grad_enabled() and len(hidden) > chunk
    parts = [
        checkpoint(_score, *part, *shared, **quiet) if recompute else _score(*part, *shared)
        for part in zip(hidden.split(chunk), pack.labels[pack.loss_mask].split(chunk), strict=True)
    ]
    entropies = torch.cat([e for _, e in parts]) if entropy else None
    return torch.cat([p for p, _ in parts]), entropies


def _score(
    states: Tensor, labels: Tensor, head: nn.Module, temperature: float, cap: float | None, entropy
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies (c,) of ``labels`` (c,) from hidden states (c, H), in fp32."""
    logits = head(states).float()
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    norm = logits.logsumexp(-1)
    logprobs = logits.gather(-1, labels[:, None])[:, 0] - norm
    if not entropy:
        return logprobs, None
    scores = logits.detach()
    return logprobs, norm.detach() - (scores.softmax(-1) * scores).sum(-1)


def grpo_loss(
    new: Tensor, old: Tensor, reference: Tensor | None, pack: Pack, clip: float, kl_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 4-7 on one pack; the sum over the packs of an optimizer step is the objective.

    ``new``, ``old``, ``reference``: log-probs (n,) under the policy in training, the policy that
    sampled (eq. 7 prints the reference there; corrected) and the reference, which may be None when
    ``kl_coef`` is 0. The stats are sums over tokens, weighted like the loss, and ``ratio_max``.
    """
    if reference is None and kl_coef:
        raise ValueError(f"kl_coef {kl_coef} needs a reference model: pass one, or set it to 0")
    ratio = (new - old).exp()
    free, clipped = ratio * pack.advantage, ratio.clamp(1 - clip, 1 + clip) * pack.advantage
    gain = torch.minimum(free, clipped)
    gap = torch.zeros_like(new) if reference is None else reference - new
    kl = gap.exp() - gap - 1  # k3: non-negative, 0 at equality
    objective = gain - kl_coef * kl if kl_coef else gain  # 0 * inf would be NaN
    with torch.no_grad():
        stats = {
            "weight": pack.weight.sum(),
            "kl": (pack.weight * kl).sum(),
            "clip_share": (pack.weight * (free > clipped)).sum(),  # where clipping stops learning
            "ratio_max": ratio.masked_fill(pack.weight == 0, 0.0).max(),  # not the dummy's
        }
    return -(pack.weight * objective).sum(), stats
