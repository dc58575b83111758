"""The whole pipeline at a minimal budget, in a clone: it runs, skips, resumes after kill -9."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
STAGES = (
    "build_index",
    "masking_study",
    "distill_refiner_data",
    "sft_refiner",
    "crrl_grpo",
    "evaluate",
)
BUDGET = {
    "masking_study": {"questions_per_file": 8},
    "distill_refiner_data": {"questions_per_file": 16},
    "sft_refiner": {
        "max_examples": 40,
        "batch_size": 4,
        "micro_batch_size": 2,
        "save_steps": 2,
    },
    "crrl_grpo": {
        "steps": 4,
        "group_size": 2,
        "questions_per_step": 4,
        "mini_batch_questions": 2,
        "save_every": 1,
    },
    "evaluate": {"questions_per_file": 8},
}

pytestmark = pytest.mark.skipif(
    not (ROOT / "data/geo/base").is_dir(), reason="data/geo/base is not there: make base-model"
)


def environment() -> dict[str, str]:
    """The Makefile's, with this interpreter's scripts first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GIT_"))}
    return clean | own | {"PATH": path, "DVC_NO_ANALYTICS": "1"}


def repro(clone: Path, *targets: str) -> str:
    done = subprocess.run(
        ["dvc", "repro", *targets], cwd=clone, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def ran(output: str) -> set[str]:
    return {line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")}


def change(clone: Path, section: str, **values: object) -> None:
    """Set keys of ``method.<section>`` or of ``scale.tiny.<section>``, wherever they stand."""
    yaml = YAML()
    tree = yaml.load((clone / "params.yaml").read_text())
    for key, value in values.items():
        places = [tree["method"].get(section, {}), tree["scale"]["tiny"].get(section, {})]
        next(p for p in places if key in p)[key] = value
    with (clone / "params.yaml").open("w") as file:
        yaml.dump(tree, file)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks or would track, at the minimal budget, without results."""
    folder = tmp_path_factory.mktemp("smoke") / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if name != "dvc.lock" and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for section, values in BUDGET.items():
        change(folder, section, **values)
    return folder


@pytest.fixture(scope="module")
def first(clone: Path) -> str:
    return repro(clone)


def test_every_stage_runs_and_writes_its_metrics(clone: Path, first: str) -> None:
    assert set(STAGES) <= ran(first)
    for stage in STAGES:
        metrics = json.loads((clone / f"data/metrics/{stage}.json").read_text())
        assert metrics["profile"] == "tiny"
        timing = json.loads((clone / f"data/metrics/timing/{stage}.json").read_text())
        assert timing["peak_rss_mib"] < 4096
        pages = [p for p in (clone / "notebooks/rendered").iterdir() if p.name.endswith(stage)]
        assert (pages[0] / "README.md").stat().st_size > 2000
    methods = json.loads((clone / "data/metrics/evaluate.json").read_text())["methods"]
    assert {"direct", "ircot_oqp", "oracle_refine_oq", "search_grpo", "crrl"} <= set(methods)


def test_a_second_run_runs_nothing(clone: Path, first: str) -> None:
    assert not ran(repro(clone))


def test_one_key_reruns_what_depends_on_it_and_back_is_a_cache_hit(clone: Path, first: str) -> None:
    before = (clone / "data/metrics/evaluate.json").read_bytes()
    change(clone, "crrl_grpo", refiner="none")
    stages = {s for s in ran(repro(clone)) if not s.startswith("render")}
    arm = json.loads((clone / "data/crrl_grpo/crrl/arm.json").read_text())
    assert (arm["view"], arm["refiner"]) == ("oq", "none")  # evaluate asks it as it was trained
    # Where the other refiner happens to train the same weights, evaluate has nothing new to do.
    assert {"crrl_grpo"} <= stages <= {"crrl_grpo", "evaluate"}
    change(clone, "crrl_grpo", refiner="context")
    back = {s for s in ran(repro(clone)) if not s.startswith("render")}
    assert not back
    assert (clone / "data/metrics/evaluate.json").read_bytes() == before


def test_the_tour_runs_after_the_pipeline(clone: Path, first: str) -> None:
    papermill = ["papermill", "-k", "python3", "--no-progress-bar"]
    done = subprocess.run(
        [*papermill, "notebooks/00_tour.ipynb", "data/executed/00_tour.ipynb"],
        cwd=clone, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("stage", ["sft_refiner", "crrl_grpo"])
def test_kill_9_then_repro_ends_as_if_nothing_had_happened(
    clone: Path, first: str, stage: str
) -> None:
    weights = "data/sft_refiner/refiner" if stage == "sft_refiner" else "data/crrl_grpo/crrl"
    kept = [f"{weights}/model.safetensors", f"data/metrics/{stage}.json"]
    expected = [(clone / name).read_bytes() for name in kept]
    scratch = clone / "data/.scratch"
    process = subprocess.Popen(
        ["dvc", "repro", "--force", "--single-item", stage],
        cwd=clone, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    marks = {
        "sft_refiner": "sft_refiner/*/checkpoint-*/trainer_state.json",
        "crrl_grpo": "crrl_grpo-crrl/*/save-*/manifest.json",
    }
    until = time.monotonic() + 300
    while not list(scratch.glob(marks[stage])):
        assert process.poll() is None, "the stage ended before its first checkpoint"
        assert time.monotonic() < until, "no checkpoint was written"
        time.sleep(0.05)
    # The kernel has a session of its own; dvc goes first, or it would see its stage fail.
    for one in [process, *psutil.Process(process.pid).children(recursive=True)]:
        os.kill(one.pid, signal.SIGKILL)
    process.wait()
    saved = list(scratch.glob(marks[stage]))
    assert saved
    repro(clone, "--force", "--single-item", stage)
    assert [(clone / name).read_bytes() for name in kept] == expected
    assert not list(scratch.glob(marks[stage]))  # success clears the scratch
