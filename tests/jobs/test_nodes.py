"""Groups across nodes: two of them, imitated by MPICH on one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from starting import RUNNER, mpiexec, run_command

SCRIPT = """
import torch
import cupy_coll as cc

context = cc.CommContext()
context.init_distributed_env(timeout=30)
rank = context.get_global_rank()
intra, inter = context.get_intra_node_process_group(), context.get_inter_node_process_group()
tensor = torch.tensor([float(rank)])
cc.all_reduce(tensor, cc.CommMode.INTRA_NODE)
place = (context.get_in_node_rank(), context.get_local_world_size())
lines = cc.gather_jagged_object_lists([f"{rank}: {place} {intra.ranks} {inter.ranks} {tensor.item()}"])
if context.is_main_rank():
    print(*lines, sep="\\n", flush=True)
context.destroy()
"""


def test_uneven_nodes(tmp_path: Path) -> None:
    """One rank on the first node, two on the second: the third rank has no partner on the first."""
    version = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, timeout=20, check=False)
    if "HYDRA" not in version.stdout:
        pytest.skip("only MPICH's mpiexec can imitate several nodes without privileges")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    nodes = ["-launcher", "fork", "-hosts", "nodeA:1,nodeB:2"]
    result = run_command([mpiexec(), *nodes, "-n", "3", sys.executable, "-c", RUNNER, str(script)], 60)
    assert result.status == 0, result.output
    for line in (
        "0: (0, 1) (0,) (0, 1) 0.0",
        "1: (0, 2) (1, 2) (0, 1) 3.0",
        "2: (1, 2) (1, 2) (2,) 3.0",
    ):
        assert line in result.output, f"{line!r} is not in\n{result.output}"
