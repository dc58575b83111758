"""open_stage and params: what a stage may see, what is refused, what is written."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from crrl_lib.project import Stage, find_root, open_stage

DVC = """
stages:
  index: {cmd: x, params: [profile, seed, method.index, "scale.${profile}.index"]}
  train:
    cmd: x
    params: [profile, seed, method.agent, method.train, "scale.${profile}.agent"]
  render: {foreach: [a], do: {cmd: x}}
"""
PARAMS = """
profile: tiny
seed: 3
method:
  index: {k: 5, encoder: lexical, ratio: 1, judge: null, exact: true}
  train: {lr: 2e-06, coefs: [0.1, 0.2]}
  agent: {k: 3, prompt: "a|b"}
scale:
  tiny: {index: {passages: 10}, agent: {budget: 4}}
  paper: {index: {passages: 1000}, agent: {budget: 10}}
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dvc.yaml").write_text(DVC)
    (tmp_path / "params.yaml").write_text(PARAMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    return tmp_path


def edit(root: Path, old: str, new: str) -> None:
    text = (root / "params.yaml").read_text()
    assert old in text
    (root / "params.yaml").write_text(text.replace(old, new))


def test_merges_the_two_sections_of_the_profile(root):
    assert dict(open_stage("index").p) == {
        "k": 5,
        "encoder": "lexical",
        "ratio": 1,
        "judge": None,
        "exact": True,
        "passages": 10,
    }
    edit(root, "profile: tiny", "profile: paper")
    stage = open_stage("index")
    assert (stage.profile, stage.seed, stage.p.passages, stage.p["k"]) == ("paper", 3, 1000, 5)


def test_float_as_dvc_writes_it_is_a_float_and_a_list_a_tuple(root):
    stage = open_stage("train")
    assert stage.p.lr == 2e-06
    assert isinstance(stage.p.lr, float)
    assert stage.p.coefs == (0.1, 0.2)


def test_a_dial_has_one_kind_of_value_in_every_profile(root):
    edit(root, "paper: {index: {passages: 1000}", "paper: {index: {passages: null}")
    assert open_stage("index").p.passages == 10  # null says that a profile has no such setting
    edit(root, "tiny: {index: {passages: 10}", 'tiny: {index: {passages: "10"}')
    assert open_stage("index").p.passages == "10"  # nothing to compare with
    edit(root, "paper: {index: {passages: null}", "paper: {index: {passages: 1000}")
    message = "scale.tiny.index.passages is '10', a text; expected a number, as in scale.paper"
    with pytest.raises(TypeError, match=message):
        open_stage("index")


def test_changes_to_the_root_from_any_depth_and_again(root, monkeypatch):
    deep = root / "notebooks" / "deep"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    monkeypatch.setenv("DVC_ROOT", "/somewhere/else")  # a queued experiment's main workspace
    for _ in range(2):
        stage = open_stage("index")
        assert Path.cwd() == root
    assert stage.data == Path("data/index")
    assert stage.data.is_dir()
    assert stage.figures.is_dir()


def test_outside_a_repository_says_where_to_start(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no dvc\.yaml in .* start inside the repository"):
        find_root(tmp_path)


def test_agent_only_for_a_stage_that_declares_it(root):
    assert dict(open_stage("train").agent) == {"k": 3, "prompt": "a|b", "budget": 4}
    with pytest.raises(AttributeError, match="index does not declare method.agent.*dvc.yaml"):
        _ = open_stage("index").agent


def test_section_is_read_only_and_names_what_it_has(root):
    stage = open_stage("train")
    with pytest.raises(AttributeError):
        stage.p.lr = 1.0
    with pytest.raises(TypeError):
        stage.p["lr"] = 1.0
    with pytest.raises(
        AttributeError, match=r"no key 'lrr' in .*params.yaml.*known keys: coefs, lr"
    ):
        _ = stage.p.lrr
    assert stage.p.get("lrr", 7) == 7
    assert "lr" in stage.p


def test_require_passes_and_returns_the_section(root):
    p = open_stage("index").p
    assert p.require(k=int, encoder=str, ratio=float, judge=(str, None), exact=bool) is p
    assert open_stage("train").p.require(coefs=list).lr == 2e-06


def test_require_tells_every_fault_and_where(root):
    p = open_stage("index").p
    with pytest.raises(TypeError) as error:
        p.require(k=str, missing=int, exact=int, judge=float)
    assert str(error.value) == (
        "k is 5, expected str; missing is missing; exact is True, expected int; "
        "judge is None, expected float: "
        "change it in method.index or scale.tiny.index of params.yaml"
    )


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("profile: tiny", "profile: huge", ValueError, "unknown profile 'huge'.*tiny, paper"),
        (
            "seed: 3",
            "seed: three",
            ValueError,
            "seed is 'three' in params.yaml; expected an integer",
        ),
        ("seed: 3", "seed: -1", ValueError, "seed is -1"),
        (
            "seed: 3",
            "seed: 3\nsede: 4",
            ValueError,
            "top-level keys.*sede.*expected exactly profile",
        ),
        (
            "paper: {index: {passages: 1000}",
            "paper: {index: {passages: 1000, k: 2}",  # the profile that is not in use
            ValueError,
            "k stands in both method.index and scale.paper.index",
        ),
        ("k: 5", "k: {deep: 1}", TypeError, r"method.index.k is \{'deep': 1\}; expected a scalar"),
        ("k: 5", "k: [[1]]", TypeError, "list of scalars"),
        ("k: 5", "items: 5", ValueError, "'items' cannot be a key"),
        ("k: 5", "no-refiner: 5", ValueError, "'no-refiner' cannot be a key"),
        ("tiny: {index: {passages: 10}", "tiny: {index: 10", TypeError, "scale.tiny.index is 10"),
    ],
)
def test_bad_params_are_refused(root, old, new, error, message):
    edit(root, old, new)
    with pytest.raises(error, match=message):
        open_stage("index")


def test_unknown_stage_names_the_known_ones(root):
    with pytest.raises(
        ValueError, match="no stage 'tarin' in dvc.yaml; expected one of index, train$"
    ):
        open_stage("tarin")


def test_params_file_may_be_another(root):
    (root / "other.yaml").write_text(PARAMS.replace("seed: 3", "seed: 9"))
    assert open_stage("index", "other.yaml").seed == 9


def _global_numpy() -> float:
    return np.random.random()  # noqa: NPY002 (the one that other libraries draw from)


def draws(stage: Stage) -> list[float]:
    values = [random.random(), _global_numpy(), torch.rand(()).item(), stage.rng.random()]
    return [float(v) for v in values]


def test_seeds_every_generator_and_stages_differ(root):
    first, again, other = (draws(open_stage(s)) for s in ("index", "index", "train"))
    assert first == again
    assert first[:3] == other[:3]
    assert first[3] != other[3]


def test_bars_are_off_only_under_dvc(root, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    open_stage("index")
    assert os.environ["TQDM_DISABLE"] == "0"
    monkeypatch.setenv("DVC_STAGE", "index")
    open_stage("index")
    assert os.environ["TQDM_DISABLE"] == "1"


def test_metrics_file_is_sorted_rounded_and_complete(root):
    stage = open_stage("index")
    stage.write_metrics(
        {
            "recall": np.float32(0.5),
            "n": np.int64(3),
            "by": {"b": 2 / 3, "a": None},
            "all": (1, True),
        }
    )
    by = '  "by": {\n    "a": null,\n    "b": 0.666667\n  },\n'
    assert stage.metrics_file.read_text() == (
        f'{{\n  "all": [\n    1,\n    true\n  ],\n{by}'
        '  "n": 3,\n  "profile": "tiny",\n  "recall": 0.5,\n  "seed": 3\n}\n'
    )
    assert [path.name for path in stage.metrics_file.parent.iterdir()] == ["index.json"]


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"by": {"crrl": float("nan")}}, ValueError, "index.json: by: crrl is nan.*None"),
        ({"em": torch.tensor(1.0)}, TypeError, "index.json: em is a Tensor"),
        ({"seed": 4}, ValueError, "seed is added by the stage itself"),
    ],
)
def test_bad_metrics_are_refused_and_leave_no_file(root, metrics, error, message):
    stage = open_stage("index")
    with pytest.raises(error, match=message):
        stage.write_metrics(metrics)
    assert not stage.metrics_file.exists()


def test_timing_adds_up_blocks_of_one_label_even_when_they_fail(root):
    stage = open_stage("index")
    for _ in range(2):
        with stage.timer("search"):
            pass
    with pytest.raises(RuntimeError), stage.timer("train"):
        raise RuntimeError
    stage.write_timing({"questions_per_second": 12.5})
    timing = json.loads(stage.timing_file.read_text())
    assert set(timing["seconds"]) == {"search", "train"}
    assert 0 <= timing["seconds"]["search"] < 1
    assert 10 < timing["peak_rss_mib"] < 100_000
    assert timing["questions_per_second"] == 12.5
    assert timing["profile"] == "tiny"


def test_stage_shows_what_it_read(root):
    stage = open_stage("train")
    assert repr(stage).startswith("stage train: profile tiny, seed 3, ")
    assert "  lr = 2e-06\n" in repr(stage)
    lines = stage._repr_markdown_().splitlines()
    assert lines[0].startswith("Stage `train` · profile `tiny` · seed 3")
    assert "| `agent.budget` | `4` |" in lines
    assert '| `agent.prompt` | `"a\\|b"` |' in lines  # a pipe would end the column
    assert str(root) not in repr(stage)
