"""MPI start-up: the one place that imports mpi4py, and what a process learns of its node from MPI and its launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from cupy_coll.errors import ArgumentError, TransportError

__all__ = [
    "launcher_local_rank",
    "loaded_file",
    "local_rank_warning",
    "logical_device",
    "mpi",
    "mpi_is_running",
    "mpi_library",
    "node_of_each_rank",
]

logger = logging.getLogger("cupy_coll")

# What launchers say of the rank within a node. An MPI library's own variables come before a scheduler's: under
# mpiexec inside a Slurm allocation every rank sees SLURM_LOCALID=0.
LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)


def mpi() -> ModuleType:
    """Return ``mpi4py.MPI``; its first import starts MPI.

    Raises:
        TransportError: no MPI library, MPI already finalised, or no MPI_THREAD_MULTIPLE.
    """
    MPI = _imported()
    if MPI.Is_finalized():
        raise TransportError("MPI has been finalised in this process; it cannot be started twice")
    if not MPI.Is_initialized():  # the program has set mpi4py.rc.initialize = False
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TransportError(
            "MPI runs without MPI_THREAD_MULTIPLE, which autograd's threads need: leave mpi4py.rc.thread_level at "
            "'multiple', or use an MPI library that was built with it"
        )
    return MPI


def mpi_is_running() -> bool:
    """Whether this process has started MPI."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()


def mpi_library() -> str:
    """What the MPI library says that it is; MPI is not started for it.

    Raises:
        TransportError: no MPI library.
    """
    if "mpi4py.MPI" not in sys.modules:
        with contextlib.suppress(ImportError):
            import mpi4py

            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    return _imported().Get_library_version()


def loaded_file(name: str) -> str:
    """The file from which this process has loaded the library whose file name begins so; empty where it is not seen."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    return next((line.split(None, 5)[5] for line in maps.splitlines() if f"/{name}" in line), "")


def _imported() -> ModuleType:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"mpi4py cannot be used: {error}. Install an MPI library (`pip install mpich`) or load your cluster's, "
            "and mpi4py for it"
        ) from error
    return MPI


def node_of_each_rank(comm: Any) -> list[int]:
    """For each rank of ``comm`` the lowest rank that shares memory with it: equal numbers, same node.

    Collective over ``comm``.
    """
    MPI = mpi()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    first = node.bcast(comm.rank, root=0)
    node.Free()
    return list(comm.allgather(first))


def launcher_local_rank(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """The rank within the node as the launcher tells it, with the variable's name; None where none is set."""
    for variable in LOCAL_RANK_VARIABLES:
        value = environ.get(variable, "")
        if value.isdecimal():
            return int(value), variable
    return None


def local_rank_warning(local_rank: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """What to say where the launcher's variable differs from the rank that MPI's shared-memory split gave."""
    told = launcher_local_rank(environ)
    if told is None or told[0] == local_rank:
        return None
    return (
        f"{told[1]}={told[0]}, but by shared memory this is rank {local_rank} of its node; cupy_coll uses {local_rank}"
    )


def logical_device(local_rank: int, device_count: int) -> int:
    """The CUDA device for the rank ``local_rank`` of a node on which the process sees ``device_count`` devices.

    A scheduler that shows each rank its own GPU only (``CUDA_VISIBLE_DEVICES=3``) leaves one device, number 0.

    Raises:
        ArgumentError: several devices are visible, but fewer than there are ranks.
    """
    if device_count == 1:
        return 0
    if local_rank >= device_count:
        raise ArgumentError(
            f"logical_device: local rank {local_rank} has no GPU of its own, {device_count} visible; "
            "start at most one rank a GPU"
        )
    return local_rank
