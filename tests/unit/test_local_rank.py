"""Which variable tells the rank within the node, and which device it gets."""

from __future__ import annotations

import pytest

from cupy_coll.bootstrap import launcher_local_rank, local_rank_warning, logical_device, visible_devices
from cupy_coll.errors import ArgumentError


def test_a17_the_mpis_own_variable_comes_first() -> None:
    """Under mpiexec inside a Slurm allocation every rank has SLURM_LOCALID=0."""
    left_over = {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert launcher_local_rank(left_over) == (1, "OMPI_COMM_WORLD_LOCAL_RANK")
    assert launcher_local_rank({"SLURM_LOCALID": "0", "MPI_LOCALRANKID": "3"}) == (3, "MPI_LOCALRANKID")
    assert launcher_local_rank({"SLURM_LOCALID": "2"}) == (2, "SLURM_LOCALID")
    assert launcher_local_rank({}) is None
    assert launcher_local_rank({"SLURM_LOCALID": "", "MPI_LOCALRANKID": "x"}) is None


def device(local_rank: int, local_size: int, count: int, visible: str | None = None, **variables: str) -> int:
    """The choice, which leaves the environment as it is."""
    environ = variables if visible is None else {"CUDA_VISIBLE_DEVICES": visible, **variables}
    before = dict(environ)
    try:
        return logical_device(local_rank, local_size, count, environ)
    finally:
        assert environ == before


def test_a17_device() -> None:
    """Local rank 3 with CUDA_VISIBLE_DEVICES=3 sees one device, number 0; with four it takes its own."""
    assert device(3, 4, 1, "3") == 0
    assert [device(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [device(rank, 2, 4, "4,5,6,7") for rank in range(2)] == [0, 1]


@pytest.mark.parametrize(
    "visible", ["0", "7", "GPU-5a1b", "MIG-11c2", "MIG-GPU-5a1b/1/0", "2,-1", " 2 "], ids=lambda text: repr(text)
)
def test_one_device_for_each_rank(visible: str) -> None:
    """Slurm's --gpus-per-task=1, jsrun -g1, a wrapper script: index 0 in every process."""
    assert [device(rank, 4, 1, visible) for rank in range(4)] == [0] * 4


def test_several_devices_for_each_rank() -> None:
    """Four ranks with two GPUs each, which differ: any of its own will do."""
    step = {"SLURM_STEP_GPUS": "4,5", "SLURM_GPUS_ON_NODE": "8"}
    for variables in ({"SLURM_GPUS_PER_TASK": "2"}, {"SLURM_GPUS_PER_TASK": "a100:2"}, step):
        assert [device(rank, 4, 2, "0,1", SLURM_LOCALID=str(rank), **variables) for rank in range(4)] == [0, 1, 0, 1]
    assert [device(rank, 4, 2, "4,5", JSM_NAMESPACE_LOCAL_RANK=str(rank)) for rank in range(4)] == [0, 1, 0, 1]


def test_variables_that_are_not_this_ranks() -> None:
    """mpiexec inside an allocation: SLURM_LOCALID=0 everywhere, and the node's ranks see the same two."""
    for variables in (
        {"SLURM_GPUS_PER_TASK": "2", "SLURM_LOCALID": "0"},
        {"SLURM_STEP_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "8", "SLURM_LOCALID": "0"},
        {"SLURM_STEP_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2", "SLURM_LOCALID": "3"},
    ):
        with pytest.raises(ArgumentError, match="4 ranks on this node, but only 2 GPUs that all of them see"):
            device(3, 4, 2, "0,1", **variables)


@pytest.mark.parametrize(("count", "visible"), [(1, None), (1, "0,1"), (2, None), (2, "0,1"), (3, "GPU-a,GPU-b,GPU-c")])
def test_more_ranks_than_gpus(count: int, visible: str | None) -> None:
    """Every rank of the node raises, with both numbers and what to do; where NCCL may share they take turns."""
    for rank in range(4):
        with pytest.raises(ArgumentError) as error:
            device(rank, 4, count, visible)
        text = str(error.value)
        assert f"4 ranks on this node, but only {count} GPU{'s' * (count > 1)} that all of them see" in text
        assert f"--ppn {count}" in text
        assert "4 GPUs a node" in text
        assert ("is not set" if visible is None else repr(visible)) in text
        with pytest.raises(ArgumentError):
            device(rank, 4, count, visible, NCCL_MULTI_RANK_GPU_ENABLE="0")
        assert device(rank, 4, count, visible, NCCL_MULTI_RANK_GPU_ENABLE="1") == rank % count


def test_mig_instances() -> None:
    """A process gets the first of its list only: two ranks with the same list would be on one instance."""
    assert device(0, 1, 1, "MIG-a,MIG-b") == 0
    with pytest.raises(ArgumentError, match=r"2 ranks on this node are shown 2 MIG instances.*first one only"):
        device(1, 2, 1, "MIG-a,MIG-b")


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", None])
def test_no_device(visible: str | None) -> None:
    with pytest.raises(ArgumentError, match="this process sees no GPU") as error:
        device(0, 1, 0, visible)
    assert ("nvidia-smi -L" if visible is None else f"is {visible!r}. Whoever sets it") in str(error.value)


def test_what_cuda_reads() -> None:
    lists = {"0,2": ["0", "2"], "0,-1,2": ["0"], "-1": [], "": [], "GPU-a, MIG-b": ["GPU-a", "MIG-b"], "1,,2": ["1"]}
    assert {text: visible_devices({"CUDA_VISIBLE_DEVICES": text}) for text in lists} == lists
    assert visible_devices({}) is None


def test_warning() -> None:
    assert local_rank_warning(1, {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "0"}) is None
    assert local_rank_warning(1, {}) is None
    warning = local_rank_warning(1, {"SLURM_LOCALID": "0"})
    assert warning is not None
    assert "SLURM_LOCALID=0" in warning
