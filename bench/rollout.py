"""Batched rollouts against the same engine asked one question at a time.

    python bench/rollout.py [--questions 256] [--alone 24] [--model data/geo/base] [--view oq]

Both run in one process on the same evaluation questions, greedily, with the same index; the first
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
from crrl_lib.views import view_by_name

GEO = Path(__file__).resolve().parents[1] / "data" / "geo"


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
    """Run both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=256, help="rolled out in one batch")
    parser.add_argument("--alone", type=int, default=24, help="asked one at a time")
    parser.add_argument("--model", type=Path, default=GEO / "base", help="model folder")
    parser.add_argument("--view", default="full", help="full, o, oq or oqp")
    parser.add_argument("--k", type=int, default=3, help="passages a search")
    args = parser.parse_args()

    engine = open_engine(args.model, {"dtype": "float32", "batch_tokens": 65_536})
    questions = [q for h in ("single", "multi") for q in load_questions(GEO / f"eval_{h}.jsonl")]
    random.Random(0).shuffle(questions)
    questions = questions[: args.questions]
    method = Method(form="short", view=view_by_name(args.view), budget=4, k=args.k)
    generate = engine.generate
    with tempfile.TemporaryDirectory() as folder:
        search = build_index(load_passages(GEO / "passages.jsonl"), folder)

        def timed_rollout(asked: list) -> tuple[list, float, Counter]:
            watch = Stopwatch()
            engine.generate = watch.timed("generate", generate)
            seams = watch.timed("search", search), watch.timed("refine", keep_all)
            started = time.perf_counter()
            done = rollout(asked, engine, *seams, method, Sampling(72))
            total = time.perf_counter() - started
            watch.seconds["rest"] = total - watch.seconds.total()
            return done, total, watch.seconds

        timed_rollout(questions[:2])  # first calls build caches
        batched, seconds, parts = timed_rollout(questions)
        alone, alone_seconds, alone_parts = [], 0.0, Counter()
        for question in questions[: args.alone]:
            done, total, spent = timed_rollout([question])
            alone, alone_seconds = [*alone, *done], alone_seconds + total
            alone_parts += spent

    rows = (
        (f"batched ({len(batched)})", len(batched), seconds, parts),
        (f"one at a time ({len(alone)})", len(alone), alone_seconds, alone_parts),
    )
    names = ("generate", "search", "refine", "rest")
    print(
        f"{args.model}, {method.form} prompts, view {args.view}, K {args.k}, greedy, CPU threads "
        f"{torch.get_num_threads()}, {sum(t.searches for t in batched) / len(batched):.2f} "
        "searches a question\n"
    )
    print("| rollout | questions/s | seconds | " + " | ".join(names) + " |")
    print("|---|---|---|" + "---|" * len(names))
    for name, n, total, spent in rows:
        shares = " | ".join(f"{spent[part] / total:.1%}" for part in names)
        print(f"| {name} | {n / total:.2f} | {total:.1f} | {shares} |")
    ratio = (len(batched) / seconds) / (len(alone) / alone_seconds)
    # Log-probs differ in the last bit with the shape of the batch; what was written must not.
    written = [[[t.action_ids for t in run.turns] for run in runs] for runs in (batched, alone)]
    same = sum(a == b for a, b in zip(*written, strict=False))
    print(f"\nratio {ratio:.1f}x (target 10x); {same} of {len(alone)} trajectories equal both ways")


if __name__ == "__main__":
    main()
