"""Who may know whom (house rules): imports inside the library, heavy imports, sizes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[1] / "crrl_lib"
TORCH = {"torch", "safetensors"}

# module: (library modules it may import, packages beside the standard library at import time)
ALLOWED = {
    "records": (set(), set()),
    "protocol": ({"records"}, {"numpy"}),
    "views": ({"records"}, {"numpy"}),
    "scoring": ({"records"}, {"numpy"}),
    "geo": ({"records", "scoring", "protocol"}, {"numpy"}),
    "entail": ({"records", "scoring"}, {"numpy"}),
    "sources": ({"records", "scoring"}, {"numpy"}),
    # The geo world's rule-based oracle speaks the protocol in an engine's place.
    "teacher": ({"records", "protocol", "geo", "refiner"}, set()),
    # retriever.py in two files: texts to vectors, and the indexes.
    "encoders": ({"records"}, {"numpy"} | TORCH),
    "retriever": ({"records", "encoders"}, {"numpy", "faiss"} | TORCH),
    "decode": ({"records"}, {"transformers"} | TORCH),
    "engine": ({"decode", "records"}, {"numpy", "transformers"} | TORCH),
    "grpo": ({"records"}, TORCH),
    "refiner": ({"records", "protocol"}, set()),
    "rollout": ({"records", "protocol", "views"}, set()),
    # The study's one table, view x refiner x policy, on top of the one rollout.
    "methods": ({"records", "rollout", "views"}, set()),
    # train.py in three files: the loop, one update, the health of a step.
    "health": ({"records"}, {"numpy"}),
    "update": ({"records", "grpo"}, {"numpy", "accelerate"} | TORCH),
    "train": (
        {"records", "grpo", "rollout", "scratch", "update", "health"},
        {"numpy", "accelerate", "transformers"} | TORCH,
    ),
    "params": (set(), {"ruamel"}),
    "project": ({"params"}, {"numpy"}),
    "scratch": (set(), set()),
    "figures": (set(), {"matplotlib", "seaborn", "pandas", "numpy", "IPython"}),
    "serve": ({"records", "retriever"}, set()),
}
# Never imported, not even inside a function.
FORBIDDEN = {
    "rollout": TORCH | {"pathlib", "os", "json", "transformers", "ruamel"},
    "refiner": TORCH | {"transformers"},
    "protocol": TORCH | {"transformers"},
    "views": TORCH | {"transformers"},
    "scoring": TORCH | {"transformers"},
    "grpo": {"pathlib", "os", "json", "transformers"},
}
MODULES = sorted(path.stem for path in LIBRARY.glob("*.py") if path.stem != "__init__")


def imports(body: list[ast.stmt], inside: bool) -> set[str]:
    """Dotted names imported in ``body``: at import time, or with ``inside`` in functions too."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "import crrl_lib by its name, not relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= set(names) if node.module == "crrl_lib" else {node.module}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif inside or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nested = [child for child in ast.walk(node) if child is not node]
            direct = [c for c in nested if isinstance(c, ast.Import | ast.ImportFrom)]
            if not inside:
                functions = [c for c in nested if isinstance(c, ast.FunctionDef)]
                hidden = {id(n) for f in functions for n in ast.walk(f)}
                direct = [c for c in direct if id(c) not in hidden]
            found |= imports(direct, inside)
    return found


def parsed(module: str) -> ast.Module:
    return ast.parse((LIBRARY / f"{module}.py").read_text())


def test_import_walk_sees_what_runs_when():
    source = (
        "import os.path\nfrom crrl_lib import views\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import jax\n"
        "try:\n    import yaml\nexcept ImportError:\n    raise\n"
        "class A:\n    def f(self):\n        import torch\n"
    )
    body = ast.parse(source).body
    assert imports(body, False) == {"os.path", "crrl_lib.views", "typing", "yaml"}
    assert imports(body, True) == {"os.path", "crrl_lib.views", "typing", "yaml", "torch"}


@pytest.mark.parametrize("module", MODULES)
def test_module_knows_only_whom_it_may(module):
    assert module in ALLOWED, f"give crrl_lib/{module}.py a row in tests/test_layers.py"
    library, packages = ALLOWED[module]
    everywhere = imports(parsed(module).body, inside=True)
    known = {name.split(".")[1] for name in everywhere if name.startswith("crrl_lib.")}
    assert known <= library, f"{module} may not know {sorted(known - library)}"
    first = {name.split(".")[0] for name in imports(parsed(module).body, inside=False)}
    third = first - set(sys.stdlib_module_names) - {"crrl_lib"}
    assert third <= packages, f"{module}: import {sorted(third - packages)} where it is used"
    named = {name.split(".")[0] for name in everywhere}
    assert not named & FORBIDDEN.get(module, set())


@pytest.mark.parametrize("module", MODULES)
def test_module_and_function_sizes(module):
    source = (LIBRARY / f"{module}.py").read_text()
    lines = len(source.splitlines())
    assert lines <= 250, f"crrl_lib/{module}.py has {lines} lines; the limit is 250"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 40, f"{module}.{node.name} has {length} lines; the limit is 40"


def test_nobody_imports_an_entry_point_of_the_notebooks():
    """These four are for notebooks; scratch also for train, params for project."""
    allowed = {"scratch": {"train"}, "params": {"project"}}
    for module, (library, _) in ALLOWED.items():
        for name in library & {"project", "figures", "scratch", "params"}:
            assert module in allowed.get(name, set()), f"{module} may not import {name}"
