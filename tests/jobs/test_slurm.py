"""The shipped batch scripts under a real Slurm of made-up nodes: from sbatch to results, and to the status.

The scripts run as they are; in the folder that they are submitted from the program that they name is a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from hosts import HostsError
from open_mpi import OpenMpi
from slurm_cluster import SlurmCluster
from starting import ROOT, Finished

pytestmark = pytest.mark.slow
LIMIT = 120.0

HELLO = """
import os, socket, sys
import torch
import cupy_coll as cc
from cupy_coll.bootstrap import logical_device, visible_devices

context = cc.CommContext()
context.init_distributed_env(timeout=60)
rank, here = context.get_global_rank(), context.get_in_node_rank()
intra, inter = context.get_intra_node_process_group(), context.get_inter_node_process_group()
tensor = torch.tensor([float(rank)])
cc.all_reduce(tensor, cc.CommMode.GLOBAL)
gpus = visible_devices(os.environ)
chosen = gpus[logical_device(here, context.get_local_world_size(), len(gpus))]
line = [rank, socket.gethostname(), here, *intra.ranks, "|", *inter.ranks, "| gpu", chosen]
line += ["threads", os.environ["OMP_NUM_THREADS"], "sum", int(tensor)]
os.write(1, (" ".join(map(str, line)) + "\\n").encode())  # in one write
context.destroy()
"""

FAILING = """
import cupy_coll as cc
context = cc.CommContext()
context.init_distributed_env(timeout=600)
if context.get_global_rank() == 1:
    raise ValueError("on purpose")
cc.barrier()
"""


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    try:
        made = SlurmCluster(tmp_path_factory.mktemp("slurm"), request.param)
    except HostsError as error:
        pytest.skip(str(error))
    yield made
    made.close()
    assert made.hosts.processes() == []


@pytest.fixture
def submit(cluster: SlurmCluster, tmp_path: Path) -> Callable[..., Finished]:
    """Submits a shipped script, whose program is ``source``; None: the one that it names."""

    def run(script: str, source: str | None, *options: str, env: dict[str, str] | None = None) -> Finished:
        (tmp_path / "mpi_launch.sh").symlink_to(ROOT / "mpi_launch.sh")
        (tmp_path / "examples").mkdir()
        program = tmp_path / "examples" / "03_ddp_fsdp.py"
        program.write_text((ROOT / "examples" / program.name).read_text() if source is None else source)
        nodes = [f"--nodes={len(cluster.hosts.names)}"]
        variables = {"OMP_NUM_THREADS": "", **(env or {})}
        return cluster.sbatch(ROOT / "examples" / "batch" / script, [*nodes, *options], tmp_path, variables, LIMIT)

    return run


@pytest.mark.parametrize("script", ["slurm_srun.sh", "slurm_mpiexec.sh"])
def test_batch_script(script: str, cluster: SlurmCluster, submit: Callable[..., Finished]) -> None:
    """4 ranks on each node, in its groups, with the GPUs and the threads that the script asks for."""
    check(submit(script, HELLO), len(cluster.hosts.names))


def test_open_mpi(cluster: SlurmCluster, open_mpi: OpenMpi, submit: Callable[..., Finished]) -> None:
    """By its own mpiexec inside the allocation."""
    check(submit("slurm_mpiexec.sh", HELLO, env=open_mpi.variables), len(cluster.hosts.names))


def check(done: Finished, nodes: int) -> None:
    assert done.status == 0, done.output
    expected = []
    for rank in range(4 * nodes):
        node, here = divmod(rank, 4)
        intra = " ".join(str(4 * node + other) for other in range(4))
        inter = " ".join(str(4 * other + here) for other in range(nodes))
        total = sum(range(4 * nodes))
        expected.append(f"{rank} node{node + 1} {here} {intra} | {inter} | gpu {here} threads 8 sum {total}")
    assert sorted(line for line in done.output.splitlines() if line[:1].isdecimal()) == expected, done.output


def test_a_gpu_for_each_task(cluster: SlurmCluster, submit: Callable[..., Finished]) -> None:
    """Each rank sees its own alone, as number 0."""
    done = submit("slurm_srun.sh", HELLO, "--gpus-per-task=1")
    assert done.status == 0, done.output
    chosen = sorted(line.split()[1] + line.split("gpu")[1][:2] for line in done.output.splitlines() if "gpu" in line)
    assert chosen == [f"{name} {gpu}" for name in cluster.hosts.names for gpu in range(4)], done.output


@pytest.mark.parametrize("script", ["slurm_srun.sh", "slurm_mpiexec.sh"])
def test_a_rank_that_fails(script: str, submit: Callable[..., Finished]) -> None:
    """The others wait for it: the job ends in seconds, and sbatch says that it failed."""
    done = submit(script, FAILING)
    assert done.status != 0, done.output
    assert "ValueError: on purpose" in done.output
    assert done.seconds < 60, done.output


def test_the_scripts_own_program(submit: Callable[..., Finished]) -> None:
    done = submit("slurm_srun.sh", None)
    assert done.status == 0, done.output
    assert "FSDP2 " in done.output
    assert " ranks, 30 steps: loss " in done.output
