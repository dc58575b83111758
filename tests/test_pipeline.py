"""dvc.yaml, params.yaml and the notebooks say the same; every notebook keeps the house's rules."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import nbformat
import pytest
from ruamel.yaml import YAML
from traitlets.config.loader import PyFileConfigLoader

ROOT = Path(__file__).resolve().parents[1]
STAGES = {
    "build_index": "01_build_index",
    "masking_study": "02_masking_study",
    "distill_refiner_data": "03_distill_refiner_data",
    "sft_refiner": "04_sft_refiner",
    "crrl_grpo": "05_crrl_grpo",
    "evaluate": "06_evaluate",
}
NOTEBOOKS = ["00_tour", *STAGES.values()]
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
HEX_ID = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]+)*")  # what Jupyter gives a new cell


@cache
def yaml(name: str) -> dict:
    return YAML(typ="safe", pure=True).load((ROOT / name).read_text())


@cache
def notebook(name: str) -> nbformat.NotebookNode:
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.is_file(), f"notebooks/{name}.ipynb is not there"
    return nbformat.read(path, as_version=4)


def code_cells(name: str) -> list[nbformat.NotebookNode]:
    return [c for c in notebook(name).cells if c.cell_type == "code"]


def code(name: str) -> str:
    """The notebook's Python; IPython's magics are not Python."""
    lines = "\n".join(c.source for c in code_cells(name)).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("%", "!")))


def library_imports(source: str) -> set[str]:
    """Modules of crrl_lib that ``source`` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("crrl_lib.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "crrl_lib":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crrl_lib."):
            found.add(node.module.split(".")[1])
    return found


def closure(source: str) -> set[str]:
    """Modules of crrl_lib that running ``source`` can load."""
    seen: set[str] = set()
    todo = library_imports(source)
    while todo:
        name = todo.pop()
        seen.add(name)
        path = ROOT / "crrl_lib" / f"{name}.py"
        assert path.is_file(), f"crrl_lib.{name} is imported and does not exist"
        todo |= library_imports(path.read_text()) - seen
    return seen


def test_closure_follows_every_form_of_import():
    source = "import crrl_lib.views\nfrom crrl_lib import params\ndef f():\n import numpy\n"
    assert closure(source) == {"views", "records", "params"}
    assert closure("from crrl_lib.protocol import STOP") == {"protocol", "records"}


def test_package_init_is_empty_so_it_is_no_dependency():
    body = ast.parse((ROOT / "crrl_lib/__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr), "crrl_lib/__init__.py may hold a docstring only"


def test_one_stage_a_notebook():
    assert [s for s in yaml("dvc.yaml")["stages"] if s != "render"] == list(STAGES)
    assert yaml("dvc.yaml")["stages"]["render"]["foreach"] == list(STAGES.values())
    found = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert found == NOTEBOOKS


@pytest.mark.parametrize(("stage", "name"), STAGES.items())
def test_stage_uses_its_one_name_everywhere(stage, name):
    spec = yaml("dvc.yaml")["stages"][stage]
    executed = f"data/executed/{name}.ipynb"
    assert spec["cmd"] == f"papermill ${{pm}} notebooks/{name}.ipynb {executed}"
    assert spec["outs"] == [f"data/{stage}", executed]
    metrics = [f"data/metrics/{stage}.json", f"data/metrics/timing/{stage}.json"]
    assert spec["metrics"] == [{path: {"cache": False}} for path in metrics]
    assert spec["plots"] == [{f"figures/{stage}": {"cache": False}}]
    assert re.findall(r"open_stage\(\s*['\"](\w+)['\"]", code(name)) == [stage]
    assert "write_metrics(" in code(name)
    assert "write_timing(" in code(name)


@pytest.mark.parametrize(("stage", "name"), STAGES.items())
def test_library_deps_are_exactly_the_import_closure(stage, name):
    deps = yaml("dvc.yaml")["stages"][stage]["deps"]
    expected = sorted(f"crrl_lib/{module}.py" for module in closure(code(name)))
    block = "\n".join(f"      - {path}" for path in expected)
    found = [dep for dep in deps if dep.startswith("crrl_lib/")]
    assert found == expected, f"put these into dvc.yaml, stage {stage}:\n{block}"
    assert f"notebooks/{name}.ipynb" in deps


@pytest.mark.parametrize(("stage", "name"), STAGES.items())
def test_every_path_read_is_declared(stage, name):
    """A literal path of data/ in a notebook lies in a dependency or in the stage's own outputs."""
    spec = yaml("dvc.yaml")["stages"][stage]
    own = [f"data/{stage}", f"figures/{stage}", "data/metrics"]
    for literal in set(re.findall(r"['\"]((?:data|figures)/[\w./-]*)", code(name))):
        path = literal.rstrip("/")
        known = [d for d in [*spec["deps"], *own] if f"{path}/".startswith(f"{d}/")]
        assert known, f"{name} names {literal}, which is no dep of stage {stage} in dvc.yaml"


def test_paths_of_deps_are_outputs_of_other_stages_or_committed():
    stages = {s: yaml("dvc.yaml")["stages"][s] for s in STAGES}
    made = {out for spec in stages.values() for out in spec["outs"]}
    made |= {path for spec in stages.values() for entry in spec["metrics"] for path in entry}
    for stage, spec in stages.items():
        for dep in spec["deps"]:
            assert dep in made or (ROOT / dep).exists(), f"stage {stage}: {dep} comes from nowhere"


@pytest.mark.parametrize("stage", STAGES)
def test_params_are_what_open_stage_hands_out(stage):
    declared = yaml("dvc.yaml")["stages"][stage]["params"]
    sections = [stage, "agent"] if re.search(r"\.agent\b", code(STAGES[stage])) else [stage]
    params = yaml("params.yaml")
    expected = {"profile", "seed"} | {f"method.{s}" for s in sections if s in params["method"]}
    for profile in params["scale"]:
        here = {s for s in sections if s in params["scale"][profile]}
        expected |= {f"scale.${{profile}}.{s}" for s in here}
    assert sorted(declared) == sorted(expected), "dvc.yaml declares other params than are read"


def test_params_have_a_section_for_each_stage_and_no_other():
    params = yaml("params.yaml")
    known = {*STAGES, "agent"}
    used = set(params["method"])
    assert used <= known
    for profile, sections in params["scale"].items():
        assert set(sections) <= known, f"scale.{profile} has sections that are no stage"
        used |= set(sections)
    assert used == known, f"no params for {known - used}"


def test_profiles_have_the_same_keys():
    scale = yaml("params.yaml")["scale"]
    assert {"tiny", "paper"} <= set(scale)
    keys = {p: {(s, k) for s in scale[p] for k in scale[p][s] or {}} for p in scale}
    for profile in scale:
        assert keys[profile] == keys["tiny"], f"{profile}: {keys[profile] ^ keys['tiny']}"


def test_the_course_of_training_is_plotted_by_step():
    declared = {path: axes for plot in yaml("dvc.yaml")["plots"] for path, axes in plot.items()}
    assert set(declared) == {
        "figures/sft_refiner/training.csv",
        "figures/crrl_grpo/search_grpo.csv",
        "figures/crrl_grpo/crrl.csv",
    }
    for path, axes in declared.items():
        head = (ROOT / path).read_text().splitlines()[0].split(",")
        assert {axes["x"], axes["y"]} <= set(head)


@pytest.mark.parametrize(("stage", "name"), STAGES.items())
def test_every_dial_is_read(stage, name):
    params = yaml("params.yaml")
    keys = set(params["method"].get(stage) or {}) | set(params["scale"]["tiny"].get(stage) or {})
    read = r"""\bp\.{0}\b|["']{0}["']|^\s+{0}\b"""  # p.key, "key", or a line of a list of names
    dead = {key for key in keys if not re.search(read.format(key), code(name), re.MULTILINE)}
    assert not dead, f"{name} does not read {sorted(dead)} of params.yaml"


def test_every_dial_of_the_agent_is_read():
    params = yaml("params.yaml")
    keys = set(params["method"]["agent"]) | set(params["scale"]["tiny"]["agent"])
    library = "\n".join(path.read_text() for path in sorted((ROOT / "crrl_lib").glob("*.py")))
    everything = library + "\n".join(code(name) for name in STAGES.values())
    dead = {k for k in keys if not re.search(rf"""agent\.{k}\b|agent\["{k}"\]""", everything)}
    assert not dead, f"nothing reads {sorted(dead)} of params.yaml's agent"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_saving_in_jupyterlab_changes_no_byte(name):
    """No outputs, fixed kernelspec, nbformat's own layout: opening and saving keeps the hash."""
    loader = PyFileConfigLoader("jupyter_server_config.py", path=str(ROOT / "notebooks"))
    hook = loader.load_config().ContentsManager.pre_save_hook
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.is_file(), f"notebooks/{name}.ipynb is not there"
    model = {"type": "notebook", "content": json.loads(path.read_text())}
    hook(model=model, path=f"notebooks/{name}.ipynb", contents_manager=None)
    assert nbformat.writes(model["content"]) + "\n" == path.read_text()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_keeps_the_house_rules(name):
    book = notebook(name)
    nbformat.validate(book)
    assert book.metadata.kernelspec.name == "python3"
    assert book.metadata.language_info.name == "python"
    ids = [cell.id for cell in book.cells]
    assert len(set(ids)) == len(ids)
    poor = [i for i in ids if not SLUG.fullmatch(i) or HEX_ID.fullmatch(i)]
    assert not poor, f"cells need slug ids such as grpo-loop, not {poor}"
    cells = code_cells(name)
    assert all(not c.outputs and c.execution_count is None for c in cells), "saved with outputs"
    long = [c.id for c in cells if len(c.source.splitlines()) > 25]
    assert not long, f"over 25 lines: {long}"
    assert len(cells) <= len(book.cells) - len(cells), "at least as much markdown as code"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_defines_little(name):
    for node in ast.walk(ast.parse(code(name))):
        assert not isinstance(node, ast.ClassDef), f"class {node.name} belongs into crrl_lib"
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 10, f"{node.name} has {lines} lines; over 10 belongs into crrl_lib"


@pytest.mark.parametrize("name", STAGES.values())
def test_parameters_cell_is_one_line(name):
    tagged = [c for c in code_cells(name) if "parameters" in c.metadata.get("tags", [])]
    assert [c.source for c in tagged] == ['params_file = "params.yaml"']
    assert re.search(r"open_stage\([^)]*params_file\)", code(name))
