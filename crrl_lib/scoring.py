"""Scores: answers against golds, evidence recall of a trajectory, intervals and paired tests.

SQuAD's normalisation made Unicode-aware; a method's summary is computed from its question rows, so
every published number can be derived again from the rows a stage stores.
"""

from __future__ import annotations

import math
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from crrl_lib.records import Trajectory

_ARTICLES = {"a", "an", "the"}
# Marks used as apostrophes, and the minus and fraction slash, that Unicode does not class as
# punctuation; NFKC turns the first into a space and a loose accent, so they go before it.
_LOOSE_MARKS = str.maketrans("", "", "\u00b4\u02b9\u02bb\u02bc\u2212\u2044\u2215")
_LENGTHS = ("context_tokens", "context_tokens_peak", "total_tokens", "generated_tokens")
_MEANS = ("f1", "cover_em", "answered", *_LENGTHS)  # summarised under the row's own name

Metrics = dict[str, float | int | None]
Seed = np.random.Generator | int


class _Punctuation(dict):
    """A ``str.translate`` table without punctuation and format characters, filled on demand."""

    def __missing__(self, code: int) -> int | None:
        char, kind = chr(code), unicodedata.category(chr(code))
        self[code] = None if char in string.punctuation or kind[0] == "P" or kind == "Cf" else code
        return self[code]


_PUNCTUATION = _Punctuation()


@lru_cache(maxsize=1 << 16)
def normalise(text: str) -> str:
    """Lower-case, unify Unicode forms, strip punctuation, articles and surplus spaces.

    Composed and decomposed accents, curly and straight quotes, and all dashes become equal; an
    accented letter stays different from the plain one.

    >>> normalise("The “Café–Bar”,  a\u00a0Bar!")
    'cafébar bar'
    """
    text = text.translate(_LOOSE_MARKS)
    if not text.isascii():
        # Case-folding is closed under NFKC only when it starts from NFD (Unicode, chapter 3.13).
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", text).casefold())
    text = text.casefold().translate(_LOOSE_MARKS).translate(_PUNCTUATION)
    # Once more: letters that were parted by a mark may compose now.
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(w for w in words if w not in _ARTICLES)


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the prediction equals an accepted answer after normalisation.

    A gold that normalises to nothing ("The", "?") is compared as written, outer blanks apart; an
    empty prediction never matches.
    """
    if not prediction.strip():
        return False
    pairs = [(gold, normalise(gold)) for gold in _aliases(answers)]
    plain = normalise(prediction)
    return any(plain == g if g else prediction.strip() == gold.strip() for gold, g in pairs)


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Token F1 with the best accepted answer, in 0–1."""
    return max((_f1(prediction, gold) for gold in _aliases(answers)), default=0.0)


def contains(text: str, answers: Sequence[str]) -> bool:
    """Whether an accepted answer stands in ``text`` as a run of whole words, both normalised."""
    # A gold of articles or punctuation alone is looked for as written.
    pairs = [
        (g, normalise(text)) if (g := normalise(gold)) else (gold.strip(), text.strip())
        for gold in _aliases(answers)
    ]
    return any(gold and f" {gold} " in f" {text} " for gold, text in pairs)


cover_em = contains  # of a prediction


def recalled(trajectory: Trajectory) -> bool:
    """Whether any retrieved document, title or text, holds a gold, at any step."""
    passages = [p for turn in trajectory.turns for p in turn.passages]
    texts = (part for p in passages for part in (p.title, p.text))
    return any(contains(text, trajectory.question.answers) for text in texts)


def recalled_refined(trajectory: Trajectory) -> bool:
    """Whether any observation, as the policy read it, holds a gold."""
    return any(contains(t.observation, trajectory.question.answers) for t in trajectory.turns)


def recalled_loose(trajectory: Trajectory) -> bool:
    """Apply the authors' definition: a gold is a raw substring of anything in the generation.

    A right answer is in the generation too, so this says little; kept to compare with the paper.
    """
    texts = ((t.thought, t.query or "", t.answer or "", t.observation) for t in trajectory.turns)
    whole = "\n".join(text for turn in texts for text in turn)
    return any(gold in whole for gold in _aliases(trajectory.question.answers) if gold)


def reward_em(trajectory: Trajectory) -> float:
    """CRRL's reward: 1 for an exactly right final answer, 0 otherwise, invalid runs included."""
    right = exact_match(trajectory.prediction, trajectory.question.answers)
    return float(right and trajectory.end != "invalid")


def reward_f1(trajectory: Trajectory) -> float:
    """Token F1 of the final answer in 0–1, a denser reward to compare with; 0 for invalid runs."""
    valid = trajectory.end != "invalid"
    return f1(trajectory.prediction, trajectory.question.answers) if valid else 0.0


REWARDS = {"em": reward_em, "f1": reward_f1}  # method.crrl_grpo.reward


def question_rows(trajectories: Iterable[Trajectory]) -> list[dict]:
    """One flat row a trajectory, ready for parquet; ``summarise_rows`` needs nothing else."""
    return [_row(t) for t in trajectories]


def summarise(trajectories: Sequence[Trajectory], **options) -> Metrics:
    """Summarise one method's trajectories; the options are those of ``summarise_rows``."""
    read = any(t.prompt not in ("direct", "cot") for t in trajectories)  # those retrieve nothing
    return summarise_rows(question_rows(trajectories), retrieval=read, **options)


def summarise_rows(rows: Sequence[Mapping], *, retrieval: bool = True, **bootstrap) -> Metrics:
    """One method's metrics from its question rows: shares in 0–1, lengths in tokens a question.

    ``retrieval=False`` (Direct, CoT) makes every recall null: it is undefined there, not zero.
    Further options go to ``bootstrap_interval``.
    """
    if not rows:
        raise ValueError("no trajectory to summarise; expected at least one question to be run")

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], dtype=float)

    em, hit = column("em"), column("recalled")
    recalls = {
        "recall_rate": hit,
        "recall_rate_refined": column("recalled_refined"),
        "recall_accuracy": hit * em,
        "recall_rate_loose": column("recalled_loose"),
        "internal": (1 - hit) * em,  # answered right without recall
    }
    return {
        "n": len(rows),
        "em": float(em.mean()),
        **dict(zip(("em_low", "em_high"), bootstrap_interval(em, **bootstrap), strict=True)),
        "art": float(column("searches").mean()),
        **{name: float(column(name).mean()) for name in _MEANS},
        **{name: float(v.mean()) if retrieval else None for name, v in recalls.items()},
        "valid_actions": float(column("valid_turns").sum() / max(1, column("turns").sum())),
    }


def bootstrap_interval(
    values: Sequence[float], rng: Seed = 0, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over questions: ``(low, high)``."""
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"expected a non-empty vector of values, got shape {values.shape}")
    rng = np.random.default_rng(rng)
    block = max(1, 2_000_000 // values.size)  # resamples drawn at a time: bounds the memory
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    means = [values[rng.integers(values.size, size=(n, values.size))].mean(1) for n in sizes]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


class Difference(NamedTuple):
    """Mean of a − b over the same questions, its interval, and McNemar's exact p for 0/1 scores."""

    mean: float
    low: float
    high: float
    p_value: float | None


def paired_difference(a: Sequence[float], b: Sequence[float], **bootstrap) -> Difference:
    """Compare two methods question by question; options as in ``bootstrap_interval``."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"expected paired scores of one length, got {a.shape} and {b.shape}")
    low, high = bootstrap_interval(a - b, **bootstrap)
    binary = np.isin(np.concatenate([a, b]), (0.0, 1.0)).all()
    p_value = mcnemar(int((a > b).sum()), int((a < b).sum())) if binary else None
    return Difference(float((a - b).mean()), low, high, p_value)


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided McNemar p-value from the two discordant counts."""
    n, k = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def _row(t: Trajectory) -> dict:
    answers, prediction = t.question.answers, t.prediction
    return {
        "id": t.question.id,
        "family": t.question.family,
        "hops": t.question.hops,
        "question": t.question.text,
        "answers": list(answers),
        "prediction": prediction,
        "end": t.end,
        "em": float(exact_match(prediction, answers)),
        "f1": f1(prediction, answers),
        "cover_em": float(cover_em(prediction, answers)),
        "answered": float(bool(prediction.strip())),
        "recalled": float(recalled(t)),
        "recalled_refined": float(recalled_refined(t)),
        "recalled_loose": float(recalled_loose(t)),
        "searches": t.searches,
        "turns": len(t.turns),
        "valid_turns": sum(turn.query is not None or turn.answer is not None for turn in t.turns),
        **{name: getattr(t, name) for name in _LENGTHS},
    }


def _f1(prediction: str, gold: str) -> float:
    predicted, expected = normalise(prediction).split(), normalise(gold).split()
    if not expected:
        return float(exact_match(prediction, [gold]))
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))


def _aliases(answers: Sequence[str]) -> Sequence[str]:
    if isinstance(answers, str):
        raise TypeError(f"accepted answers must be a list of texts, got the text {answers!r}")
    return answers
