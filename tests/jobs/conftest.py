"""Fixtures of the tests that start MPI jobs of their own."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import open_mpi as open_mpi_environments
import pytest
from open_mpi import OpenMpi
from starting import ROOT, RUNNER, Finished, mpiexec, run_command


@pytest.fixture(scope="session", params=open_mpi_environments.KINDS)
def open_mpi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenMpi:
    """An environment with Open MPI."""
    try:
        return open_mpi_environments.make(request.param, tmp_path_factory.mktemp("open_mpi") / "environment")
    except open_mpi_environments.NoOpenMpiError as error:
        pytest.skip(str(error))


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
