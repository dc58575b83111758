"""What ``retriever.py`` ranks passages by: vectors of queries and passages, or BM25 weights.

``LexicalProjection`` needs no model and is the embedded default; ``SentenceEncoder`` is any
sentence-transformers model; ``Bm25Index`` ranks without vectors, on the tokens of the first.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crrl_lib.records import Passage

DIGITS = 5  # scores equal to this many decimals are ties; corpus order breaks them
Hits = list[tuple[int, float]]  # (row, score) of one query, best first
# fmt: off
_STOP = frozenset([
    "a", "an", "and", "are", "as", "at", "be", "been", "but", "by", "did", "do", "does", "for",
    "from", "had", "has", "have", "he", "her", "his", "how", "in", "into", "is", "it", "its", "of",
    "on", "or", "s", "she", "so", "than", "that", "the", "their", "them", "then", "there", "these",
    "they", "this", "those", "to", "was", "were", "what", "when", "where", "which", "who", "whom",
    "whose", "why", "will", "with",
])
# fmt: on


def tokens(text: str) -> list[str]:
    """Words and numbers of a text, case and accents folded, without function words.

    >>> tokens("The Rhône, at 812 km")
    ['rhone', '812', 'km']
    """
    folded = unicodedata.normalize("NFKD", text).casefold()
    plain = "".join(c for c in folded if not unicodedata.combining(c))
    return [t for t in re.findall(r"[^\W_]+", plain) if t not in _STOP]


def passage_tokens(passage: Passage, title_weight: int) -> list[str]:
    """Tokens of a passage, its title's counted ``title_weight`` times."""
    return tokens(passage.title) * title_weight + tokens(passage.text)


@dataclass(eq=False)
class LexicalProjection:
    """Vectors without a model, whose inner products estimate BM25.

    A passage is its saturated term frequencies, a query its terms' idf, and every term a sparse
    random direction. The idf stands on the query's side alone: on both sides or on the passage's,
    its rare terms fill passages with more noise (measured: one to four points of recall@3).
    """

    dim: int = 2048
    seed: int = 0
    title_weight: int = 2  # times a title is counted
    k1: float = 1.5
    b: float = 0.75
    nonzeros: int = 16  # of a term's direction
    state: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def fit(self, passages: Sequence[Passage]) -> None:
        """Learn vocabulary, idf and mean length from the corpus; draw the directions."""
        if min(self.dim, self.nonzeros) < 1:
            raise ValueError(f"dim is {self.dim}, nonzeros {self.nonzeros}; expected 1 or more")
        counts = [Counter(passage_tokens(p, self.title_weight)) for p in passages]
        if not any(counts):
            raise ValueError("the corpus has no word or number to index")
        frequency = Counter(term for count in counts for term in count)
        terms = sorted(frequency)
        df = np.array([frequency[t] for t in terms], dtype=float)
        rng, shape = np.random.default_rng(self.seed), (len(terms), self.nonzeros)
        self.state = {
            "terms": np.frombuffer("\n".join(terms).encode(), dtype=np.uint8),
            "idf": np.log1p((len(passages) - df + 0.5) / (df + 0.5)),
            "mean": np.array(np.mean([c.total() for c in counts])),
            "columns": rng.integers(self.dim, size=shape, dtype=np.int32),
            "signs": rng.choice(np.array([-1, 1], dtype=np.int8), size=shape),
        }
        self._prepare()

    def passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Encode passages to ``(N, dim)`` float32; terms of another corpus weigh nothing."""
        weights = []
        for count in (Counter(passage_tokens(p, self.title_weight)) for p in passages):
            norm = self.k1 * (1 - self.b + self.b * count.total() / float(self.state["mean"]))
            known = ((t, f) for t, f in count.items() if t in self._index)
            weights.append({t: f / (f + norm) for t, f in known})  # as Lucene has it
        return self._project(weights)

    def queries(self, queries: Sequence[str]) -> np.ndarray:
        """Encode queries to ``(N, dim)`` float32; unknown terms weigh nothing."""
        idf, index = self.state["idf"], self._index
        counts = (Counter(t for t in tokens(q) if t in index) for q in queries)
        return self._project([{t: f * idf[index[t]] for t, f in count.items()} for count in counts])

    def save(self, folder: Path) -> None:
        """Write what was learnt; the directions too, so that no numpy version can change them."""
        np.savez(folder / "encoder.npz", **self.state)

    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote."""
        with np.load(folder / "encoder.npz") as arrays:
            self.state = dict(arrays)
        self._prepare()

    def _prepare(self) -> None:
        from scipy.sparse import csr_array

        terms = self.state["terms"].tobytes().decode().split("\n")
        self._index = {term: i for i, term in enumerate(terms)}
        rows = np.repeat(np.arange(len(terms)), self.nonzeros)
        values = self.state["signs"].ravel() / np.sqrt(self.nonzeros)
        cells = (values, (rows, self.state["columns"].ravel()))
        self._directions = csr_array(cells, shape=(len(terms), self.dim))

    def _project(self, weights: Sequence[Mapping[str, float]]) -> np.ndarray:
        from scipy.sparse import csr_array

        ends = np.cumsum([0, *map(len, weights)])
        columns = np.array([self._index[t] for w in weights for t in w], dtype=np.int64)
        values = np.array([v for w in weights for v in w.values()], dtype=float)
        sparse = csr_array((values, columns, ends), shape=(len(weights), len(self._index)))
        return (sparse @ self._directions).toarray().astype(np.float32)


@dataclass(eq=False)
class SentenceEncoder:
    """A sentence-transformers model by name; prompts are settings, never guessed from the name."""

    model: str
    query_prompt: str = ""
    passage_prompt: str = ""
    batch_size: int = 64
    device: str = "cpu"

    def fit(self, passages: Sequence[Passage]) -> None:
        """Load the model: there is nothing to learn from the corpus."""
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError(
                f"encoder {self.model!r} needs the package sentence-transformers: pip install "
                "sentence-transformers, or choose the encoder lexical or bm25 in params.yaml"
            ) from error
        self._model = SentenceTransformer(self.model, device=self.device)

    def passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Encode passages, written as the wiki-18 corpus writes them, to unit vectors."""
        return self._encode([f'"{p.title}"\n{p.text}' for p in passages], self.passage_prompt)

    def queries(self, queries: Sequence[str]) -> np.ndarray:
        """Encode queries to unit vectors."""
        return self._encode(list(queries), self.query_prompt)

    def save(self, folder: Path) -> None:
        """Write nothing: the model has a name."""

    def load(self, folder: Path) -> None:
        """Load the model."""
        self.fit(())

    def _encode(self, texts: list[str], prompt: str) -> np.ndarray:
        vectors = self._model.encode(
            texts,
            prompt=prompt or None,
            batch_size=self.batch_size,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, dtype=np.float32)


@dataclass(eq=False)
class Bm25Index:
    """BM25 through bm25s, on the tokens of the lexical encoder."""

    title_weight: int = 2
    k1: float = 1.5
    b: float = 0.75

    def build(self, passages: Sequence[Passage]) -> None:
        """Weigh the corpus; a sorted vocabulary keeps the files the same from run to run."""
        import bm25s

        texts = [passage_tokens(p, self.title_weight) for p in passages]
        vocabulary = {t: i for i, t in enumerate(sorted({t for text in texts for t in text}))}
        self.model = bm25s.BM25(k1=self.k1, b=self.b, method="lucene")
        ids = [[vocabulary[t] for t in text] for text in texts]
        self.model.index((ids, vocabulary), show_progress=False)

    def save(self, folder: Path) -> None:
        """Write the weights."""
        self.model.save(folder / "bm25", show_progress=False)

    def load(self, folder: Path) -> None:
        """Read them back."""
        import bm25s

        self.model = bm25s.BM25.load(folder / "bm25", show_progress=False)

    def library(self) -> str:
        """Return the bm25s series."""
        import bm25s

        return "bm25s " + bm25s.__version__.rpartition(".")[0]

    def describe(self) -> dict[str, Any]:
        """Return what the manifest pins about the weights."""
        return {"vectors": int(self.model.scores["num_docs"]), "metric": "bm25"}

    def holds(self, passages: Sequence[Passage]) -> bool:
        """Whether a few passages find themselves, as far as their words can."""
        for row in spread(len(passages)):
            terms = sorted(set(passage_tokens(passages[row], 1)))
            if not set(terms) <= set(self.model.vocab_dict):
                return False
            if terms and not self.model.get_scores(terms)[row] > 0:
                return False
        return True

    def top(self, queries: Sequence[str], k: int) -> Iterator[Hits]:
        """Yield the best ``k`` rows of each query; a passage without any of its terms scores 0."""
        rows = self.model.scores["num_docs"]
        for query in queries:
            terms = tokens(query)
            scores = self.model.get_scores(terms) if terms else np.zeros(rows)
            scores = np.asarray(scores, dtype=np.float64).round(DIGITS)
            near = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
            best = near[np.argsort(-scores[near], kind="stable")[:k]]
            yield hits_of(best, scores[best])


def spread(rows: int) -> np.ndarray:
    """At most eight row numbers from the first to the last."""
    return np.unique(np.linspace(0, rows - 1, 8).astype(np.int64))


def hits_of(rows: np.ndarray, scores: np.ndarray) -> Hits:
    """Pair rows with scores, as plain numbers."""
    return list(zip(rows.tolist(), scores.tolist(), strict=True))
