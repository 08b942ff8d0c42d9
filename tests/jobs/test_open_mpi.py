"""The launcher with Open MPI, for real: PyPI's of series 5, Debian's of series 4."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from open_mpi import OpenMpi
from starting import Finished, clean_environment, mpiexec
from test_launcher import assert_ended, waiting_job

from cupy_coll.bootstrap import mpi_library

pytestmark = pytest.mark.slow

HELLO = """
import os
import torch
import cupy_coll as cc
from cupy_coll.bootstrap import mpi_library

context = cc.CommContext()
context.init_distributed_env(timeout=60)
tensor = torch.tensor([float(context.get_global_rank())])
cc.all_reduce(tensor, cc.CommMode.GLOBAL)
place = f"{context.get_global_rank()} of {context.get_world_size()}, {context.get_in_node_rank()} in node"
os.write(1, f"{place}: {tensor.item():g}, {mpi_library()[:10]}\\n".encode())
context.destroy()
"""


def test_four_ranks(open_mpi: OpenMpi, job: Callable[..., Finished]) -> None:
    """More than cores, by root, from a program that uses the library."""
    done = job(HELLO, 4, env=open_mpi.variables)
    assert done.status == 0, done.output
    lines = sorted(line for line in done.output.splitlines() if line[:1].isdecimal())
    assert lines == [f"{rank} of 4, {rank} in node: 6, Open MPI v" for rank in range(4)], done.output


@pytest.mark.skipif(os.geteuid() != 0 or len(os.sched_getaffinity(0)) >= 64, reason="needs root, or few cores")
def test_the_flags_are_needed(open_mpi: OpenMpi) -> None:
    """Alone it refuses root, and more ranks than cores."""
    alone = [str(open_mpi.python.parent / "mpiexec"), "-n", "64", "true"]
    env = {name: value for name, value in clean_environment().items() if "ALLOW_RUN_AS_ROOT" not in name}
    for flags, word in (([], "root"), (["--allow-run-as-root"], "slots")):
        words = [alone[0], *flags, *alone[1:]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, check=False)
        assert done.returncode != 0
        assert word in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [("raise ValueError('on purpose')", 1, "ValueError: on purpose"), ("sys.exit(3)", 3, ""), ("pass", 0, "")],
)
def test_status(what: str, status: int, words: str, open_mpi: OpenMpi, job: Callable[..., Finished]) -> None:
    """What rank 1 does ends the job, though the others wait for it."""
    program = (
        f"import sys\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    {what}\nMPI.COMM_WORLD.Barrier()\n"
    )
    done = job(program, 4, env=open_mpi.variables)
    assert done.status == status, done.output
    assert words in done.output
    assert done.seconds < 30


def test_signal(open_mpi: OpenMpi, tmp_path: Path) -> None:
    """SIGTERM ends the ranks, too; the status says that it did."""
    with waiting_job(tmp_path, env=open_mpi.variables) as (process, pids):
        process.terminate()
        output, _ = process.communicate(timeout=40)
        assert process.returncode == 143, output
        assert_ended(pids)


@pytest.mark.skipif("Open MPI" in mpi_library(), reason="its launcher is the right one here")
def test_the_wrong_launcher(open_mpi: OpenMpi, job: Callable[..., Finished]) -> None:
    """Either way it is refused, with what to do, and the program does not run."""
    own = sorted(Path(sys.prefix, "lib").glob("libmpi.so.[0-9]*"))
    if not own or not mpiexec().startswith(sys.prefix):
        pytest.skip("the tests' own MPI is not in their environment")
    program = "from mpi4py import MPI\nprint('it runs')\n"
    foreign_library = job(program, 2, env={"MPI4PY_LIBMPI": str(open_mpi.library)})
    assert foreign_library.status == 1, foreign_library.output
    assert "asked for 2 ranks but MPI counts 1: mpiexec and mpi4py's MPI are not of one kind" in foreign_library.output
    foreign_launcher = job(program, 2, env={**open_mpi.variables, "MPI4PY_LIBMPI": str(own[0])})
    assert foreign_launcher.status == 1, foreign_launcher.output
    assert "is Open MPI's, but mpi4py has loaded MPICH" in foreign_launcher.output
    assert "it runs" not in foreign_library.output + foreign_launcher.output
