"""Refiners: what is done to newly retrieved passages before the policy reads them (RQ 2).

Every refiner is a callable from requests to refined texts (``records.Refine``). One LM refiner
serves Self-Refine (the policy's own engine), a teacher and the trained Context Refiner: the engine
differs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from crrl_lib.protocol import (
    NOTHING_RELEVANT,
    neutralise,
    prompt_text,
    render_passages,
    split_sentences,
)
from crrl_lib.records import Engine, Passage, Refined, RefineRequest, Sampling

_BLOCK = re.compile(  # a title may hold brackets of its own; a line may hold several blocks
    r"\(Title: (?P<title>(?:[^()\n]|\([^()\n]*\))*)\) ?(?P<text>(?:(?!\(Title: ).)*)"
)


def keep_all(requests: Sequence[RefineRequest]) -> list[Refined]:
    """No refiner: the observation is the passages themselves."""
    return [Refined(render_passages(r.passages)) for r in requests]


@dataclass(frozen=True)
class Threshold:
    """Keep passages whose retrieval score is at least ``least`` (Table 8's ranking baseline).

    Look at the score histogram of notebook 01 first: cosines of E5 sit between 0.7 and 1.0, where
    the paper's thresholds of 0.2 and 0.5 filter nothing.
    """

    least: float

    def __call__(self, requests: Sequence[RefineRequest]) -> list[Refined]:
        """Filter each request; raise when a passage came without a score."""
        return [self._one(r) for r in requests]

    def _one(self, request: RefineRequest) -> Refined:
        if any(p.score is None for p in request.passages):
            raise ValueError(
                "the threshold refiner needs scored passages, but the search gave none; "
                "use a retriever that returns scores or another refiner"
            )
        kept = tuple(i for i, p in enumerate(request.passages) if p.score >= self.least)
        text = render_passages([request.passages[i] for i in kept])
        return Refined(text or NOTHING_RELEVANT, kept=kept)


@dataclass
class LMRefiner:
    """Refine with a language model: one prompt, one generation a request.

    ``grounded`` replaces every refined sentence by the passage sentence it comes closest to, so
    that nothing can be added and a small model's slips in copying are mended. ``remember`` keeps
    results of a frozen, greedy model: the same query on the same passages is not generated twice.
    """

    engine: Engine
    form: str
    sampling: Sampling
    grounded: bool = False
    remember: bool = False
    kind: str = "refine"  # which prompt of ``form``; it is given query and documents
    _seen: dict[tuple, Refined] = field(default_factory=dict, repr=False)

    def __call__(self, requests: Sequence[RefineRequest]) -> list[Refined]:
        """Refine the distinct requests in one batch; each is charged what it costs alone."""
        keys = [(r.query, tuple(p.id for p in r.passages)) for r in requests]
        known = self._seen if self.remember else {}
        todo = {k: r for k, r in zip(keys, requests, strict=True) if k not in known}
        prompts = [self.prompt(r.query, r.passages) for r in todo.values()]
        made = self.engine.generate(prompts, self.sampling) if prompts else []
        for (key, request), prompt, generation in zip(todo.items(), prompts, made, strict=True):
            text = self.engine.decode(generation.ids).strip()
            if self.grounded:
                text = ground(text, request.passages)
            spent = len(prompt) + len(generation.ids)
            known[key] = Refined(text or NOTHING_RELEVANT, spent)
        return [known[k] for k in keys]

    def prompt(self, query: str, passages: Sequence[Passage]) -> list[int]:
        """Ids of the refine prompt."""
        parts = {"query": neutralise(query), "documents": render_passages(passages)}
        return self.engine.chat(prompt_text(self.form, self.kind, **parts))


def similarity(a: str, b: str) -> float:
    """Jaccard overlap of letter trigrams, 1 for equal texts.

    >>> similarity("Bonn", "Bonn")
    1.0
    """
    grams = [{f" {s.lower()} "[i : i + 3] for i in range(len(s))} for s in (a, b)]
    return len(grams[0] & grams[1]) / max(1, len(grams[0] | grams[1]))


def ground(refined: str, passages: Sequence[Passage], least: float = 0.3) -> str:
    """Snap each refined sentence to the passage sentence it comes closest to.

    Closeness is a mean of title and sentence similarity in which a title counts double: a model
    gets the name right more often than the wording, and homonyms are told apart by the sentence.
    Below ``least`` a sentence is dropped; that is a low bar, because one lost costs more than one
    too many. Order of first mention is kept.
    """
    source = [(i, s) for i, p in enumerate(passages) for s in split_sentences(p.text)]
    kept: dict[int, list[str]] = {}
    for title, sentence in titled_sentences(refined):
        scores = [_closeness(title, sentence, passages[i].title, s) for i, s in source]
        best = max(range(len(source)), key=scores.__getitem__, default=None)
        if best is not None and scores[best] >= least:
            i, s = source[best]
            if s not in kept.setdefault(i, []):
                kept[i].append(s)
    blocks = [f"(Title: {neutralise(passages[i].title)}) {' '.join(s)}" for i, s in kept.items()]
    return "\n".join(blocks) or NOTHING_RELEVANT


def _closeness(title: str, sentence: str, other_title: str, other: str) -> float:
    alike = similarity(sentence, other)
    return (2 * similarity(title, other_title) + alike) / 3 if title else alike


def titled_sentences(refined: str) -> list[tuple[str, str]]:
    """Sentences of a refined text with the title each stands under."""
    blocks = [(m["title"], m["text"]) for m in _BLOCK.finditer(refined)] or [("", refined)]
    return [(title, s) for title, text in blocks for s in split_sentences(text)]
