"""Starts MPI jobs for the tests: each has a time limit, and what outlives it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The runner ends the job when a rank fails; importing MPI first, also when its script fails before it does.
RUNNER = "from mpi4py import MPI, run; run.main()"

# Variables by which a launcher tells a process its rank: a job started here must not inherit them.
LAUNCHER_VARIABLES = (
    "PMI_",
    "PMIX_",
    "OMPI_",
    "PRTE_",
    "PALS_",
    "MPI_LOCAL",
    "HYDI_",
    "HYDRA_",
    "MPIR_CVAR_",
)


@dataclass
class Finished:
    """A job that has ended."""

    status: int
    output: str  # stdout and stderr, in the order written
    seconds: float


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    environment.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    environment["CUPY_COLL_PYTHON"] = sys.executable  # the launcher runs the very Python that runs the tests
    environment.update(extra or {})
    return environment


def mpiexec() -> str:
    """This environment's own mpiexec, else the one on PATH, as the launcher chooses it."""
    found = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
    assert found, "no mpiexec, neither beside this Python nor on PATH"
    return found


def run_command(
    command: Sequence[str], limit: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Finished:
    """Run to the end; after ``limit`` seconds kill the job and fail with what it wrote."""
    start = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=clean_environment(env),
        cwd=cwd or ROOT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # mpiexec takes its ranks along, which are no children of ours
            try:
                output, _ = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            pytest.fail(f"still running after {limit:g} s: {' '.join(command)}\n{output}")
    return Finished(process.returncode, output, time.monotonic() - start)
