"""Scratch: fingerprints, complete saves only, and a writer killed at any instant."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crrl_lib.scratch import MANIFEST, Scratch, fingerprint

WRITER = """
import sys
from pathlib import Path
from crrl_lib.scratch import Scratch

def folder(path):
    path.mkdir()
    for i in range(20):
        (path / f"{i}.bin").write_bytes(step.to_bytes(4, "big") * 5000)

scratch = Scratch("train", {"lr": 1}, root=Path(sys.argv[1]))
found = scratch.load()
step = found[0] if found else 0
print("up", flush=True)
while True:
    step += 1
    scratch.save(step, {"state": step.to_bytes(4, "big") * 20000, "model": folder})
"""


def test_fingerprint_of_code_ignores_what_python_compiled(tmp_path):
    (tmp_path / "m.py").write_text("x = 1")
    before = fingerprint({"code": tmp_path})
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/m.pyc").write_bytes(b"0")
    assert fingerprint({"code": tmp_path}) == before
    (tmp_path / "m.py").write_text("x = 2")
    assert fingerprint({"code": tmp_path}) != before


def test_fingerprint_is_of_content_not_of_order_or_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_text("1")
    before = fingerprint({"lr": 2e-6, "model": tmp_path / "a"})
    assert len(before) == 16
    (tmp_path / "a").rename(tmp_path / "b")
    assert fingerprint({"model": tmp_path / "b", "lr": 0.000002}) == before
    (tmp_path / "b/x").write_text("2")
    assert fingerprint({"lr": 2e-6, "model": tmp_path / "b"}) != before
    # printf '{"lr":1}' | sha256sum
    assert fingerprint({"lr": 1}) == "09703c8724ab89f0"


def test_fingerprint_refuses_what_it_cannot_stand_for(tmp_path):
    with pytest.raises(TypeError, match="is a set; expected JSON types or a Path"):
        fingerprint({"x": {1, 2}})
    with pytest.raises(FileNotFoundError, match="run its stage first"):
        fingerprint({"x": tmp_path / "none"})


def test_save_load_and_clear(tmp_path):
    scratch = Scratch("train", {"lr": 1}, root=tmp_path)
    assert scratch.load() is None
    path = scratch.save(4, {"a": b"123", "b": lambda p: p.write_text("text")})
    assert scratch.folder == tmp_path / "data/.scratch/train" / scratch.fingerprint
    assert Scratch("train", {"lr": 1}, root=tmp_path).load() == (4, path)
    assert (path / "a").read_bytes() == b"123"
    assert (path / "b").read_text() == "text"
    assert Scratch("train", {"lr": 2}, root=tmp_path).load() is None
    scratch.clear()
    scratch.clear()
    assert scratch.load() is None
    assert list((tmp_path / "data/.scratch/train").iterdir()) == []


def test_keeps_the_last_two_and_a_step_may_be_saved_again(tmp_path):
    scratch = Scratch("train", {}, root=tmp_path)
    for step in (1, 2, 3, 3):
        scratch.save(step, {"s": bytes([step])})
    assert sorted(p.name for p in scratch.folder.iterdir()) == ["save-00000002", "save-00000003"]
    assert scratch.load()[0] == 3


@pytest.mark.parametrize("harm", ["no manifest", "short file", "lost file"])
def test_an_incomplete_save_is_passed_over(tmp_path, harm):
    scratch = Scratch("train", {}, root=tmp_path)
    older = scratch.save(1, {"s": b"11"})
    newer = scratch.save(2, {"s": b"22"})
    if harm == "no manifest":
        (newer / MANIFEST).unlink()
    elif harm == "short file":
        (newer / "s").write_bytes(b"2")
    else:
        (newer / "s").unlink()
    assert scratch.load() == (1, older)
    scratch.save(3, {"s": b"33"})
    assert scratch.load()[0] == 3


def test_a_failing_writer_leaves_the_last_save(tmp_path):
    scratch = Scratch("train", {}, root=tmp_path)
    kept = scratch.save(1, {"s": b"1"})

    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        scratch.save(2, {"s": full})
    assert scratch.load() == (1, kept)
    with pytest.raises(FileNotFoundError, match="the writer of 's' made no"):
        scratch.save(2, {"s": lambda path: None})
    scratch.save(2, {"s": b"2"})
    assert not list(scratch.folder.glob(".writing-*"))


@pytest.mark.parametrize("name", ["../up", "a/b", MANIFEST])
def test_names_are_plain(tmp_path, name):
    with pytest.raises(ValueError, match="expected a plain name"):
        Scratch("train", {}, root=tmp_path).save(1, {name: b""})


def test_queued_experiment_uses_the_main_workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "main"))
    assert Scratch("train", {}).folder.is_relative_to(tmp_path / "main/data/.scratch/train")
    monkeypatch.delenv("DVC_ROOT")
    assert Scratch("train", {}).folder.is_relative_to(tmp_path / "data/.scratch/train")


def test_survives_kill_9_at_any_instant(tmp_path):
    """Kill a writer again and again: what loads is whole, and never older than what was there."""
    rng = random.Random(0)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    scratch = Scratch("train", {"lr": 1}, root=tmp_path)
    last = 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], env=environment, stdout=subprocess.PIPE
        )
        assert writer.stdout.readline() == b"up\n"
        time.sleep(rng.uniform(0.0, 0.25))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        if found := scratch.load():
            step, path = found
            assert step >= last
            last = step
            assert (path / "state").read_bytes() == step.to_bytes(4, "big") * 20000
            parts = [p.read_bytes() for p in (path / "model").iterdir()]
            assert parts == [step.to_bytes(4, "big") * 5000] * 20
    assert last > 3
