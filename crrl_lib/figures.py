"""Figures and tables: one style, a colour per method, the same bytes on every run."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import Markdown
from matplotlib.figure import Figure

# One hue a family; the reduced view of a refiner is the darker shade of its full view.
COLOURS = {
    "direct": "#bbbbbb",
    "cot": "#888888",
    "rag": "#555555",
    "ircot": "#88ccee",
    "ircot_o": "#44a5d4",
    "ircot_oq": "#0072b2",
    "ircot_oqp": "#004c7a",
    "self_refine": "#e3b6d2",
    "self_refine_oq": "#cc79a7",
    "oracle_refine": "#e8dc7a",
    "oracle_refine_oq": "#b8a200",
    "context_refiner": "#7fd3b8",
    "context_refiner_oq": "#009e73",
    "search_grpo": "#e69f00",
    "crrl": "#d55e00",
}
LABELS = {
    "direct": "Direct",
    "cot": "CoT",
    "rag": "RAG",
    "ircot": "IRCoT",
    "ircot_o": "IRCoT-o",
    "ircot_oq": "IRCoT-oq",
    "ircot_oqp": "IRCoT-oqp",
    "self_refine": "Self-Refine",
    "self_refine_oq": "Self-Refine-oq",
    "oracle_refine": "Oracle (rule-based)",
    "oracle_refine_oq": "Oracle-oq (rule-based)",
    "context_refiner": "Context Refiner",
    "context_refiner_oq": "Context Refiner-oq",
    "search_grpo": "Search-GRPO",
    "crrl": "CRRL",
}
STYLE = {
    # Matplotlib ships this font; seaborn's first choice is whatever the machine has.
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "crrl",  # element ids are random without it
    "svg.fonttype": "path",  # looks the same where the font is missing
    "figure.figsize": (7.0, 3.6),
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def use_style() -> None:
    """Set the style for every figure drawn after this call."""
    sns.set_theme(context="notebook", style="whitegrid", rc=STYLE)


def save_figure(fig: Figure, stage: str, name: str, data: pd.DataFrame) -> None:
    """Write ``figures/<stage>/<name>.svg`` and, beside it as CSV, the data it was drawn from.

    The notebook shows the figure itself. Same figure, same bytes.
    """
    if data.empty:
        raise ValueError(
            f"figure {stage}/{name} has no data rows; pass the table it was drawn from"
        )
    folder = Path("figures") / stage
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({key: STYLE[key] for key in ("svg.hashsalt", "svg.fonttype")}):
        fig.savefig(folder / f"{name}.svg", format="svg", metadata={"Date": None})
    data.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n")


def table(data: pd.DataFrame, digits: int = 3) -> Markdown:
    """Show ``data`` as a markdown table; HTML tables print their CSS on GitHub.

    >>> print(table(pd.DataFrame({"method": ["crrl"], "em": [2 / 3]}), digits=2).data)
    | method   |   em |
    |:---------|-----:|
    | crrl     | 0.67 |
    """
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in data.dtypes]
    align = ["right" if n else "left" for n in numeric]
    shown = pd.DataFrame(
        {str(name): [_cell(value, digits) for value in column] for name, column in data.items()}
    )
    return Markdown(shown.to_markdown(index=False, disable_numparse=True, colalign=align))


def _cell(value: object, digits: int) -> str:
    """Format one cell; escape what markdown would read as a tag, a column or a formula."""
    if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return "–"
    if isinstance(value, float | np.floating):
        return f"{value:.{digits}f}"
    text = " ".join(str(value).split())
    for mark in "\\|<$*`":
        text = text.replace(mark, f"\\{mark}")
    return text
