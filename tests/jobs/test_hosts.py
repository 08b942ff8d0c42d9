"""The launcher on two hosts with a network between them, names and /dev/shm of their own: by namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, HostsError
from open_mpi import OpenMpi
from starting import ROOT, Finished, run_command

pytestmark = pytest.mark.slow

SCRIPT = """
import os, socket
import torch
import cupy_coll as cc

context = cc.CommContext()
context.init_distributed_env(timeout=60)
rank = context.get_global_rank()
intra, inter = context.get_intra_node_process_group(), context.get_inter_node_process_group()
sums = []
for mode in (cc.CommMode.INTRA_NODE, cc.CommMode.INTER_NODE, cc.CommMode.GLOBAL):
    tensor = torch.full((1 << 18,), float(rank))  # more than a message between hosts takes at once
    cc.all_reduce(tensor, mode)
    sums.append(int(tensor[-1]))
lists = f"{list(intra.ranks)} {list(inter.ranks)} {sums}"
os.write(1, f"{rank} {socket.gethostname()} {lists} {os.environ.get('MY_OWN')}\\n".encode())
context.destroy()
"""
EXPECTED = [
    "0 node1 [0, 1] [0, 2] [1, 2, 6] passed on",
    "1 node1 [0, 1] [1, 3] [1, 4, 6] passed on",
    "2 node2 [2, 3] [0, 2] [5, 2, 6] passed on",
    "3 node2 [2, 3] [1, 3] [5, 4, 6] passed on",
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    try:
        made = Hosts(tmp_path_factory.mktemp("hosts"), 2)
    except HostsError as error:
        pytest.skip(str(error))
    yield made
    made.close()
    assert made.processes() == []


def start(hosts: Hosts, folder: Path, env: dict[str, str]) -> Finished:
    """Two ranks on each, from the first one."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = ["-n", "4", "--ppn", "2", "--hosts", ",".join(hosts.names), "--env", "MY_OWN"]
    variables = {"MY_OWN": "passed on", **env}
    return run_command(hosts.on(0, [str(ROOT / "mpi_launch.sh"), *options, str(script)], folder), 90, variables)


def check(done: Finished) -> None:
    assert done.status == 0, done.output
    assert sorted(line for line in done.output.splitlines() if line[:1].isdecimal()) == EXPECTED, done.output


def test_this_mpi(hosts: Hosts, tmp_path: Path) -> None:
    ssh = str(hosts.ssh)
    mpich = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": ssh}
    check(start(hosts, tmp_path, {**mpich, "PRTE_MCA_plm_ssh_agent": ssh, "OMPI_MCA_plm_rsh_agent": ssh}))


def test_open_mpi(hosts: Hosts, open_mpi: OpenMpi, tmp_path: Path) -> None:
    ssh = str(hosts.ssh)
    agents = {"PRTE_MCA_plm_ssh_agent": ssh, "OMPI_MCA_plm_rsh_agent": ssh}
    check(start(hosts, tmp_path, {**agents, **open_mpi.variables}))
