"""Resume state of a long stage, safe against ``kill -9`` at any instant.

A save is written into a hidden folder and takes its name in one rename, manifest last, so what has
a name is complete. It lies outside DVC's outputs, which DVC deletes before a run, in
``data/.scratch/<stage>/<fingerprint>/``: other inputs, other folder, nothing stale is resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Writer = Callable[[Path], object]
MANIFEST = "manifest.json"
KEEP = 2  # the last save and the one before it


class Scratch:
    """Saves of one stage under one fingerprint.

    A ``Path`` among the inputs stands for its content, so a model or a module may be named there.
    One process saves: under several ranks, the first.
    """

    def __init__(self, stage: str, inputs: Mapping[str, Any], root: Path | None = None) -> None:
        # In a queued experiment DVC_ROOT is the main workspace, which outlives the temporary one.
        root = root or Path(os.environ.get("DVC_ROOT") or Path.cwd())
        self.fingerprint = fingerprint(inputs)
        self.folder = root / "data" / ".scratch" / stage / self.fingerprint

    def save(self, step: int, files: Mapping[str, bytes | Writer]) -> Path:
        """Save the state after ``step`` and drop all saves but the last two; return its folder.

        A writer is called with the path it must create, a file or a folder.
        """
        for left in self.folder.glob(".writing-*"):  # by a killed writer
            shutil.rmtree(left)
        serial = 1 + max((_serial(path) for path in self.folder.glob("save-*")), default=-1)
        temporary = self.folder / f".writing-{serial:08d}"
        temporary.mkdir(parents=True)
        for name, content in files.items():
            _write(temporary, name, content)
        for path in _files(temporary):
            _sync(path)
        sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in _files(temporary)}
        manifest = {"step": step, "fingerprint": self.fingerprint, "sizes": sizes}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True))
        _sync(temporary / MANIFEST)
        for folder in (p for p in temporary.rglob("*") if p.is_dir()):
            _sync(folder)
        _sync(temporary)
        final = temporary.replace(self.folder / f"save-{serial:08d}")
        _sync(self.folder)  # the new name is on disk before an older save goes
        for old in self._complete()[KEEP:]:
            _remove(old)
        return final

    def load(self) -> tuple[int, Path] | None:
        """Return step and folder of the newest complete save, or None when there is none."""
        for path in self._complete():
            return json.loads((path / MANIFEST).read_text())["step"], path
        return None

    def clear(self) -> None:
        """Remove every save: the stage has succeeded."""
        if self.folder.exists():
            _remove(self.folder)

    def _complete(self) -> list[Path]:
        """List the complete saves, newest first."""
        saves = sorted(self.folder.glob("save-*"), key=_serial, reverse=True)
        return [path for path in saves if _is_complete(path)]


def fingerprint(inputs: Mapping[str, Any]) -> str:
    """Sixteen hex digits of the SHA-256 of the inputs' canonical JSON; a Path is its content.

    >>> fingerprint({"a": 1, "b": [2.5, None]}) == fingerprint({"b": (2.5, None), "a": 1})
    True
    """
    canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), default=_content)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _content(value: object) -> object:
    """Stand in for what JSON has no type for: a path by its bytes, a mapping as a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, Path):
        kind = type(value).__name__
        raise TypeError(f"fingerprint input {value!r} is a {kind}; expected JSON types or a Path")
    if not value.exists():
        raise FileNotFoundError(f"fingerprint input {value} does not exist; run its stage first")
    digest = hashlib.sha256()
    files = (path for path in _files(value) if path.parent.name != "__pycache__")
    for path in sorted(files) if value.is_dir() else [value]:
        digest.update(f"{path.relative_to(value)}\0".encode())
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def _write(folder: Path, name: str, content: bytes | Writer) -> None:
    path = folder / name
    if path.parent != folder or name == MANIFEST:
        raise ValueError(f"{name!r} cannot be saved; expected a plain name other than {MANIFEST}")
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    if not path.exists():
        raise FileNotFoundError(f"the writer of {name!r} made no {path}; it must create that path")


def _is_complete(save: Path) -> bool:
    """Whether the manifest and every file it names are there in full size."""
    manifest = save / MANIFEST
    if not manifest.is_file():
        return False
    sizes = json.loads(manifest.read_text())["sizes"]
    return all((save / n).is_file() and (save / n).stat().st_size == s for n, s in sizes.items())


def _remove(folder: Path) -> None:
    """Take the name away first: a removal that is cut short leaves nothing that looks whole."""
    hidden = folder.with_name(f".writing-old-{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(folder.replace(hidden))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _serial(save: Path) -> int:
    return int(save.name.removeprefix("save-"))


def _sync(path: Path) -> None:
    """Flush a file or a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
