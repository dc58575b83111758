"""Health of a training run: what a batch of trajectories looks like, and when to worry.

Published runs collapse while their score still looks fine; the thoughts degenerate first.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from crrl_lib.records import Trajectory


def describe(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares and means of one batch, all of them equal in every run of one seed.

    ``think_tokens`` is over the turns whose thought the rollout cut out (``Turn.thought_ids``).
    """
    turns = [turn for t in trajectories for turn in t.turns]
    return {
        "valid_share": _mean(t.query is not None or t.answer is not None for t in turns),
        "answered_share": _mean(bool(t.prediction) for t in trajectories),
        "searches": _mean(t.searches for t in trajectories),
        "context_tokens": _mean(t.context_tokens for t in trajectories),
        "generated_tokens": sum(t.generated_tokens for t in trajectories),
        "turn_tokens": _mean(len(t.action_ids) for t in turns),
        "think_tokens": _mean(len(t.thought_ids) for t in turns if t.thought_ids),
        "repetition": _mean(repetition(t.action_ids) for t in turns),
    }


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same action.

    >>> repetition([1, 2, 3, 4, 5]), repetition([7] * 6)
    (0.0, 0.6666666666666667)
    """
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def trouble(rows: Sequence[dict], valid_floor: float, reward_drop: float, window: int) -> str:
    """Say why the newest log row looks like a collapse; empty when it looks healthy.

    Either fewer than ``valid_floor`` of its actions are valid, or its reward is more than the share
    ``reward_drop`` below the best mean over ``window`` earlier rows in a row.
    """
    row = rows[-1]
    if row["valid_share"] < valid_floor:
        return f"valid-action share {row['valid_share']:.3f}, below valid_floor {valid_floor}"
    past = [r["reward"] for r in rows[:-1]]
    means = [statistics.fmean(past[i : i + window]) for i in range(len(past) - window + 1)]
    best = max(means, default=row["reward"])
    if row["reward"] < best - reward_drop * abs(best):
        return (
            f"reward {row['reward']:.4f}, more than reward_drop {reward_drop:.0%} below its best "
            f"mean over {window} steps, {best:.4f}"
        )
    return ""


def streak(rows: Sequence[dict], valid_floor: float, reward_drop: float, window: int) -> int:
    """How many of the newest rows in a row are in `trouble`, counted up to ``window``."""
    for back in range(min(window, len(rows))):
        if not trouble(rows[: len(rows) - back], valid_floor, reward_drop, window):
            return back
    return min(window, len(rows))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
