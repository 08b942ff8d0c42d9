"""Which variable tells the rank within the node, and which device it gets."""

from __future__ import annotations

import pytest

from cupy_coll.bootstrap import launcher_local_rank, local_rank_warning, logical_device
from cupy_coll.errors import ArgumentError


def test_a17_the_mpis_own_variable_comes_first() -> None:
    """Under mpiexec inside a Slurm allocation every rank has SLURM_LOCALID=0."""
    left_over = {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert launcher_local_rank(left_over) == (1, "OMPI_COMM_WORLD_LOCAL_RANK")
    assert launcher_local_rank({"SLURM_LOCALID": "0", "MPI_LOCALRANKID": "3"}) == (3, "MPI_LOCALRANKID")
    assert launcher_local_rank({"SLURM_LOCALID": "2"}) == (2, "SLURM_LOCALID")
    assert launcher_local_rank({}) is None
    assert launcher_local_rank({"SLURM_LOCALID": "", "MPI_LOCALRANKID": "x"}) is None


def test_a17_device() -> None:
    """Local rank 3 with CUDA_VISIBLE_DEVICES=3 sees one device, number 0; with four it takes its own."""
    assert logical_device(3, device_count=1) == 0
    assert [logical_device(rank, device_count=4) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ArgumentError, match=r"local rank 2.*2"):
        logical_device(2, device_count=2)


def test_warning() -> None:
    assert local_rank_warning(1, {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "0"}) is None
    assert local_rank_warning(1, {}) is None
    warning = local_rank_warning(1, {"SLURM_LOCALID": "0"})
    assert warning is not None
    assert "SLURM_LOCALID=0" in warning
