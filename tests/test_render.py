"""Rendered pages: stable bytes, no HTML, no machine's paths, links that lead somewhere."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
PNG = (  # one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAX+XDSwAAAABJRU5Erk"
    "Jggg=="
)
PAGES = sorted((ROOT / "notebooks/rendered").glob("*/README.md"))


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("render", ROOT / "notebooks/render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(data: dict, kind: str = "display_data", **more) -> nbformat.NotebookNode:
    return new_output(kind, data=data, **more)


def stream(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    return new_output("stream", name=name, text=text)


def cell(name: str, source: str, outputs=(), tags=()) -> nbformat.NotebookNode:
    return new_code_cell(source, id=name, outputs=list(outputs), metadata={"tags": list(tags)})


def make_root(root: Path, count: int = 0) -> Path:
    """A repository with three notebooks, the middle one executed for the ``count``-th time."""
    (root / "data/executed").mkdir(parents=True)
    (root / "notebooks").mkdir()
    for name in ("01_index", "02_study", "03_train"):
        (root / f"notebooks/{name}.ipynb").touch()
    html = {
        "text/html": "<style>x</style>",
        "text/markdown": "| a |\n|---|\n| 1 |",
        "text/plain": "x",
    }
    cells = [
        new_markdown_cell("# Study\n\nSee [before](01_index.ipynb).", id="title"),
        cell("params", 'params_file = "params.yaml"', tags=["parameters"]),
        cell("injected", 'params_file = "secret"', tags=["injected-parameters"]),
        cell("loop", "train()\n\n\n# done", [stream("step 1\nstep 2\n")], tags=["hide-output"]),
        cell("plumbing", "import os", [stream("ready\n")], tags=["hide-input"]),
        cell("gone", "whole_cell_gone()", [stream("gone too\n")], tags=["hide-cell"]),
        cell(
            "noise", "warn()", [stream(f"{root}/x.py:1: UserWarning", "stderr"), stream("calm\n")]
        ),
        cell("path", "path", [shown({"text/plain": f"<X at 0x{count}f> {root}/data/a"})]),
        cell("table", "table(df)", [shown(html, "execute_result", execution_count=count)]),
        cell("curve", "plot()", [shown({"image/png": PNG, "text/plain": f"<Figure {count}>"})]),
    ]
    book = new_notebook(cells=cells, metadata={"papermill": {"duration": count}})
    nbformat.write(book, root / "data/executed/02_study.ipynb")
    return root


def test_doctests(render):
    assert doctest.testmod(render).failed == 0


def test_page_shows_what_it_should(render, tmp_path):
    page = render.render("02_study", make_root(tmp_path / "r")).read_text()
    links = (
        "[README](../../../README.md) · [← 01_index](../01_index/README.md) · "
        "[the notebook](../../02_study.ipynb) · [03_train →](../03_train/README.md)\n"
    )
    assert page == (
        f"{links}\n"
        "# Study\n\nSee [before](../01_index/README.md).\n\n"
        '```python\nparams_file = "params.yaml"\n```\n\n'
        "```python\ntrain()\n\n\n# done\n```\n\n    ready\n\n"
        "```python\nwarn()\n```\n\n    calm\n\n"
        "```python\npath\n```\n\n    <X> data/a\n\n"
        "```python\ntable(df)\n```\n\n| a |\n|---|\n| 1 |\n\n"
        "```python\nplot()\n```\n\n![png](curve.png)\n\n"
        f"{links}"
    )


def test_another_run_on_another_machine_gives_the_same_bytes(render, tmp_path):
    roots = [make_root(tmp_path / name, count) for count, name in enumerate(["one", "two/deep"])]
    folders = [render.render("02_study", root).parent for root in roots]
    found = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert found[0] == found[1]
    assert set(found[0]) == {"README.md", "curve.png"}
    assert found[0]["curve.png"].startswith(b"\x89PNG")


def test_old_images_go(render, tmp_path):
    root = make_root(tmp_path / "r")
    folder = root / "notebooks/rendered/02_study"
    folder.mkdir(parents=True)
    (folder / "stale.png").touch()
    render.render("02_study", root)
    assert not (folder / "stale.png").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["02_study"]


def test_html_alone_is_refused(render, tmp_path):
    root = make_root(tmp_path / "r")
    book = new_notebook(cells=[cell("frame", "df", [shown({"text/html": "<table>"})])])
    nbformat.write(book, root / "data/executed/02_study.ipynb")
    with pytest.raises(ValueError, match="cell frame shows only text/html.*figures.table"):
        render.render("02_study", root)


def test_missing_and_unknown_notebooks_are_named(render, tmp_path):
    root = make_root(tmp_path / "r")
    with pytest.raises(
        FileNotFoundError, match=r"no executed notebook data/executed/01_index.ipynb"
    ):
        render.render("01_index", root)
    shutil.copy(root / "data/executed/02_study.ipynb", root / "data/executed/09_none.ipynb")
    with pytest.raises(ValueError, match="no notebook '09_none'.*01_index, 02_study"):
        render.render("09_none", root)


def test_pages_are_committed():
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    assert {page.parent.name for page in PAGES} == notebooks, "make render, then commit the pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_committed_page_is_clean(page):
    text = page.read_text()
    assert not re.search(r"<style|<table|<div|<script", text)
    assert not re.search(r"site-packages|/home/|/root/|/work/|/tmp/|0x[0-9a-f]{6,}", text)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target = link.partition("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page}: {link} leads nowhere"
