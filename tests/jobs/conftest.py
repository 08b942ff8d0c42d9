"""Fixtures of the tests that start MPI jobs of their own."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from starting import ROOT, RUNNER, Finished, mpiexec, run_command


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Finished]:
    """Runs a script on ranks.

    ``job(source, n=2)`` writes ``source`` (dedented) to a file and runs it; a Path is run as it is.
    ``how``: "launcher" (mpi_launch.sh), "runner" (mpiexec with mpi4py's runner) or "plain" (mpiexec alone).
    """

    def run(
        script: str | Path,
        n: int = 2,
        args: Sequence[str] = (),
        how: str = "launcher",
        limit: float = 40,
        env: Mapping[str, str] | None = None,
    ) -> Finished:
        if isinstance(script, str):
            path = tmp_path / "script.py"
            path.write_text(textwrap.dedent(script))
            script = path
        start = {
            "launcher": [str(ROOT / "mpi_launch.sh"), "-n", str(n)],
            "runner": [mpiexec(), "-n", str(n), sys.executable, "-c", RUNNER],
            "plain": [mpiexec(), "-n", str(n), sys.executable],
        }[how]
        return run_command([*start, str(script), *args], limit, env)

    return run
