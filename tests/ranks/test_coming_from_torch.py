"""Every line of the tables "coming from torch.distributed": what is written there and here, side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cupy_coll as cc

ROOT = Path(__file__).resolve().parents[2]


def _gather(here: bool, tensor: torch.Tensor, size: int, rank: int) -> list[torch.Tensor] | None:
    into = [torch.empty(3) for _ in range(size)] if rank == 0 else None
    cc.gather(tensor, "NAME", into, 0) if here else dist.gather(tensor, into, 0)
    return into


def _neighbour(here: bool, size: int, rank: int) -> torch.Tensor | None:
    """Even ranks send to the next one: one asynchronously, one not."""
    received = torch.zeros(2, 3)
    peer = rank ^ 1
    if peer >= size:
        return None
    if rank % 2 == 0:
        tensor = torch.full((3,), float(rank))
        if here:
            cc.send(tensor + 1, peer, "NAME", async_op=True).wait()
            cc.send(tensor, peer, "NAME")
        else:
            dist.isend(tensor + 1, peer).wait()
            dist.send(tensor, peer)
        return None
    for row in received:
        cc.recv(row, peer, "NAME") if here else dist.recv(row, peer)
    return received


def _into(function: Callable[[torch.Tensor], object], count: int) -> torch.Tensor:
    output = torch.empty(count)
    function(output)
    return output


def _after(function: Callable[[torch.Tensor], object], rank: int, count: int = 3) -> torch.Tensor:
    tensor = torch.arange(float(count)) + rank
    function(tensor)
    return tensor


def _objects(here: bool, size: int, rank: int) -> list[object]:
    found: list[object] = [rank, "x"]
    cc.broadcast_object_list(found, "NAME", size - 1) if here else dist.broadcast_object_list(found, size - 1)
    return found


def _everybodys(size: int, rank: int) -> list[object]:
    found: list[object] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    return found


def _plain(found: object) -> object:
    """Tensors as numbers, to be compared."""
    if isinstance(found, (list, tuple)):
        return [_plain(one) for one in found]
    return found.tolist() if isinstance(found, torch.Tensor) else found


# By the line's beginning: (there, here), each called with (world size, rank). A mesh and the beginning are tried below.
LINES: dict[str, tuple[Callable[[int, int], object], Callable[[int, int], object]]] = {
    "`dist.get_rank()`": (
        lambda size, rank: (dist.get_rank(), dist.get_world_size()),
        lambda size, rank: (cc.CommContext().get_global_rank(), cc.CommContext().get_world_size("GLOBAL")),
    ),
    "`dist.new_group(ranks)`": (
        lambda size, rank: dist.get_process_group_ranks(dist.new_group(list(range(size)))),
        lambda size, rank: list(cc.CommContext().init_group(list(range(size)), "OTHER").ranks),
    ),
    "`dist.all_reduce(": (
        lambda size, rank: _after(lambda t: dist.all_reduce(t, dist.ReduceOp.MAX, None, True).wait(), rank),
        lambda size, rank: _after(lambda t: cc.all_reduce(t, "NAME", cc.ReduceOp.MAX, True).wait(), rank),
    ),
    "`dist.all_gather_into_tensor(": (
        lambda size, rank: _into(lambda out: dist.all_gather_into_tensor(out, torch.full((3,), rank + 1.0)), 3 * size),
        lambda size, rank: _into(lambda out: cc.all_gather(out, torch.full((3,), rank + 1.0), "NAME"), 3 * size),
    ),
    "`dist.reduce_scatter_tensor(": (
        lambda size, rank: _into(
            lambda out: dist.reduce_scatter_tensor(out, torch.arange(3.0 * size) + rank, dist.ReduceOp.SUM), 3
        ),
        lambda size, rank: _into(
            lambda out: cc.reduce_scatter(out, torch.arange(3.0 * size) + rank, "NAME", cc.ReduceOp.SUM), 3
        ),
    ),
    "`dist.broadcast(": (
        lambda size, rank: [
            _after(lambda t: dist.broadcast(t, size - 1), rank),
            _after(lambda t: dist.broadcast(t, group_src=0), rank),
        ],
        lambda size, rank: [
            _after(lambda t: cc.broadcast(t, "NAME", size - 1), rank),
            _after(lambda t: cc.broadcast(t, "NAME", group_src=0), rank),
        ],
    ),
    "`dist.scatter(": (
        lambda size, rank: [
            _after(lambda t: dist.scatter(t, list(torch.arange(3.0 * size).split(3)) if rank == 0 else None, 0), rank),
            _gather(False, torch.full((3,), rank + 1.0), size, rank),
        ],
        lambda size, rank: [
            _after(
                lambda t: cc.scatter(t, "NAME", list(torch.arange(3.0 * size).split(3)) if rank == 0 else None, 0), rank
            ),
            _gather(True, torch.full((3,), rank + 1.0), size, rank),
        ],
    ),
    "`dist.reduce(": (
        lambda size, rank: _after(lambda t: dist.reduce(t, 0, dist.ReduceOp.SUM), rank)[: 3 * (rank == 0)],
        lambda size, rank: _after(lambda t: cc.reduce(t, "NAME", 0, cc.ReduceOp.SUM), rank)[: 3 * (rank == 0)],
    ),
    "`dist.send(": (
        lambda size, rank: _neighbour(False, size, rank),
        lambda size, rank: _neighbour(True, size, rank),
    ),
    "`dist.broadcast_object_list(": (
        lambda size, rank: _objects(False, size, rank),
        lambda size, rank: _objects(True, size, rank),
    ),
    "`dist.all_gather_object(": (
        lambda size, rank: _everybodys(size, rank),
        lambda size, rank: cc.gather_jagged_object_lists([{"rank": rank}], "NAME"),
    ),
    "`dist.barrier(": (lambda size, rank: dist.barrier(), lambda size, rank: cc.barrier("NAME")),
}
ELSEWHERE = ["`torchrun", "`dist.init_process_group(", "`init_device_mesh(", "`dist.destroy_process_group("]


def test_every_line(no_context, size, rank, expect):
    """Both begin, do each line, compare, and end."""
    if size == 1:  # no launcher: torch would ask for MASTER_ADDR
        cc.CommContext().init_distributed_env()
    dist.init_process_group("cupy_coll", timeout=timedelta(seconds=20))
    context = cc.CommContext()
    context.init_group(list(range(size)), "NAME")
    for line, (there, here) in LINES.items():
        one, other = _plain(there(size, rank)), _plain(here(size, rank))
        expect(one, other, line)
    if size % 2 == 0:
        theirs = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        ours = context.init_mesh(dp=2, tp=size // 2)
        for axis in ("dp", "tp"):
            expect(dist.get_process_group_ranks(theirs.get_group(axis)), list(ours[axis].ranks), axis)
    dist.destroy_process_group()
    context.destroy()
    expect((dist.is_initialized(), context.is_initialized()), (False, False))


def test_the_table_has_no_other_lines(rank):
    page = (ROOT / "docs/migration.md").read_text()
    table = page.split("## torch.distributed\n")[1]
    first = re.findall(r"^\| (`[^|]*)", table, flags=re.MULTILINE)
    known = [*LINES, *ELSEWHERE]
    assert len(first) == len(known)
    for line in first:
        assert any(line.startswith(begin) for begin in known), line


@pytest.mark.parametrize(
    "name", re.findall(r"`(\w+)\(", (ROOT / "README.md").read_text().split("| from | change |")[1])
)
def test_the_readme_names_what_there_is(name):
    context, places = cc.CommContext(), (cc, dist, torch)
    assert any(hasattr(place, name) for place in (context, *places)), name
