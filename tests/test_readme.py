"""The README says what the metrics say and points to what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from crrl_lib.figures import LABELS
from crrl_lib.methods import METHODS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BEGIN, END = "<!-- results -->", "<!-- /results -->"
# Average EM / searches of the paper's 7B model over seven sets, as printed: Tables 1 to 3.
PAPER = {
    "direct": "18.7 / 0",
    "cot": "22.5 / 0",
    "ircot": "27.5 / 2.6",
    "ircot_o": "29.6 / 2.3",
    "ircot_oq": "30.4 / 2.4",
    "ircot_oqp": "30.3 / 2.7",
    "self_refine": "29.2 / 1.2",
    "context_refiner": "32.2 / 1.2",
    "search_grpo": "34.6 / 2.1",
    "crrl": "36.6 / 1.7",
}


def results_table(methods: dict[str, dict]) -> str:
    """Make the README's table out of ``data/metrics/evaluate.json``."""
    head = ["method", "paper, 7B: EM / searches", "ours, paper profile"]
    head += ["ours, tiny: EM [95 % interval]", "searches", "context tokens", "all tokens"]
    rows = [head, ["---"] * len(head)]
    for name in METHODS:
        m = methods[name]
        em, low, high = (f"{100 * m[key]:.1f}" for key in ("em", "em_low", "em_high"))
        cells = [LABELS[name], PAPER.get(name, "–"), "not run", f"{em} [{low}, {high}]"]
        rows.append(
            [*cells, f"{m['art']:.2f}", f"{m['context_tokens']:.0f}", f"{m['total_tokens']:.0f}"]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_result_table_is_what_the_metrics_say():
    file = ROOT / "data/metrics/evaluate.json"
    metrics = json.loads(file.read_text())
    assert metrics["profile"] == "tiny"
    expected = results_table(metrics["methods"])
    found = README.split(BEGIN)[1].split(END)[0].strip()
    assert found == expected, f"put this between the results marks of README.md:\n\n{expected}\n"


def test_the_metrics_carry_every_name_of_the_study():
    methods = json.loads((ROOT / "data/metrics/evaluate.json").read_text())["methods"]
    assert set(methods) == set(METHODS)
    shares = [
        "em",
        "em_low",
        "em_high",
        "f1",
        "cover_em",
        "recall_rate",
        "recall_rate_refined",
        "recall_accuracy",
    ]
    sizes = ["n", "art", "context_tokens", "context_tokens_peak", "total_tokens"]
    for name, row in methods.items():
        assert set(shares + sizes) <= set(row)
        assert row["n"] >= 600
        recalls = [row[key] for key in shares if key.startswith("recall")]
        if name in ("direct", "cot"):
            assert recalls == [None] * 3
        else:
            assert 0 <= row["recall_accuracy"] <= row["recall_rate"] <= 1
        assert row["em_low"] <= row["em"] <= row["em_high"] <= 1


def test_no_stage_took_more_than_four_gib():
    timings = sorted((ROOT / "data/metrics/timing").glob("*.json"))
    assert len(timings) == 6
    for path in timings:
        assert json.loads(path.read_text())["peak_rss_mib"] < 4096, path.name


def test_every_link_and_image_exists():
    targets = re.findall(r"\]\(([^)#]+)", README) + re.findall(r'src="([^"]+)"', README)
    local = [t for t in targets if "://" not in t]
    assert len(local) > 5
    assert not [t for t in local if not (ROOT / t).exists()]


def test_every_file_of_the_tree_exists():
    tree = README.split("```text")[1].split("```")[0]
    names = [line.split()[0] for line in tree.strip().splitlines() if not line.startswith(" ")]
    assert {"notebooks/", "crrl_lib/", "dvc.yaml", "params.yaml", "data/geo/"} <= set(names)
    assert not [name for name in names if not (ROOT / name).exists()]


@pytest.mark.parametrize("command", ["make repro", "make test"])
def test_the_two_commands_are_on_the_first_screen(command):
    assert command in "\n".join(README.splitlines()[:60])


def test_ci_runs_the_test_command_of_the_readme():
    assert re.search(r"^\s*(exec )?make test\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_every_dial_that_the_readme_turns_exists():
    params = (ROOT / "params.yaml").read_text()
    dials = re.findall(r"-S '?(?:method|scale\.\w+)\.(\w+)\.(\w+)=", README)
    assert dials
    for section, key in dials:
        assert re.search(rf"^\s+{section}:", params, re.MULTILINE)
        assert re.search(rf"^\s+{key}:", params, re.MULTILINE)
