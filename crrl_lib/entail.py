"""Is a refined text contained in its documents? A lexical check, or an NLI model by name.

Both cut the refined text into sentences and ask each of them of single documents. A sentence that
stands after ``(Title: X)`` is asked of the documents titled X alone: a true sentence under a
homonym's name is not contained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from crrl_lib.records import Passage
from crrl_lib.scoring import normalise

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOTHING = "Nothing relevant."  # the legal empty outcome, as protocol.py words it
Pair = tuple[str, Sequence[Passage]]  # a refined text and its documents
Check = Callable[[Sequence[Pair]], list[bool]]
Claim = tuple[str, Sequence[Passage]]  # a sentence and the documents it may come from

_HEADER = re.compile(r"(?:\bDoc \d+\s*)?\(Title: ")
_BREAK = re.compile(r"(?<=[.!?])\s+|\n+")


def entailment(name: str, **options: float | int | str) -> Check:
    """Choose a check: ``lexical``, or an NLI model by name, with ``nli_containment``'s options."""
    if name != "lexical":
        return nli_containment(name, **options)
    if options:
        raise ValueError(f"the lexical check has no options, got {', '.join(sorted(options))}")
    return lexical_containment


def lexical_containment(pairs: Sequence[Pair]) -> list[bool]:
    """Say of each refined text whether all its sentences stand in the documents, word for word.

    Case, punctuation, articles and spacing are forgiven; a sentence must lie within one document.
    "Nothing relevant." is contained in anything, an empty text in nothing.
    """
    return [
        _decided(refined, lambda claim: any(_stands(claim[0], p) for p in claim[1]), passages)
        for refined, passages in pairs
    ]


def nli_containment(
    model_name: str,
    threshold: float = 0.5,
    batch_size: int = 32,
    max_length: int = 512,
    device: str = "cpu",
) -> Check:
    """Load an NLI cross-encoder and return its check, of the same kind as the lexical one.

    A sentence passes when one document (premise) entails it (hypothesis) with a probability of at
    least ``threshold``. Premises are cut to ``max_length`` tokens, which can only make it stricter.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; expected a probability above 0 and up to 1")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForSequenceClassification.from_pretrained(model_name).to(device).eval()
    label = _entailment_label(model_name, model.config.id2label)

    def check(pairs: Sequence[Pair]) -> list[bool]:
        found = [claim for pair in pairs for claim in claims(*pair) or ()]
        asked = {_premise(passage, sentence) for sentence, known in found for passage in known}
        todo = sorted(asked, key=lambda texts: (len(texts[0]) + len(texts[1]), texts))
        entailed: dict[tuple[str, str], float] = {}
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            chances = _probabilities(model, tokenizer, batch, max_length)[:, label].tolist()
            entailed |= zip(batch, chances, strict=True)

        def passes(claim: Claim) -> bool:
            return any(entailed[_premise(p, claim[0])] >= threshold for p in claim[1])

        return [_decided(refined, passes, passages) for refined, passages in pairs]

    return check


def claims(refined: str, passages: Sequence[Passage]) -> list[Claim] | None:
    """Cut a refined text into sentences, each with the documents it may come from.

    Headers are taken off; None when a header names a title that no document has.

    >>> bonn = Passage("1", "Bonn", "Bonn lies on the Rhine.")
    >>> [sentence for sentence, _ in claims("Doc 1(Title: Bonn) Bonn lies on the Rhine.", [bonn])]
    ['Bonn lies on the Rhine.']
    """
    headers = [*_HEADER.finditer(refined)]
    cuts = [*(m.start() for m in headers), len(refined)]
    found = [(sentence, passages) for sentence in _sentences(refined[: cuts[0]])]
    for match, end in zip(headers, cuts[1:], strict=True):
        section = refined[match.end() : end]
        fitting = [p.title for p in passages if section.startswith(f"{p.title})")]
        if not fitting:
            return None
        title = max(fitting, key=len)  # "Paris (Texas)" before "Paris"
        known = [p for p in passages if p.title == title]
        found += [(sentence, known) for sentence in _sentences(section[len(title) + 1 :])]
    return found


def _decided(refined: str, passes: Callable[[Claim], bool], passages: Sequence[Passage]) -> bool:
    if normalise(refined) == normalise(NOTHING):
        return True
    found = claims(refined, passages)
    return bool(found) and all(passes(claim) for claim in found)


def _sentences(text: str) -> list[str]:
    """Sentences that say something: more than punctuation."""
    parts = (part.strip() for part in _BREAK.split(text))
    return [part for part in parts if normalise(part)]


def _stands(sentence: str, passage: Passage) -> bool:
    return any(
        f" {normalise(sentence)} " in f" {normalise(t)} " for t in (passage.title, passage.text)
    )


def _premise(passage: Passage, sentence: str) -> tuple[str, str]:
    return f"{passage.title}. {passage.text}", sentence


def _probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[tuple[str, str]],
    max_length: int,
) -> torch.Tensor:
    """Class probabilities ``(N, C)`` of (premise, hypothesis) pairs."""
    import torch

    rows = tokenizer(
        *map(list, zip(*batch, strict=True)),
        truncation="only_first",
        max_length=max_length,
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        return model(**rows.to(model.device)).logits.float().softmax(-1)


def _entailment_label(name: str, labels: dict[int, str]) -> int:
    """Find the one label that means entailment; "not_entailment" does not."""
    fitting = [i for i, text in labels.items() if text.lower().startswith("entail")]
    if len(fitting) != 1:
        raise ValueError(
            f"model {name!r} has the labels {list(labels.values())}; expected exactly one that "
            "starts with 'entail': name an NLI model"
        )
    return fitting[0]
