"""Batched rollouts against the same engine asked one question at a time.

    python bench/rollout.py [--questions 256] [--alone 24] [--model data/geo/base]

Everything runs in one process on the same evaluation questions, greedily, with the same index, for
three settings: raw documents under the full view and under -oq, and refined ones under -oq (by the
rule-based oracle, which costs no tokens: this is the policy's share of a CRRL rollout). The first
``--alone`` of the batched trajectories must equal those made alone.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from crrl_lib.engine import open_engine
from crrl_lib.records import Sampling
from crrl_lib.refiner import keep_all
from crrl_lib.retriever import build_index
from crrl_lib.rollout import Method, rollout
from crrl_lib.sources import load_passages, load_questions
from crrl_lib.teacher import OracleRefiner
from crrl_lib.views import view_by_name

GEO = Path(__file__).resolve().parents[1] / "data" / "geo"

SETTINGS = (("full", "none"), ("oq", "none"), ("oq", "oracle"))  # view, refiner


class Stopwatch:
    """Seconds spent in each seam."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def timed(self, name: str, call: Callable) -> Callable:
        """Wrap ``call`` so that its time counts under ``name``."""

        def wrapped(*args, **kwargs):
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return wrapped


def main() -> None:
    """Run every setting both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=256, help="rolled out in one batch")
    parser.add_argument("--alone", type=int, default=24, help="asked one at a time")
    parser.add_argument("--model", type=Path, default=GEO / "base", help="model folder")
    parser.add_argument("--k", type=int, default=3, help="passages a search")
    args = parser.parse_args()

    engine = open_engine(args.model, {"dtype": "float32", "batch_tokens": 16_384})
    questions = [q for h in ("single", "multi") for q in load_questions(GEO / f"eval_{h}.jsonl")]
    random.Random(0).shuffle(questions)
    questions = questions[: args.questions]
    print(
        f"{args.model}, K {args.k}, greedy, {torch.get_num_threads()} CPU threads, "
        f"{len(questions)} questions in a batch, {args.alone} alone\n\n"
        "| view | refiner | searches | context tokens | batched, questions/s | alone, questions/s "
        "| ratio | equal both ways | generate | search | refine | rest |\n|" + "---|" * 12
    )
    with tempfile.TemporaryDirectory() as folder:
        search = build_index(load_passages(GEO / "passages.jsonl"), folder)
        for view, refiner in SETTINGS:
            method = Method(form="short", view=view_by_name(view), budget=4, k=args.k)
            refine = OracleRefiner() if refiner == "oracle" else keep_all
            cells = compare(engine, questions, args.alone, search, refine, method)
            print(f"| {view} | {refiner} | {cells} |", flush=True)


def compare(engine, questions, alone, search, refine, method) -> str:
    """Time one setting both ways; return its cells of the table."""
    generate = engine.generate

    def timed_rollout(asked: list) -> tuple[list, float, Counter]:
        watch = Stopwatch()
        engine.generate = watch.timed("generate", generate)
        seams = watch.timed("search", search), watch.timed("refine", refine)
        started = time.perf_counter()
        done = rollout(asked, engine, *seams, method, Sampling(72))
        total = time.perf_counter() - started
        watch.seconds["rest"] = total - watch.seconds.total()
        return done, total, watch.seconds

    timed_rollout(questions[:2])  # first calls build caches
    batched, seconds, parts = timed_rollout(questions)
    single, single_seconds = [], 0.0
    for question in questions[:alone]:
        done, total, _ = timed_rollout([question])
        single, single_seconds = [*single, *done], single_seconds + total
    engine.generate = generate
    # Log-probs differ in the last bit with the shape of the batch; what was written must not.
    written = [[[t.action_ids for t in run.turns] for run in runs] for runs in (batched, single)]
    same = sum(a == b for a, b in zip(*written, strict=False))
    rates = len(batched) / seconds, len(single) / single_seconds
    cells = [
        f"{sum(t.searches for t in batched) / len(batched):.2f}",
        f"{sum(len(t.turns[-1].context_ids) for t in batched) / len(batched):.0f}",
        *(f"{rate:.1f}" for rate in rates),
        f"{rates[0] / rates[1]:.1f}x",
        f"{same} of {len(single)}",
        *(f"{parts[part] / seconds:.1%}" for part in ("generate", "search", "refine", "rest")),
    ]
    return " | ".join(cells)


if __name__ == "__main__":
    main()
