"""MPI start-up: the one place that imports mpi4py, and what a process learns of its node from MPI and its launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from cupy_coll.errors import ArgumentError, TransportError

__all__ = [
    "SHARED_GPU_VARIABLE",
    "launcher_local_rank",
    "loaded_file",
    "local_rank_warning",
    "logical_device",
    "mpi",
    "mpi_is_running",
    "mpi_library",
    "node_of_each_rank",
    "visible_devices",
]

logger = logging.getLogger("cupy_coll")

# NCCL's, from 2.30.0 on: ranks may share a GPU.
SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
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


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """What CUDA reads of CUDA_VISIBLE_DEVICES, up to a negative number or an empty name; None where it is not set."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    return list(takewhile(lambda name: name and not name.startswith("-"), names))


def logical_device(local_rank: int, local_size: int, device_count: int, environ: Mapping[str, str] = os.environ) -> int:
    """The CUDA device for a rank, counted as CUDA counts in this process; what the scheduler has set stays as it is.

    One process cannot see the others' GPUs. Where a variable tells that each rank is shown its own GPUs, it takes one
    of those; that two ranks are on one GPU all the same comes out when NCCL connects, by the UUIDs.

    Args:
        local_rank: the rank within the node.
        local_size: the number of ranks on the node.
        device_count: how many devices this process sees.
        environ: this process's environment.

    Raises:
        ArgumentError: no device, or fewer than ranks on the node where all see the same ones.
    """
    listed = visible_devices(environ)
    shown = "is not set" if listed is None else f"is {environ['CUDA_VISIBLE_DEVICES']!r}"
    if device_count < 1:
        raise ArgumentError(
            f"logical_device: this process sees no GPU; CUDA_VISIBLE_DEVICES {shown}. "
            + (
                "Whoever sets it, the scheduler or a shell, has to name a GPU"
                if listed == []
                else "Ask the scheduler for GPUs; `nvidia-smi -L` lists them"
            )
        )
    if device_count >= local_size:
        return local_rank
    if listed is not None and device_count == 1 < len(listed) and listed[0].startswith("MIG-"):
        raise ArgumentError(
            f"logical_device: {local_size} ranks on this node are shown {len(listed)} MIG instances, but CUDA gives a "
            f"process the first one only; CUDA_VISIBLE_DEVICES {shown}. Show each rank an instance of its own, such as "
            "by srun --gpus-per-task=1"
        )
    if device_count == 1 and listed is not None and len(listed) == 1:
        return 0
    if _shown_its_own(local_rank, environ) or environ.get(SHARED_GPU_VARIABLE) == "1":
        return local_rank % device_count
    raise ArgumentError(
        f"logical_device: {local_size} ranks on this node, but only {device_count} GPU{'s' * (device_count != 1)} that "
        f"all of them see; CUDA_VISIBLE_DEVICES {shown}. Start at most {device_count} a node (./mpi_launch.sh --ppn "
        f"{device_count}), ask the scheduler for {local_size} GPUs a node, or let ranks share one: "
        f"{SHARED_GPU_VARIABLE}=1, with NCCL 2.30.0 or later"
    )


def _shown_its_own(local_rank: int, environ: Mapping[str, str]) -> bool:
    """Whether the launcher says that this rank's GPUs are not those of the whole node."""
    if "JSM_NAMESPACE_LOCAL_RANK" in environ:  # jsrun: those of the resource set
        return True
    # Under mpiexec in the allocation ranks have the variables of its daemon, and a node's ranks see the same GPUs.
    if environ.get("SLURM_LOCALID") != str(local_rank):
        return False
    # In a task of srun (Slurm 22.05) the first are the task's, the second the number of all tasks' on the node.
    own, on_node = environ.get("SLURM_STEP_GPUS", ""), environ.get("SLURM_GPUS_ON_NODE", "")
    fewer = bool(own) and on_node.isdecimal() and len(own.split(",")) < int(on_node)
    return fewer or bool(environ.get("SLURM_GPUS_PER_TASK"))
