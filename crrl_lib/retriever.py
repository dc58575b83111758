"""Retrievers: a corpus becomes an index folder, and an index answers ``search(queries, k)``.

An encoder is chosen by name: ``lexical`` (the model-free default), ``bm25`` (bm25s, no vectors), or
any sentence-transformers model with its prompts. Vectors lie in a flat inner-product FAISS index,
on CPU or on one GPU. A folder holds the index, the passages and, written last, a manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from crrl_lib.encoders import (
    DIGITS,
    Bm25Index,
    Hits,
    LexicalProjection,
    SentenceEncoder,
    hits_of,
    spread,
)
from crrl_lib.records import Passage

_BLOCK = 256  # queries searched, or 16 × passages encoded, at a time
_SPARE = 8  # candidates asked of FAISS beyond k, among which ties are broken
_MOST = 2048  # candidates, the most that a GPU index gives
_REBUILD = "build it again (dvc repro build_index), or point to the right folder"


@dataclass(frozen=True)
class Retriever:
    """A search over one index; ``manifest`` says what was indexed and how."""

    passages: Sequence[Passage]
    index: FlatIndex | Bm25Index
    manifest: Mapping[str, Any]

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return exactly ``k`` scored passages a query, best first, equal scores in corpus order.

        A query's result never depends on the other queries of its batch.
        """
        if isinstance(queries, str):
            raise TypeError(f"expected a list of queries, got one text: {queries!r}")
        if not 1 <= k <= len(self.passages):
            raise ValueError(
                f"k is {k}, but the corpus has {len(self.passages)} passages; expected 1 ≤ k ≤ "
                f"{len(self.passages)}: change K, the passages per search, in params.yaml"
            )
        if blank := [i for i, query in enumerate(queries) if not query.strip()]:
            raise ValueError(f"query {blank[0]} of {len(queries)} is empty; expected a text")
        found = self.index.top(queries, k)
        return [[replace(self.passages[r], score=score) for r, score in hits] for hits in found]


def build_index(
    passages: Sequence[Passage],
    folder: str | Path,
    encoder: str = "lexical",
    device: str = "cpu",
    **settings: Any,
) -> Retriever:
    """Index a corpus into ``folder`` and return the search over what was written.

    ``settings`` are the encoder's fields, for example ``dim`` and ``seed`` of ``lexical``, or
    ``query_prompt`` and ``passage_prompt`` of a model. The manifest comes last, so an interrupted
    build is never mistaken for an index.
    """
    if not passages:
        raise ValueError("cannot index an empty corpus; expected at least one passage")
    if len({p.id for p in passages}) < len(passages):
        raise ValueError("passage ids repeat; load the corpus with sources.load_passages")
    (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    index = _index(encoder, device, settings)
    index.build(passages)
    index.save(folder)
    with (folder / "passages.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_lines(passages))
    manifest = {
        "encoder": encoder,
        "settings": settings,
        "library": index.library(),
        "corpus_sha256": corpus_checksum(passages),
        "rows": len(passages),
        **index.describe(),
    }
    partial = folder / "manifest.json.partial"
    partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "manifest.json")
    return load_index(folder, device=device)


def load_index(
    folder: str | Path,
    passages_checksum: str | None = None,
    encoder: str | None = None,
    device: str = "cpu",
) -> Retriever:
    """Open an index; refuse, with the reason, one that contradicts its manifest or the caller.

    ``passages_checksum`` and ``encoder`` are what the caller expects, when it has expectations.
    """
    folder = Path(folder)
    if not (folder / "manifest.json").exists():
        raise FileNotFoundError(
            f"{folder} has no manifest.json: no index was built there, or its build was "
            f"interrupted; {_REBUILD}"
        )
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    expected = {"corpus_sha256": passages_checksum, "encoder": encoder}
    _refuse(folder, manifest, {k: v for k, v in expected.items() if v is not None}, "expected")
    index = _index(manifest["encoder"], device, manifest["settings"])
    _refuse(folder, manifest, {"library": index.library()}, "installed")
    with (folder / "passages.jsonl").open(encoding="utf-8", newline="\n") as file:
        passages = [Passage(**json.loads(line)) for line in file]
    found = {"rows": len(passages), "corpus_sha256": corpus_checksum(passages)}
    _refuse(folder, manifest, found, "passages.jsonl has")
    index.load(folder)
    _refuse(folder, manifest, index.describe(), "the index has")
    if not index.holds(passages):
        raise ValueError(f"index {folder} was not made from the passages beside it; {_REBUILD}")
    return Retriever(passages, index, manifest)


def corpus_checksum(passages: Sequence[Passage]) -> str:
    """SHA-256 of a corpus: ids, titles and texts in order, as the index keeps them."""
    digest = hashlib.sha256()
    for line in _lines(passages):
        digest.update(line.encode())
    return digest.hexdigest()


class FlatIndex:
    """Exact search over vectors: FAISS proposes candidates, scores in float64 order them."""

    def __init__(self, encoder: LexicalProjection | SentenceEncoder, device: str) -> None:
        self.encoder, self.device = encoder, device

    def build(self, passages: Sequence[Passage]) -> None:
        """Encode and add the passages, block by block."""
        import faiss

        self.encoder.fit(passages)
        for start in range(0, len(passages), 16 * _BLOCK):
            vectors = self.encoder.passages(passages[start : start + 16 * _BLOCK])
            if not start:
                self.index = faiss.IndexFlatIP(vectors.shape[1])
            self.index.add(vectors)

    def save(self, folder: Path) -> None:
        """Write the encoder's state and the vectors."""
        import faiss

        self.encoder.save(folder)
        faiss.write_index(self.index, str(folder / "index.faiss"))

    def load(self, folder: Path) -> None:
        """Read both back; move the vectors to the GPU when that is the device."""
        import faiss

        self.encoder.load(folder)
        self.index = faiss.read_index(str(folder / "index.faiss"))
        if self.device.startswith("cuda"):
            if not faiss.get_num_gpus():
                raise RuntimeError(
                    "the retriever's device is cuda but FAISS sees no GPU: install the extra gpu "
                    "(faiss-gpu in the place of faiss-cpu), or set the device to cpu"
                )
            self._resources = faiss.StandardGpuResources()  # must outlive the index
            self.index = faiss.index_cpu_to_gpu(self._resources, 0, self.index)

    def library(self) -> str:
        """Return the FAISS series, which decides whether its files can be read."""
        import faiss

        return "faiss " + faiss.__version__.rpartition(".")[0]

    def describe(self) -> dict[str, Any]:
        """Return what the manifest pins about the vectors."""
        metric = {0: "inner product", 1: "L2"}.get(self.index.metric_type, "unknown")
        return {"vectors": self.index.ntotal, "dim": self.index.d, "metric": metric}

    def holds(self, passages: Sequence[Passage]) -> bool:
        """Whether a few passages, encoded again, are what is stored for them."""
        rows = spread(len(passages))
        made = self.encoder.passages([passages[i] for i in rows])
        return np.allclose(made, self.index.reconstruct_batch(rows), atol=1e-2)

    def top(self, queries: Sequence[str], k: int) -> Iterator[Hits]:
        """Yield the best ``k`` rows of each query."""
        for start in range(0, len(queries), _BLOCK):
            vectors = self.encoder.queries(queries[start : start + _BLOCK])
            yield from self._top(vectors, k, k + _SPARE)

    def _top(self, vectors: np.ndarray, k: int, size: int) -> list[Hits]:
        """Search with so many candidates that none tied with the k-th stays outside."""
        most = self.index.ntotal
        if self.device.startswith("cuda"):
            most = min(most, max(k, _MOST))
        near, rows = self.index.search(vectors, min(size, most))
        if (rows < 0).any():
            raise RuntimeError("FAISS found no passage for a query; is a vector not a number?")
        # FAISS sums in an order that depends on the batch (BLAS or not): it only proposes.
        stored = self.index.reconstruct_batch(rows.ravel()).reshape(*rows.shape, -1)
        exact = np.einsum("qcd,qd->qc", stored, vectors, dtype=np.float64).round(DIGITS)
        best = np.lexsort((rows, -exact))[:, :k]
        hits = [hits_of(r[b], s[b]) for r, s, b in zip(rows, exact, best, strict=True)]
        margin = 1e-4 * np.maximum(1, np.abs(near[:, 0]))  # far above float32's rounding
        tied = np.flatnonzero(near[:, k - 1] - near[:, -1] <= margin) if size < most else ()
        for i in np.flatnonzero(~vectors.any(axis=1)):
            hits[i] = [(row, 0.0) for row in range(k)]  # no known term: everything is tied
        for i in tied:
            if vectors[i].any():  # one at a time: thousands of candidates may be needed
                hits[i] = self._top(vectors[i : i + 1], k, 4 * size)[0]
        return hits


def _index(encoder: str, device: str, settings: Mapping[str, Any]) -> FlatIndex | Bm25Index:
    kinds = {"lexical": LexicalProjection, "bm25": Bm25Index}
    kind = kinds.get(encoder, SentenceEncoder)
    known = [f.name for f in fields(kind) if f.init and f.name not in ("model", "device")]
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(
            f"encoder {encoder!r} has no setting {', '.join(unknown)}; it takes {', '.join(known)}"
        )
    if kind is SentenceEncoder:
        return FlatIndex(SentenceEncoder(encoder, device=device, **settings), device)
    made = kind(**settings)
    return made if kind is Bm25Index else FlatIndex(made, device)


def _lines(passages: Sequence[Passage]) -> Iterator[str]:
    for p in passages:
        yield json.dumps({"id": p.id, "title": p.title, "text": p.text}, ensure_ascii=False) + "\n"


def _refuse(folder: Path, manifest: Mapping, actual: Mapping[str, Any], who: str) -> None:
    for name, value in actual.items():
        if manifest.get(name) != value:
            raise ValueError(
                f"index {folder}: manifest says {name} = {manifest.get(name)!r}, {who} {value!r}; "
                + _REBUILD
            )
