"""Corpora and question sets, in every supported format, into passages and questions.

A format is recognised by the fields of its rows, never by the file's name. Passages:
``{id, title, text}`` · wiki-18 ``{id, contents}`` · MuSiQue and 2Wiki ``{title, text}`` · HotpotQA
``{title: [sentences]}``. Questions: ours ``{id, question, answers, …}`` · FlashRAG
``{id, question, golden_answers, metadata}`` · HotpotQA and 2Wiki ``{_id, question, answer, context,
supporting_facts}`` · MuSiQue ``{id, question, answer, answer_aliases, paragraphs, …}`` · plain
``{id, question, answer}``, as Bamboogle is.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crrl_lib.records import Passage, Question


def load_passages(path: str | Path) -> list[Passage]:
    """Read a corpus; without ids, titles become ids, and homonyms ``title#1``, ``title#2`` and on.

    Raises ValueError with the file, the row and the field when one is missing, empty or of the
    wrong kind, and when two rows carry one id.
    """
    rows = list(_rows(Path(path), titled=True))
    named = [_passage(row) for row in rows]
    homonyms = Counter(title for key, title, _ in named if key is None)
    seen: Counter[str] = Counter()
    passages = []
    for row, (key, title, text) in zip(rows, named, strict=True):
        if key is None:
            if homonyms.total() < len(rows):
                raise row.fail("missing field 'id', which other rows have")
            seen[title] += 1
            key = f"{title}#{seen[title]}" if homonyms[title] > 1 else title
        passages.append(Passage(key, title, text))
    _check_unique(rows, [p.id for p in passages])
    return passages


def load_questions(path: str | Path, passages: Sequence[Passage] = ()) -> list[Question]:
    """Read a question set; with its corpus, official formats get ``supporting_ids`` as well.

    A supporting paragraph is looked up by title and text, else by a title that is unique in the
    corpus; one that the corpus lacks is left out of ``supporting_ids``, never of the titles.
    """
    rows, known = list(_rows(Path(path))), _Corpus(passages)
    questions = [_question(row, known) for row in rows]
    _check_unique(rows, [q.id for q in questions])
    return questions


def load_sets(paths: Sequence[str | Path], most: int, seed: int = 0) -> list[Question]:
    """Draw at most ``most`` questions of each file, in file order; ids get the file's stem first.

    A seed always draws the same ones. Raises when two files share a stem: their ids would mix.
    """
    sets = {Path(path).stem: load_questions(path) for path in paths}
    if len(sets) < len(paths):
        raise ValueError(f"question files share a name: {', '.join(map(str, paths))}; rename one")
    drawn = []
    for stem, found in sets.items():
        rows = random.Random(f"{seed}-{stem}").sample(range(len(found)), min(most, len(found)))
        drawn += [replace(found[i], id=f"{stem}/{found[i].id}") for i in sorted(rows)]
    return drawn


@dataclass(frozen=True)
class _Row:
    """One raw row that knows where it stands, so that every complaint can say so."""

    fields: Mapping[str, Any]
    where: str

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def fail(self, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {problem}; correct or drop that row")

    def get(self, name: str, kind: type | tuple[type, ...] = str, label: str = "text") -> Any:
        """Return a field that must be there, of its kind and not blank."""
        if name not in self.fields:
            have = ", ".join(sorted(self.fields)) or "none"
            raise self.fail(f"missing field {name!r} (fields there: {have})")
        value = self.fields[name]
        if not isinstance(value, kind):
            raise self.fail(f"field {name!r} should be {label}, got {type(value).__name__}")
        if isinstance(value, str) and not value.strip():
            raise self.fail(f"field {name!r} is empty")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a field that is a list of texts; blank ones are dropped, none can ever match."""
        values = self.get(name, list, "a list of texts")
        if not all(isinstance(v, str) for v in values):
            raise self.fail(f"field {name!r} should hold texts only, got {values!r:.80}")
        return [v for v in values if v.strip()]

    def id(self, name: str = "id") -> str:
        return str(self.get(name, (str, int), "a text or a whole number"))


class _Corpus:
    """Finds the ids of supporting paragraphs."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._exact = {(p.title, p.text): p.id for p in passages}
        count = Counter(p.title for p in passages)
        self._single = {p.title: p.id for p in passages if count[p.title] == 1}

    def ids(self, paragraphs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        found = (self._exact.get(p) or self._single.get(p[0]) for p in paragraphs)
        return _unique(i for i in found if i is not None)


def _rows(path: Path, titled: bool = False) -> Iterator[_Row]:
    """Yield the rows of a .json or .jsonl file; ``titled`` allows HotpotQA's {title: sentences}."""
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{path}: expected a file that ends in .json or .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text: {error}") from error
    if path.suffix == ".jsonl":
        # Not splitlines(): U+2028 and its like are legal inside a JSON string.
        lines = [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), 1)]
        items = [(where, _parse(line, where)) for where, line in lines if line.strip()]
    else:
        whole = _parse(text, str(path))
        if isinstance(whole, dict) and titled:
            whole = [{"title": title, "sentences": value} for title, value in whole.items()]
        if not isinstance(whole, list):
            raise ValueError(f"{path}: expected a list of objects, got {type(whole).__name__}")
        items = [(f"{path}, row {n}", item) for n, item in enumerate(whole, 1)]
    if not items:
        raise ValueError(f"{path}: no rows; expected at least one")
    for where, item in items:
        if not isinstance(item, dict):
            raise ValueError(f"{where}: expected an object, got {type(item).__name__}")
        yield _Row(item, where)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def _passage(row: _Row) -> tuple[str | None, str, str]:
    """Return id (None when the format has none), title and text."""
    if "contents" in row:
        title, newline, text = row.get("contents").partition("\n")
        if not newline or not text.strip():
            raise row.fail("'contents' should be a quoted title, a newline and a text")
        return row.id(), title.strip().removeprefix('"').removesuffix('"'), text
    if "sentences" in row:
        return None, row.get("title"), _join(row.texts("sentences"))
    return row.id() if "id" in row else None, row.get("title"), row.get("text")


def _question(row: _Row, known: _Corpus) -> Question:
    if "answers" in row:
        return _own(row)
    if "golden_answers" in row:
        return _flashrag(row, known)
    if "paragraphs" in row:
        return _musique(row, known)
    if "supporting_facts" in row or "context" in row:
        return _hotpot(row, known)
    if "answer" not in row:
        raise row.fail("missing field 'answers' (or 'golden_answers', or 'answer')")
    family = str(row.fields.get("dataset", ""))
    hops = 2 if family == "bamboogle" else 1  # Bamboogle is two-hop throughout
    return _make(row, row.id(), [row.get("answer")], family, hops)


def _own(row: _Row) -> Question:
    hops = row.get("hops", int, "a whole number") if "hops" in row else 1
    support = (row.texts(n) if n in row else () for n in ("supporting_titles", "supporting_ids"))
    return _make(row, row.id(), row.texts("answers"), row.fields.get("family", ""), hops, *support)


def _flashrag(row: _Row, known: _Corpus) -> Question:
    metadata = row.get("metadata", dict, "an object") if row.fields.get("metadata") else {}
    facts = metadata.get("supporting_facts")
    titles = _unique(facts["title"]) if isinstance(facts, dict) and "title" in facts else ()
    hops = len(metadata.get("question_decomposition") or titles) or 1
    support = titles, known.ids((title, "") for title in titles)
    family = str(metadata.get("type") or "")
    return _make(row, row.id(), row.texts("golden_answers"), family, hops, *support)


def _musique(row: _Row, known: _Corpus) -> Question:
    items = row.get("paragraphs", list, "a list of objects")
    rows = [_Row(item, f"{row.where}, paragraph {n}") for n, item in enumerate(items, 1)]
    needed = [p for p in rows if p.get("is_supporting", bool, "true or false")]
    paragraphs = [(p.get("title"), p.get("paragraph_text")) for p in needed]
    answers = [row.get("answer"), *row.texts("answer_aliases")]
    family = row.id().split("__")[0]  # "2hop", "3hop1", …
    hops = len(row.get("question_decomposition", list, "a list"))
    titles = [title for title, _ in paragraphs]  # one a paragraph: homonyms repeat
    return _make(row, row.id(), answers, family, hops, titles, known.ids(paragraphs))


def _hotpot(row: _Row, known: _Corpus) -> Question:
    facts, context = (row.get(n, list, "a list of pairs") for n in ("supporting_facts", "context"))
    try:
        titles = _unique(title for title, _ in facts)
        texts = {title: _join(sentences) for title, sentences in context}
    except (TypeError, ValueError, AttributeError) as error:
        raise row.fail("'supporting_facts' and 'context' should be lists of pairs") from error
    ids = known.ids((title, texts.get(title, "")) for title in titles)
    family = str(row.fields.get("type", ""))
    return _make(row, row.id("_id"), [row.get("answer")], family, len(titles), titles, ids)


def _make(
    row: _Row, key: str, answers: Iterable[str], family: str, hops: int, *support: Iterable[str]
) -> Question:
    """Build a question; ``support`` is the supporting titles, then their ids."""
    if not (accepted := _unique(answers)):
        raise row.fail("no accepted answer")
    titles, ids = (*map(tuple, support), (), ())[:2]
    return Question(key, row.get("question").strip(), accepted, family, hops, ids, titles)


def _join(sentences: Iterable[str]) -> str:
    return " ".join(s.strip() for s in sentences)


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))


def _check_unique(rows: Sequence[_Row], ids: Sequence[str]) -> None:
    first: dict[str, str] = {}
    for row, key in zip(rows, ids, strict=True):
        if key in first:
            raise row.fail(f"id {key!r} was already used at {first[key]}; ids must be unique")
        first[key] = row.where
