"""Building and loading the stand-in for NCCL: once, by whoever comes first, and never silently not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys

import nccl_standin
import pytest

SYMBOLS = (
    *("ncclAllGather", "ncclAllReduce", "ncclBcast", "ncclBroadcast", "ncclCommAbort", "ncclCommCount"),
    *("ncclCommCuDevice", "ncclCommDestroy", "ncclCommGetAsyncError", "ncclCommInitAll", "ncclCommInitRankConfig"),
    *("ncclCommSplit", "ncclCommUserRank", "ncclGetErrorString", "ncclGetUniqueId", "ncclGetVersion", "ncclGroupEnd"),
    *("ncclGroupStart", "ncclRecv", "ncclReduce", "ncclReduceScatter", "ncclSend"),
)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a library that is loaded stays."""
    head = f"import sys; sys.path.insert(0, {str(nccl_standin.HERE.parent)!r})\n"
    command = [sys.executable, "-c", head + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the sources, which a test may change."""
    place = tmp_path / "sources"
    place.mkdir()
    for name in nccl_standin.SOURCES:
        shutil.copy(nccl_standin.HERE / name, place)
    monkeypatch.setattr(nccl_standin, "HERE", place)
    return place


def test_exports_what_the_binding_needs():
    code = """
import ctypes
mine = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
for name in sys.argv[2:]:
    getattr(mine, name)
version = ctypes.c_int()
assert ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)) == 0  # found by its soname
print(version.value)
"""
    done = python(code, str(nccl_standin.build()), *SYMBOLS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == nccl_standin.VERSION
    assert len(set(SYMBOLS)) == 22


def test_cupy_takes_it():
    done = python("""
import nccl_standin
standin = nccl_standin.load()
assert nccl_standin.load() is standin
from cupy.cuda import nccl
assert nccl.available and nccl.get_version() == 29999
assert len(nccl.get_unique_id()) == 128
assert [call.name for call in standin.calls()] == ["GetUniqueId"]
""")
    assert done.returncode == 0, done.stderr


def test_too_late():
    done = python("""
import types, nccl_standin
sys.modules["cupy.cuda.nccl"] = types.ModuleType("cupy.cuda.nccl")
nccl_standin.load()
""")
    assert "RuntimeError: nccl_standin.load() comes too late" in done.stderr


def test_built_once_for_all(tmp_path, sources):
    """Four processes at once: none finds half a library, and the compiler runs once."""
    counting = tmp_path / "bin"
    counting.mkdir()
    compiler = counting / "cc"
    compiler.write_text(f'#!/bin/sh\necho run >>"{tmp_path}/runs"\nexec {shutil.which("cc")} "$@"\n')
    compiler.chmod(0o755)
    code = """
import os, ctypes, nccl_standin
os.environ["PATH"] = sys.argv[1] + ":" + os.environ["PATH"]
ctypes.CDLL(str(nccl_standin.build(sys.argv[2])))
"""
    head = f"import sys; sys.path.insert(0, {str(nccl_standin.__path__[0])!r} + '/..')\n"
    command = [sys.executable, "-c", head + code, str(counting), str(tmp_path / "cache")]
    started = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4
    assert (tmp_path / "runs").read_text() == "run\n"


def test_built_again_when_the_source_changes(tmp_path, sources):
    first = nccl_standin.build(tmp_path)
    assert nccl_standin.build(tmp_path) == first
    with open(sources / "reductions.h", "a") as header:
        header.write("/* changed */\n")
    second = nccl_standin.build(tmp_path)
    assert second != first
    assert first.exists()
    assert second.exists()


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no C compiler: `cc` is not on PATH"):
        nccl_standin.build(tmp_path)


def test_compiler_that_fails(tmp_path, sources):
    (sources / "nccl_standin.c").write_text("this is not C\n")
    with pytest.raises(RuntimeError, match=r"failed with status 1:\n(.|\n)*unknown type name"):
        nccl_standin.build(tmp_path)
    assert not list(tmp_path.rglob("libnccl*"))
