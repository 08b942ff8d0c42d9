"""Random programs: operations of all kinds on overlapping groups, waited for whenever.

Every rank draws the same program from its seed and computes what each operation must give.
"""

from __future__ import annotations

import random

import pytest
import torch
from support import LAYOUTS, Placed, marked, tensor_of
from torch.distributed import ReduceOp

import cupy_coll as cc

DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8]


class Step:
    """One operation on this rank: how it is started, and what its output must be."""

    def __init__(self, draw: random.Random, group, ranks, rank):
        self.kind = draw.choice(["all_reduce", "broadcast", "all_gather", "scatter", "gather", "reduce_scatter"])
        dtype = draw.choice(DTYPES)
        shape = draw.choice([(3,), (2, 5), (), (0, 4), (70, 90), (1, 2, 3)])
        layout, self.async_op = draw.choice(LAYOUTS), draw.random() < 0.6
        root, seed = draw.randrange(len(ranks)), draw.randrange(50)
        self.label = f"{self.kind} {ranks} {dtype} {shape} {layout} root={root} async={self.async_op}"
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.work = None
        if group is None:
            return
        n, index = len(ranks), ranks.index(rank)

        def values(member, extra=()):
            return tensor_of(marked((*extra, *shape), member + seed) % 11, dtype)

        def place(tensor):
            return Placed(tensor, layout).view

        parts = [values(member) for member in ranks]
        maximum = self.kind in ("all_reduce", "reduce_scatter") and not dtype.is_complex and dtype != torch.bool
        op = ReduceOp.MAX if maximum else ReduceOp.SUM
        options = {"async_op": self.async_op}
        if self.kind == "all_reduce":
            tensor = place(parts[index])
            self.outputs = [(tensor, reduced(parts, op))]
            self.work = cc.all_reduce(tensor, group, op, **options)
        elif self.kind == "broadcast":
            tensor = place(parts[index])
            self.outputs = [(tensor, parts[root])]
            self.work = cc.broadcast(tensor, group, group_src=root, **options)
        elif self.kind == "all_gather":
            output = place(torch.zeros((n, *shape), dtype=dtype))
            self.outputs = [(output, torch.stack(parts))]
            self.work = cc.all_gather(output, place(parts[index]), group, **options)
        elif self.kind == "scatter":
            tensor = place(torch.zeros(shape, dtype=dtype))
            self.outputs = [(tensor, parts[index])]
            pieces = [place(part) for part in parts] if index == root else None
            self.work = cc.scatter(tensor, group, pieces, group_src=root, **options)
        elif self.kind == "gather":
            pieces = [place(torch.zeros(shape, dtype=dtype)) for _ in ranks] if index == root else None
            self.outputs = list(zip(pieces or [], parts, strict=False))
            self.work = cc.gather(place(parts[index]), group, pieces, group_dst=root, **options)
        else:
            sources = [values(member, (n,)) for member in ranks]
            output = place(torch.zeros(shape, dtype=dtype))
            self.outputs = [(output, reduced(sources, op)[index])]
            self.work = cc.reduce_scatter(output, place(sources[index]), group, op, **options)

    def check(self, expect) -> None:
        if self.work is not None:
            self.work.wait()
        for actual, right in self.outputs:
            expect(actual, right, self.label)


def reduced(parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = torch.maximum(total, part) if op == ReduceOp.MAX else total + part
    return total


@pytest.mark.parametrize("seed", range(6))
def test_random_program(seed, group_of, rank, expect):
    draw = random.Random(seed)
    groups = [(ranks, group_of(ranks)) for ranks in group_of.several()]
    own = random.Random(1000 * seed + rank)  # when this rank waits is its own affair
    pending: list[Step] = []
    for _ in range(60):
        ranks, group = draw.choice(groups)
        step = Step(draw, group, ranks, rank)
        if step.work is None:
            step.check(expect)
        else:
            pending.append(step)
        if len(pending) > 8 or own.random() < 0.2:
            own.shuffle(pending)
            while pending and own.random() < 0.8:
                pending.pop().check(expect)
    for step in pending:
        step.check(expect)
