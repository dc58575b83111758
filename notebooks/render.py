"""Turn one executed notebook into the page a reader clicks on.

    python notebooks/render.py 05_crrl_grpo

reads ``data/executed/05_crrl_grpo.ipynb`` and writes ``notebooks/rendered/05_crrl_grpo/README.md``
and its PNGs. An executed notebook differs in bytes on every run; the page does not: no HTML, no
stderr, no machine's paths or addresses. A cell tagged ``hide-input`` or ``hide-output`` loses that
part, ``hide-cell`` both; what papermill injected is left out.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from nbformat import NotebookNode
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]
# Best first. HTML is missing on purpose: GitHub prints its CSS. So is SVG: a PNG is there too.
MIMES = ["text/markdown", "image/png", "image/jpeg", "text/latex", "text/plain"]


def render(name: str, root: Path = ROOT) -> Path:
    """Write the page of notebook ``name``; return it."""
    executed = root / "data" / "executed" / f"{name}.ipynb"
    if not executed.is_file():
        raise FileNotFoundError(
            f"no executed notebook {executed.relative_to(root)}; run its stage: dvc repro"
        )
    notebook = nbformat.read(executed, as_version=4)
    clean(notebook, root)
    body, resources = exporter().from_notebook_node(notebook)
    links = navigation(name, root)  # above and below: pages are long
    page = f"{links}\n\n{tidy(body)}\n\n{links}\n"
    return write(root / "notebooks" / "rendered" / name, page, resources["outputs"])


def exporter() -> MarkdownExporter:
    """Build nbconvert's markdown exporter with the tags this project uses."""
    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = {"hide-cell", "injected-parameters"}
    config.TagRemovePreprocessor.remove_input_tags = {"hide-input"}
    config.TagRemovePreprocessor.remove_all_outputs_tags = {"hide-output"}
    config.NbConvertBase.display_data_priority = MIMES
    return MarkdownExporter(config=config)


def clean(notebook: NotebookNode, root: Path) -> None:
    """Keep of every output what is the same on any machine; name images after their cell."""
    notebook.metadata["language_info"] = {"name": "python"}  # papermill may leave it out
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source)
        if cell.cell_type != "code":
            continue
        kept = [out for out in cell.outputs if out.get("name") != "stderr"]
        for number, output in enumerate(kept):
            clean_output(output, cell.id if number == 0 else f"{cell.id}-{number}", root)
        cell.outputs = kept


def clean_output(output: NotebookNode, image: str, root: Path) -> None:
    """Clean one output in place; raise when all it offers is HTML or SVG."""
    if output.output_type == "stream":
        output.text = anonymous(output.text, root)
    if output.output_type not in {"display_data", "execute_result"}:
        return
    offered = list(output.data)
    output.data = NotebookNode({m: d for m, d in output.data.items() if m in MIMES})
    if not output.data:
        raise ValueError(
            f"cell {image} shows only {', '.join(offered)}; expected one of {', '.join(MIMES)}: "
            "show tables with crrl_lib.figures.table"
        )
    for mime in output.data:
        if mime.startswith("text/"):
            output.data[mime] = anonymous(output.data[mime], root)
        else:
            output.metadata["filename"] = f"{image}.{mime.removeprefix('image/')}"


def anonymous(text: str, root: Path) -> str:
    """Take out colours, redrawn lines, the machine's paths and memory addresses.

    >>> anonymous("50%\\r\\x1b[32m100%\\x1b[0m of /srv/crrl/data/x at 0x7f12", Path("/srv/crrl"))
    '100% of data/x'
    """
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    text = re.sub(r"^[^\n]*\r(?!\n)", "", text, flags=re.MULTILINE)
    text = text.replace(f"{root}/", "").replace(str(root), ".").replace(str(Path.home()), "~")
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def relink(source: str) -> str:
    """Rewrite relative links, written from ``notebooks/``, for a page two folders deeper.

    >>> relink("[next](05_crrl_grpo.ipynb) ![](../figures/a.svg) [site](https://example.org)")
    '[next](../05_crrl_grpo/README.md) ![](../../../figures/a.svg) [site](https://example.org)'
    """

    def target(match: re.Match[str]) -> str:
        link = match[2]
        if re.match(r"[a-z]+:|[#/]", link):
            return match[0]
        if page := re.fullmatch(r"(\d\d_\w+)\.ipynb(#.*)?", link):
            return f"{match[1]}../{page[1]}/README.md{page[2] or ''})"
        return f"{match[1]}../../{link})"

    return re.sub(r"(\[[^\]]*\]\()([^)\s]+)\)", target, source)


def tidy(body: str) -> str:
    """Trim line ends, and outside code the runs of blank lines that the exporter leaves behind."""
    body = "\n".join(line.rstrip() for line in body.splitlines())
    parts = re.split(r"(^```.*?^```$)", body, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"\n{3,}", "\n\n", part) for part in parts[::2]]
    return "".join(parts).strip("\n")


def navigation(name: str, root: Path) -> str:
    """Link the README, the page before, the notebook itself, the page after."""
    names = sorted(path.stem for path in (root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if name not in names:
        raise ValueError(f"no notebook {name!r} in notebooks/; expected one of {', '.join(names)}")
    at = names.index(name)
    links = ["[README](../../../README.md)"]
    links += [f"[← {n}](../{n}/README.md)" for n in names[:at][-1:]]
    links += [f"[the notebook](../../{name}.ipynb)"]
    links += [f"[{n} →](../{n}/README.md)" for n in names[at + 1 :][:1]]
    return " · ".join(links)


def write(folder: Path, page: str, images: dict[str, bytes]) -> Path:
    """Write the page beside the old one, then swap: no stale image stays, no half page is seen."""
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    (fresh / "README.md").write_text(page, encoding="utf-8")
    for name, content in images.items():
        (fresh / name).write_bytes(content)
    shutil.rmtree(folder, ignore_errors=True)
    return fresh.replace(folder) / "README.md"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python notebooks/render.py NN_name [NN_name …]")
    for notebook_name in sys.argv[1:]:
        print(f"wrote {render(notebook_name).relative_to(ROOT)}")
