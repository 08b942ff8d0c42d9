"""./mpi_launch.sh -n 2 benchmarks/collectives.py [--largest 64] [--rounds 11]

torch.distributed.all_reduce of float32 over this package's backend and over gloo, and mpi4py's Allreduce.

In every round each of the three runs once for each size, in turning order, between barriers; small messages are
repeated within a run. A run lasts as long as on the slowest rank. Printed:

    us      median time of one all-reduce
    ratio   median over the rounds of (time / our time in the same round): how many times as fast we are
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from mpi4py import MPI

import cupy_coll as cc

LONG_ENOUGH = 1 << 20  # bytes that a run moves at least


def main() -> None:
    parser = argparse.ArgumentParser(description="all_reduce: our torch backend, gloo and mpi4py.")
    parser.add_argument("--largest", type=int, default=64, help="MiB")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cc.init_torch(timeout=120)
    world = cc.CommContext().get_group("GLOBAL")
    assert world is not None
    gloo = dist.new_group(backend="gloo")
    functions: dict[str, Callable[[torch.Tensor], object]] = {
        "ours": dist.all_reduce,
        "gloo": lambda tensor: dist.all_reduce(tensor, group=gloo),
        "mpi4py": lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy()),
    }
    names = list(functions)
    if world.rank == 0:
        print(f"# {world.size} ranks, {arguments.rounds} rounds, torch {torch.__version__}, {MPI.get_vendor()[0]}")
        print(
            f"{'bytes':>10}"
            + "".join(f"{name + ' us':>12}" for name in names)
            + f"{'gloo/ours':>12}{'mpi4py/ours':>12}"
        )
    for nbytes in (8, *(64 << 2 * i for i in range(11))):
        if nbytes > arguments.largest << 20:
            break
        tensor = torch.zeros(nbytes // 4)
        repeats = max(1, min(200, LONG_ENOUGH // nbytes))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-1, arguments.rounds):  # the first one is not counted
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                cc.barrier(world)
                began = time.perf_counter()
                for _ in range(repeats):
                    functions[name](tensor)
                if number >= 0:
                    seconds[name].append((time.perf_counter() - began) / repeats)
        slowest = torch.tensor([seconds[name] for name in names], dtype=torch.float64)
        cc.all_reduce(slowest, world, cc.ReduceOp.MAX)
        times = dict(zip(names, slowest.tolist(), strict=True))
        if world.rank == 0:
            ratios = [statistics.median(b / a for a, b in zip(times["ours"], times[n], strict=True)) for n in names[1:]]
            row = "".join(f"{statistics.median(times[name]) * 1e6:>12.1f}" for name in names)
            print(f"{nbytes:>10}{row}" + "".join(f"{ratio:>12.2f}" for ratio in ratios), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
