"""Open a stage: its root, params, seeds and device, and where its results go."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crrl_lib.params import Section, read_params


@dataclass(frozen=True, repr=False)
class Stage:
    """One opened stage. Paths are relative to the root, which is the working directory."""

    name: str
    profile: str
    seed: int
    device: str  # "cuda" or "cpu"
    p: Section  # method.<stage> and scale.<profile>.<stage> in one
    rng: np.random.Generator  # from seed and name: stages draw independently
    _agent: Section | None = None
    _seconds: dict[str, float] = field(default_factory=dict)

    @property
    def agent(self) -> Section:
        """The params shared by stages that roll out; raise when this stage may not see them."""
        if self._agent is None:
            raise AttributeError(
                f"stage {self.name} does not declare method.agent, so DVC would not see it change; "
                "add method.agent and scale.${profile}.agent to its params in dvc.yaml"
            )
        return self._agent

    @property
    def data(self) -> Path:
        """The folder of its outputs."""
        return Path("data") / self.name

    @property
    def figures(self) -> Path:
        """The folder of its figures."""
        return Path("figures") / self.name

    @property
    def metrics_file(self) -> Path:
        """Its results, compared byte by byte."""
        return Path("data/metrics") / f"{self.name}.json"

    @property
    def timing_file(self) -> Path:
        """Its seconds and memory, never compared."""
        return Path("data/metrics/timing") / f"{self.name}.json"

    @contextmanager
    def timer(self, label: str) -> Iterator[None]:
        """Add the seconds of a ``with`` block to ``label``, for ``write_timing``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[label] = self._seconds.get(label, 0.0) + seconds

    def seconds(self, label: str) -> float:
        """Return what the timer of ``label`` has added up to."""
        return self._seconds[label]

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write the results with profile and seed: sorted keys, floats to 6 digits, no NaN."""
        _write_json(self.metrics_file, metrics, {"profile": self.profile, "seed": self.seed})

    def write_timing(self, timing: Mapping[str, Any] | None = None) -> None:
        """Write what the timers collected, the peak memory in MiB, and ``timing``."""
        head: dict[str, Any] = {"profile": self.profile, "device": self.device}
        unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss: bytes there, KiB on Linux
        head["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        if self.device == "cuda":
            import torch

            head["peak_gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20
        _write_json(self.timing_file, timing or {}, head | {"seconds": self._seconds})

    def __repr__(self) -> str:
        head = f"stage {self.name}: profile {self.profile}, seed {self.seed}, {self.device}"
        said = (dict(self.p) | self._shared()).items()
        lines = (f"  {key} = {json.dumps(value, ensure_ascii=False)}" for key, value in said)
        return "\n".join([head, *lines])

    def _repr_markdown_(self) -> str:
        lines = [
            f"Stage `{self.name}` · profile `{self.profile}` · seed {self.seed} · {self.device}",
            "",
            *_markdown_table(self.p),
        ]
        if self._agent is not None:
            lines += ["", "<details><summary>the agent, as in every stage</summary>", ""]
            lines += [*_markdown_table(self._shared()), "", "</details>"]
        return "\n".join(lines)

    def _shared(self) -> dict[str, Any]:
        return {f"agent.{key}": value for key, value in (self._agent or {}).items()}


def _markdown_table(values: Mapping[str, Any]) -> list[str]:
    pipe = "\\|"  # a bare one would end the column
    said = {k: json.dumps(v, ensure_ascii=False).replace("|", pipe) for k, v in values.items()}
    return ["| param | value |", "|---|---|", *(f"| `{k}` | `{v}` |" for k, v in said.items())]


def open_stage(name: str, params_file: str | Path = "params.yaml") -> Stage:
    """Open stage ``name``: change to the root, read its params, seed, make its two folders.

    The same under papermill and in JupyterLab, and when called again. Show the returned stage: it
    prints what was read.
    """
    os.chdir(find_root(Path.cwd()))
    if "DVC_STAGE" in os.environ:
        os.environ["TQDM_DISABLE"] = "1"  # under papermill each refresh of a bar is one more line
    params = read_params(name, Path(params_file))
    stage = Stage(
        name=name,
        profile=params.profile,
        seed=params.seed,
        device=_seed_everything(params.seed),
        p=params.own,
        rng=np.random.default_rng([params.seed, *name.encode()]),
        _agent=params.agent,
    )
    stage.data.mkdir(parents=True, exist_ok=True)
    stage.figures.mkdir(parents=True, exist_ok=True)
    return stage


def find_root(start: Path) -> Path:
    """Walk up from ``start`` to the folder that holds ``dvc.yaml``.

    Not ``DVC_ROOT``: in a queued experiment that is the main workspace, not the one being run.
    """
    for folder in (start, *start.parents):
        if (folder / "dvc.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no dvc.yaml in {start} or above it; start inside the repository")


def _seed_everything(seed: int) -> str:
    """Seed Python, NumPy and PyTorch; return the device."""
    import torch  # four seconds: not for those who only import this module

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (some libraries draw from the global one; we do not)
    torch.manual_seed(seed)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _write_json(path: Path, values: Mapping[str, Any], head: Mapping[str, Any]) -> None:
    """Replace ``path`` in one step; ``head`` is added and may not be given again."""
    if twice := ", ".join(sorted(values.keys() & head.keys())):
        raise ValueError(f"{path}: {twice} is added by the stage itself; leave it out")
    content = json.dumps(_plain({**head, **values}, str(path)), indent=2, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(content + "\n", encoding="utf-8")
    temporary.replace(path)


def _plain(value: Any, where: str) -> Any:
    """Turn NumPy scalars into Python's, round floats to 6 digits; raise on NaN and other types."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}: {k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, where) for v in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; expected a number, or None for no result")
        return round(value, 6)
    if value is None or isinstance(value, bool | int | str):
        return value
    kind = type(value).__name__
    raise TypeError(f"{where} is a {kind}; expected a number, text, None, a list or a mapping")
