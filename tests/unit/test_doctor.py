"""What the doctor makes of facts: planted problems as plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from cupy_coll.__main__ import main
from cupy_coll.bootstrap import LOCAL_RANK_VARIABLES
from cupy_coll.diagnosis import (
    LAUNCHERS,
    Facts,
    Finding,
    Gpu,
    Launcher,
    Outcome,
    as_json,
    before_mpi,
    can_try_nccl,
    findings,
    launcher_of,
    library_in_words,
    report,
)

GB = 10**9
HYDRA = "mpiexec of MPICH or Intel MPI"


def rank_of(rank: int, size: int = 4, per_node: int = 4, gpus: int = 0, **more: Any) -> Facts:
    """A rank of a healthy job."""
    node, local_rank = divmod(rank, per_node)
    launcher = Launcher(
        HYDRA, "MPICH", rank, size, local_rank, per_node, {"PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    )
    gpu = Gpu(local_rank, "NVIDIA H100", f"GPU-{node}-{local_rank}", f"0000:{local_rank:02x}:00.0") if gpus else None
    facts = Facts(
        host=f"node{node}",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=per_node,
        executable="/env/bin/python",
        versions={"Python": "3.11.7", "torch": "2.13.0", "CuPy": "14.2.0"},
        launcher=launcher,
        mpi="MPICH 5.0.2",
        mpi_file="/env/lib/libmpi.so.12",
        shm_size=25 * GB,
        shm_free=24 * GB,
        gpus=gpus,
        device_files=gpus,
        gpu=gpu,
        nccl=22803 if gpus else 0,
        nccl_file="/env/libnccl.so.2" if gpus else "",
        tests={name: Outcome(1e-4) for name in (("objects", "host", "nccl") if gpus else ("objects", "host"))},
    )
    return dataclasses.replace(facts, **more)


def the_one(ranks: list[Facts]) -> Finding:
    (finding,) = findings(ranks)
    assert f"problem: {finding.problem}\n  advice: {finding.advice}\n" in report(ranks, [finding])
    return finding


@pytest.mark.parametrize("gpus", [0, 4])
def test_a_healthy_job(gpus: int) -> None:
    ranks = [rank_of(rank, 8, gpus=gpus) for rank in range(8)]
    assert findings(ranks) == []
    assert before_mpi(ranks[0]) == []
    assert can_try_nccl(ranks) == bool(gpus)


def test_no_gpu_and_no_cupy_are_facts() -> None:
    ranks = [
        rank_of(0, 1, 1, versions={"torch": "2.13.0", "CuPy": ""}, nccl_error="CuPy cannot be imported: no module")
    ]
    assert findings(ranks) == []
    assert "CuPy      none\n" in report(ranks, [])
    assert "NCCL      none: CuPy cannot be imported\n" in report(ranks, [])


# --- The launcher ----------------------------------------------------------------------------------------------------


def test_launchers_are_those_that_bootstrap_reads() -> None:
    assert set(LAUNCHERS) == set(LOCAL_RANK_VARIABLES)


def test_launcher_of() -> None:
    """The MPI's own variables come before the scheduler's; a batch script that has started nothing is no launcher's."""
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert launcher_of({}) is None
    assert launcher_of(slurm | hydra) == Launcher(HYDRA, "MPICH", 3, 4, 1, 2, hydra)
    batch = launcher_of(slurm)
    assert batch is not None
    assert (batch.name, batch.rank, batch.size) == ("srun", 0, None)
    step = launcher_of(slurm | {"SLURM_STEP_NUM_TASKS": "8"})
    assert step is not None
    assert step.size == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("MPICH Version:      5.0.2 (5, 0)\nMPICH Release date: ...", "MPICH 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11", "Open MPI 5.0.11"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS\n", "Intel(R) MPI 2021.11"),
        ("MVAPICH2 Version      :\t2.3.7\n", "MVAPICH2 2.3.7"),
        ("something else", "something else"),
        ("", ""),
    ],
)
def test_library_in_words(text: str, words: str) -> None:
    assert library_in_words(text) == words


def test_a_foreign_launcher() -> None:
    """Seen before MPI starts, which might end the process."""
    launcher = Launcher("mpiexec of Open MPI", "Open MPI", 0, 4, 0, 4)
    (finding,) = before_mpi(rank_of(0, launcher=launcher))
    assert finding.problem == (
        "this process was started by mpiexec of Open MPI, but the MPI library of mpi4py is MPICH 5.0.2 "
        "(/env/lib/libmpi.so.12)"
    )
    assert finding.advice.startswith("start with the mpiexec of MPICH ")
    assert "MPI4PY_LIBMPI" in finding.advice
    (finding,) = before_mpi(rank_of(0, mpi="Open MPI 5.0.11"))
    assert finding.advice.startswith("start with the mpiexec of Open MPI ")
    for library in ("Intel(R) MPI 2021.11", "MVAPICH2 2.3.7", "an unknown one"):
        assert before_mpi(rank_of(0, mpi=library)) == []


@pytest.mark.parametrize(
    ("library", "advice"),
    [
        ("MPICH 4.2", "srun --mpi=pmi2 ("),
        ("Open MPI 5.0", "srun --mpi=pmix ("),
        ("X", "srun --mpi=pmi2 or --mpi=pmix ("),
    ],
)
def test_worlds_of_one(library: str, advice: str) -> None:
    launcher = Launcher("srun", "", 0, 4, 0, None, {"SLURM_STEP_NUM_TASKS": "4"})
    alone = rank_of(0, 1, 1, launcher=launcher, mpi=library)
    assert before_mpi(alone) == []
    finding = the_one([alone])
    assert finding.problem.startswith("srun started 4 ranks (SLURM_STEP_NUM_TASKS=4), but MPI counts 1: each process ")
    assert library in finding.problem
    assert finding.advice.startswith(advice)


def test_a_part_of_the_ranks() -> None:
    launcher = Launcher(HYDRA, "MPICH", 0, 8, 0, 4, {"PMI_SIZE": "8"})
    finding = the_one([rank_of(rank, launcher=launcher) for rank in range(4)])
    assert finding.problem.startswith(f"{HYDRA} tells of 8 ranks (PMI_SIZE=8), but MPI counts 4")


def test_mpi_that_cannot_be_used() -> None:
    ranks = [rank_of(0, 1, 1, mpi="", mpi_error="mpi4py cannot be used: no library", tests={})]
    assert the_one(ranks).problem == "rank 0: mpi4py cannot be used: no library"
    assert before_mpi(ranks[0]) == findings(ranks)
    assert "MPI4PY_LIBMPI" in the_one(ranks).advice


# --- /dev/shm --------------------------------------------------------------------------------------------------------


def test_shm() -> None:
    """MPICH took 22 MB on 4 ranks, 345 MB on 64. Late ranks see less of it free, and count what the first one saw."""
    small = {"shm_size": 21 * 10**6, "shm_free": 21 * 10**6}
    finding = the_one([rank_of(rank, **small) for rank in range(4)])
    assert finding.problem.startswith(
        "/dev/shm of node0 has 21 MB, 21 MB of it free; MPICH 5.0.2 needs about 22 MB for 4 "
    )
    assert "--shm-size=1g" in finding.advice
    assert before_mpi(rank_of(0, **small)) == [finding]
    assert findings([rank_of(rank, 2, 2, **small) for rank in range(2)]) == []
    assert findings([rank_of(rank, mpi="Open MPI 5", launcher=None, **small) for rank in range(4)]) == []
    assert findings([rank_of(rank, launcher=None, shm_size=-1, shm_free=-1) for rank in range(4)]) == []


def test_shm_that_is_nearly_full() -> None:
    late = [rank_of(rank, shm_size=30 * 10**6, shm_free=(24 - 3 * rank) * 10**6) for rank in range(4)]
    assert findings(late) == []
    assert all(before_mpi(rank) == [] for rank in late), "the ranks of a node decide alike"
    full = [rank_of(rank, shm_size=GB, shm_free=(15 - rank) * 10**6) for rank in range(4)]
    assert the_one(full).problem.startswith("/dev/shm of node0 has 1,000 MB, 15 MB of it free; ")
    assert "/dev/shm/mpich_shm_*" in the_one(full).advice
    assert before_mpi(rank_of(0, shm_size=GB, shm_free=10 * 10**6))
    started = [dataclasses.replace(rank, mpi_was_started=True) for rank in full]
    assert findings(started) == [], "what is taken may be this job's own"


def test_shm_of_one_host_of_two() -> None:
    ranks = [
        rank_of(rank, 8, shm_size=10**6 if rank >= 4 else GB, shm_free=10**6 if rank >= 4 else GB) for rank in range(8)
    ]
    assert the_one(ranks).problem.startswith("/dev/shm of node1 ")
    text = report(ranks, [])
    assert "/dev/shm  1,000 MB, 1,000 MB free (node0)\n/dev/shm  1 MB, 1 MB free (node1)\n" in text


# --- GPUs and NCCL ---------------------------------------------------------------------------------------------------


def test_two_ranks_on_one_gpu() -> None:
    same = Gpu(0, "NVIDIA H100", "GPU-x", "0000:01:00.0")
    ranks = [rank_of(rank, 3, 3, gpus=1, visible="2") for rank in range(3)]
    ranks[0].gpu = ranks[2].gpu = same
    finding = the_one(ranks)
    assert finding.problem == "ranks 0, 2 are on the same GPU (GPU-x of node0), and NCCL 2.28.3 wants one GPU a rank"
    assert finding.advice.startswith("start at most one rank a GPU, and give each rank a GPU of its own")
    assert "(CUDA_VISIBLE_DEVICES here: '2')" in finding.advice
    assert "NCCL 2.30.0 or later with NCCL_MULTI_RANK_GPU_ENABLE=1" in finding.advice
    assert not can_try_nccl(ranks)
    shared = [dataclasses.replace(rank, nccl=23000, shares_gpu=True) for rank in ranks]
    assert findings(shared) == []
    assert can_try_nccl(shared)


def test_versions_of_nccl() -> None:
    ranks = [rank_of(rank, 2, 1, gpus=1, nccl=22803 + rank) for rank in range(2)]
    finding = the_one(ranks)
    assert (
        "different versions of NCCL, which do not work together: 2.28.3 on rank 0; 2.28.4 on rank 1" in finding.problem
    )
    assert finding.advice == "Start the same Python environment on all hosts"


def test_more_ranks_than_gpus() -> None:
    ranks = [rank_of(rank, gpus=2) for rank in range(4)]
    for rank in ranks[2:]:
        rank.gpu, rank.gpu_error = None, "no GPU of its own"
    finding = the_one(ranks)
    assert finding.problem == "ranks 2, 3: no GPU of its own"
    assert finding.advice.startswith("start as many ranks a node as it has GPUs")
    assert not can_try_nccl(ranks)


def test_gpus_that_torch_does_not_see() -> None:
    finding = the_one([rank_of(rank, device_files=4) for rank in range(4)])
    assert finding.problem == "ranks 0, 1, 2, 3: node0 has 4 NVIDIA GPUs in /dev, but torch 2.13.0 sees none"
    assert "built for the driver's CUDA" in finding.advice
    for hidden in ("", "-1", "-1,0"):
        assert findings([rank_of(0, 1, 1, device_files=4, visible=hidden)]) == []


def test_gpus_on_some_hosts() -> None:
    ranks = [rank_of(0, 2, 1, gpus=1), rank_of(1, 2, 1)]
    assert the_one(ranks).problem == "rank 1 sees no GPU, the others do"
    assert not can_try_nccl(ranks)


def test_gpus_without_nccl() -> None:
    ranks = [rank_of(rank, gpus=4, nccl=0, nccl_error="CuPy finds no NCCL library: install one") for rank in range(4)]
    finding = the_one(ranks)
    assert finding.problem == "ranks 0, 1, 2, 3: there is a GPU, but NCCL cannot be used"
    assert finding.advice == "CuPy finds no NCCL library: install one"


# --- The rest --------------------------------------------------------------------------------------------------------


def test_versions() -> None:
    ranks = [rank_of(rank) for rank in range(3)]
    ranks[1].versions = ranks[1].versions | {"torch": "2.12.0"}
    finding = the_one(ranks)
    assert finding.problem == "the ranks have different versions of torch: 2.13.0 on ranks 0, 2; 2.12.0 on rank 1"
    assert "the same Python" in finding.advice
    ranks = [rank_of(0), rank_of(1, mpi="MPICH 4.0")]
    assert "different versions of MPI: MPICH 5.0.2 on rank 0; MPICH 4.0 on rank 1" in the_one(ranks).problem


@pytest.mark.parametrize(
    ("name", "title", "advice"),
    [
        ("objects", "Python objects over MPI", "a firewall"),
        ("host", "CPU tensors over MPI", "docs/failures.md"),
        ("nccl", "GPU tensors over NCCL", "NCCL_DEBUG=INFO"),
    ],
)
def test_a_transport_that_fails(name: str, title: str, advice: str) -> None:
    ranks = [rank_of(rank, 12, 12, gpus=12) for rank in range(12)]
    for rank in ranks[2:]:
        rank.tests = rank.tests | {name: Outcome(error="lost")}
    finding = the_one(ranks)
    assert finding.problem == f"ranks 2 to 11: {title} do not work: lost"
    assert advice in finding.advice
    assert report(ranks, []).count("FAILED") == 10


def test_the_table() -> None:
    ranks = [rank_of(rank, 2, 2, gpus=2, executable=f"/env{rank}/python") for rank in range(2)]
    assert ranks[1].launcher is not None
    ranks[1].launcher = dataclasses.replace(ranks[1].launcher, local_rank=0)
    assert (
        report(ranks, findings(ranks))
        == """\
cupy_coll doctor: 2 ranks, 1 host

rank  host   in node               GPU             bus           UUID     objects  CPU tensors  NCCL
0     node0  0 of 2                0: NVIDIA H100  0000:00:00.0  GPU-0-0  100 us   100 us       100 us
1     node0  1 of 2 (launcher: 0)  1: NVIDIA H100  0000:01:00.0  GPU-0-1  100 us   100 us       100 us

launcher  mpiexec of MPICH or Intel MPI (PMI_RANK, PMI_SIZE)
MPI       MPICH 5.0.2, /env/lib/libmpi.so.12
Python    3.11.7, /env0/python (rank 0)
Python    3.11.7, /env1/python (rank 1)
torch     2.13.0
CuPy      14.2.0
NCCL      2.28.3, /env/libnccl.so.2
GPUs      2 visible, CUDA_VISIBLE_DEVICES not set
/dev/shm  25.0 GB, 24.0 GB free

no problem found
"""
    )


def test_json() -> None:
    ranks = [rank_of(0, 1, 1, gpus=1)]
    read = json.loads(json.dumps(as_json(ranks, [Finding("a", "b")])))
    assert read["problems"] == [{"problem": "a", "advice": "b"}]
    assert read["ranks"][0]["gpu"]["uuid"] == "GPU-0-0"
    assert read["ranks"][0]["tests"]["nccl"] == {"seconds": 1e-4, "error": ""}


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_timeout_must_be_seconds(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--timeout", value])
    assert ended.value.code == 2
    assert "--timeout" in capsys.readouterr().err
