"""Figures: the same bytes on every run; tables: what markdown reads is what was meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from crrl_lib.figures import COLOURS, LABELS, save_figure, table, use_style

METHODS = {
    *["direct", "cot", "rag", "ircot", "ircot_o", "ircot_oq", "ircot_oqp"],
    *["self_refine", "oracle_refine", "context_refiner"],
    *["self_refine_oq", "oracle_refine_oq", "context_refiner_oq", "search_grpo", "crrl"],
}
DRAW = """
import matplotlib; matplotlib.use("agg")
import matplotlib.pyplot as plt, pandas as pd
from crrl_lib.figures import COLOURS, save_figure, use_style
use_style()
fig, axes = plt.subplots()
data = pd.DataFrame({"step": [0, 1, 2], "reward": [0.1, 1 / 3, 0.5]})
axes.plot(data["step"], data["reward"], color=COLOURS["crrl"], label="CRRL")
axes.fill_between(data["step"], 0, data["reward"], alpha=0.2)
axes.set_title("reward"); axes.legend()
save_figure(fig, "crrl_grpo", "reward", data)
"""


def test_every_method_has_its_own_colour_and_label():
    assert set(COLOURS) == set(LABELS) == METHODS
    assert len(set(COLOURS.values())) == len(set(LABELS.values())) == len(METHODS)


def draw(folder: Path, hash_seed: str) -> dict[str, bytes]:
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": root, "PYTHONHASHSEED": hash_seed}
    folder.mkdir()
    subprocess.run([sys.executable, "-c", DRAW], cwd=folder, env=environment, check=True)
    return {path.name: path.read_bytes() for path in (folder / "figures/crrl_grpo").iterdir()}


def test_two_processes_write_the_same_bytes(tmp_path):
    first, second = draw(tmp_path / "a", "1"), draw(tmp_path / "b", "2")
    assert first == second
    assert set(first) == {"reward.svg", "reward.csv"}
    assert first["reward.csv"] == b"step,reward\n0,0.1\n1,0.333333\n2,0.5\n"
    svg = first["reward.svg"].decode()
    assert "dc:date" not in svg
    assert "font-family" not in svg  # text is drawn as paths


def test_figure_without_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="figure s/empty has no data rows"):
        save_figure(plt.figure(), "s", "empty", pd.DataFrame({"x": []}))
    assert not Path("figures").exists()


def test_style_does_not_depend_on_installed_fonts():
    with mpl.rc_context():
        use_style()
        assert mpl.rcParams["font.family"] == ["DejaVu Sans"]
        assert mpl.rcParams["svg.hashsalt"] == "crrl"


def test_table_formats_and_aligns():
    data = pd.DataFrame({"method": ["crrl", "cot"], "em": [2 / 3, np.nan], "n": [600, 7]})
    assert table(data).data == (
        "| method   |    em |   n |\n"
        "|:---------|------:|----:|\n"
        "| crrl     | 0.667 | 600 |\n"
        "| cot      |     – |   7 |"
    )


def test_table_keeps_text_as_text():
    texts = ["<answer>Rome</answer>", "a|b", "two\nlines", "007", None, "$5 * 3"]
    rows = table(pd.DataFrame({"text": texts})).data.splitlines()[2:]
    cells = [row.removeprefix("| ").removesuffix("|").strip() for row in rows]
    assert cells == [r"\<answer>Rome\</answer>", r"a\|b", "two lines", "007", "–", r"\$5 \* 3"]
