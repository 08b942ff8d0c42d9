"""What a wheel holds, that an installed copy finds its kernels, and what importing the package starts: nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120


def run(*words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(source: str, env: dict[str, str] | None = None) -> str:
    """What the source prints in a process that sees installed packages only: not this folder, not PYTHONPATH."""
    return run(sys.executable, "-I", "-c", source, cwd=Path("/"), env=env).strip()


# --- Wheel and editable installation ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, with two more files in kernels/."""
    source = tmp_path_factory.mktemp("source")
    for name in ("cupy_coll", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "pyproject.toml", ROOT / "LICENSE", *ROOT.glob("README.md")):
        shutil.copy(path, source)
    (source / "kernels" / "probe.cu").write_text("// a kernel\n")
    (source / "kernels" / "probe.cuh").write_text("// a header\n")
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_source(wheel: Path) -> None:
    """All modules, also of subpackages, the kernels' sources and the mark that the package is typed."""
    expected = {"cupy_coll/py.typed", "cupy_coll/kernels/probe.cu", "cupy_coll/kernels/probe.cuh"}
    for folder, name in ((ROOT / "cupy_coll", "cupy_coll"), (ROOT / "kernels", "cupy_coll/kernels")):
        for path in folder.rglob("*"):
            if path.suffix in {".py", ".cu", ".cuh"}:
                expected.add(f"{name}/{path.relative_to(folder)}")
    assert "cupy_coll/kernels/__init__.py" in expected
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_wheel_holds_the_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_installed_wheel_finds_its_kernels(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path, wheel)
    found = python(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import importlib.resources, cupy_coll, cupy_coll.kernels
print(cupy_coll.__file__)
print(importlib.resources.files("cupy_coll.kernels") / "probe.cu")
"""
    )
    assert found.splitlines() == [
        str(tmp_path / "cupy_coll" / "__init__.py"),
        str(tmp_path / "cupy_coll" / "kernels" / "probe.cu"),
    ]
    assert (tmp_path / "cupy_coll" / "kernels" / "probe.cu").is_file()


def test_installation_in_use_finds_its_kernels() -> None:
    """From sources (an editable installation) they are in the top-level kernels/, else inside the package."""
    found = python(
        """
import importlib.resources, cupy_coll
print(cupy_coll.__file__)
print(importlib.resources.files("cupy_coll.kernels"))
"""
    )
    package, kernels = map(Path, found.splitlines())
    assert kernels == (ROOT / "kernels" if package.is_relative_to(ROOT) else package.parent / "kernels")
    assert (kernels / "__init__.py").is_file()


# --- Importing -------------------------------------------------------------------------------------------------------


def test_import_starts_nothing() -> None:
    """No MPI, no CUDA, no CuPy; in a process that no mpiexec started and that finds none."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "MPI", "HYD"))}
    env["PATH"] = "/nonexistent"
    loaded, cuda = json.loads(
        python(
            """
import json, sys
import cupy_coll
import torch
print(json.dumps([[name for name in ("mpi4py.MPI", "cupy", "cupy_backends") if name in sys.modules],
                  torch.cuda.is_initialized()]))
""",
            env,
        )
    )
    assert loaded == []
    assert not cuda


def test_import_takes_little_longer_than_torch() -> None:
    seconds = json.loads(
        python(
            """
import json, time
start = time.perf_counter()
import torch, torch.distributed
middle = time.perf_counter()
import cupy_coll
print(json.dumps([middle - start, time.perf_counter() - middle]))
"""
        )
    )
    assert seconds[1] < 0.5 * seconds[0], seconds


# --- Dependencies ----------------------------------------------------------------------------------------------------


def test_every_dependency_is_pinned() -> None:
    """constraints.txt fixes the version of whatever pyproject.toml asks for; an unpinned torch costs gigabytes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for group in project["optional-dependencies"].values() for line in group)]
    names = {re.split(r"[<>=!~;\[ ]", line)[0] for line in asked}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert names - set(pinned) == set()
    assert pinned["torch"] == "2.13.0"
    assert list(pinned) == sorted(pinned)
