"""The params one stage may see, read from ``params.yaml`` and checked.

The file holds ``profile``, ``seed``, ``method: {stage: …}`` (the science) and
``scale: {profile: {stage: …}}`` (the budget). A stage gets its own two sections merged, and the
shared ``agent`` ones when ``dvc.yaml`` declares ``method.agent`` for it: what DVC does not track
cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

Value = None | bool | int | float | str | tuple["Value", ...]
TOP_KEYS = ("profile", "seed", "method", "scale")


@dataclass(frozen=True, eq=False, repr=False)
class Section(Mapping[str, Value]):
    """Params of one stage, read-only: ``section.k``, ``section["k"]``, ``dict(section)``."""

    _values: Mapping[str, Value]
    _where: str  # the file and the two sections, for messages

    def __getattr__(self, key: str) -> Value:
        if key.startswith("_"):  # Python's and IPython's own protocols
            raise AttributeError(key)
        if key in self._values:
            return self._values[key]
        known = ", ".join(sorted(self._values)) or "none"
        raise AttributeError(
            f"no key {key!r} in {self._where}; known keys: {known}. Correct the name or add the key"
        )

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Section({dict(self._values)!r})"

    def require(self, **types: Any) -> Section:
        """Check names and types, ``require(lr=float, judge=(str, None))``; return the section.

        An int passes for a float, a bool never for a number. Raise with every fault at once.
        """
        faults = []
        for key, allowed in types.items():
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
            if key not in self._values:
                faults.append(f"{key} is missing")
            elif not any(_is_a(self._values[key], t) for t in allowed):
                names = " or ".join(t.__name__ if t else "null" for t in allowed)
                faults.append(f"{key} is {self._values[key]!r}, expected {names}")
        if faults:
            raise TypeError(f"{'; '.join(faults)}: change it in {self._where}")
        return self


@dataclass(frozen=True)
class Params:
    """What one stage may see; ``agent`` is None for a stage that has not declared it."""

    profile: str
    seed: int
    own: Section
    agent: Section | None


def read_params(stage: str, params_file: Path, dvc_file: Path = Path("dvc.yaml")) -> Params:
    """Read and check what ``stage`` may see; raise on an unknown stage, profile, key or type."""
    stages = _read_yaml(dvc_file).get("stages", {})
    if stage not in stages:
        known = ", ".join(name for name in stages if name != "render")
        raise ValueError(f"no stage {stage!r} in {dvc_file}; expected one of {known}")
    tree = _read_yaml(params_file)
    profile, seed = _profile_and_seed(tree, params_file)
    rolls_out = "method.agent" in stages[stage].get("params", [])
    return Params(
        profile=profile,
        seed=seed,
        own=_section(tree, profile, stage, params_file),
        agent=_section(tree, profile, "agent", params_file) if rolls_out else None,
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    # YAML 1.2 by the pure loader: `dvc exp run -S lr=2e-6` writes 2e-06, a string to PyYAML.
    content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, expected keys and values")
    return content


def _profile_and_seed(tree: Mapping[str, Any], file: Path) -> tuple[str, int]:
    if set(tree) != set(TOP_KEYS):
        raise ValueError(
            f"{file} has the top-level keys {', '.join(map(str, tree))}; expected exactly "
            f"{', '.join(TOP_KEYS)}: a dial belongs under method.<stage> or scale.<profile>.<stage>"
        )
    profile, seed = tree["profile"], tree["seed"]
    if profile not in tree["scale"]:
        raise ValueError(
            f"unknown profile {profile!r} in {file}; expected one of {', '.join(tree['scale'])}, "
            "the keys of scale there"
        )
    if not _is_a(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r} in {file}; expected an integer of 0 or more")
    return profile, seed


def _section(tree: Mapping[str, Any], profile: str, key: str, file: Path) -> Section:
    """Merge ``method.<key>`` and ``scale.<profile>.<key>``; a dial lives in exactly one of them."""
    method = _checked(tree["method"] or {}, key, f"{file}: method.{key}")
    scales = {
        name: _checked(scale or {}, key, f"{file}: scale.{name}.{key}")
        for name, scale in tree["scale"].items()
    }
    for name, scale in scales.items():
        if twice := ", ".join(sorted(method.keys() & scale.keys())):
            raise ValueError(
                f"{file}: {twice} stands in both method.{key} and scale.{name}.{key}; expected in "
                "exactly one: keep it in method if it is science, in scale if it is budget"
            )
    for name, scale in scales.items():
        for dial in scale.keys() & scales[profile].keys():
            where = f"{file}: scale.{{}}.{key}.{dial}"
            _same_kind(where, profile, scales[profile][dial], name, scale[dial])
    return Section(method | scales[profile], f"method.{key} or scale.{profile}.{key} of {file}")


def _same_kind(where: str, one: str, value: Value, other: str, example: Value) -> None:
    """Hold the profiles to one kind of value a dial: a text where a number belongs is a slip."""
    kinds = [bool, float, str, tuple]
    named = dict(zip(kinds, ("true or false", "a number", "a text", "a list"), strict=True))
    got, wanted = (next((k for k in kinds if _is_a(v, k)), None) for v in (value, example))
    if got and wanted and got is not wanted:
        raise TypeError(
            f"{where.format(one)} is {value!r}, {named[got]}; expected {named[wanted]}, as in "
            f"{where.format(other).split(': ')[1]}"
        )


def _checked(tree: Mapping[str, Any], key: str, where: str) -> dict[str, Value]:
    """Return one section, its lists as tuples; raise on nested values and impossible names."""
    section = tree.get(key) or {}
    if not isinstance(section, dict):
        raise TypeError(f"{where} is {section!r}, expected keys and values")
    for name, value in section.items():
        if not str(name).isidentifier() or str(name).startswith("_") or name in dir(Section):
            raise ValueError(f"{where}: {name!r} cannot be a key; expected another plain name")
        flat = value if isinstance(value, list) else [value]
        if not all(v is None or isinstance(v, bool | int | float | str) for v in flat):
            raise TypeError(
                f"{where}.{name} is {value!r}; expected a scalar, null or a list of scalars"
            )
    return {k: tuple(v) if isinstance(v, list) else v for k, v in section.items()}


def _is_a(value: Any, kind: type | None) -> bool:
    if kind is None:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    if kind in (list, tuple):
        return isinstance(value, tuple)
    return isinstance(value, (int, float) if kind is float else kind)
