"""./mpi_launch.sh -n 4 benchmarks/check_mode.py [--rounds 5] [--ops 200]

What check mode and the flight recorder cost an operation.

The operation is an all_reduce of 8 bytes, where every cost shows most. Check mode is turned off and on by turns in the
same run; the times of its operations are medians on rank 0. What costs too little to be seen in them, the question
whether check mode is on, and the flight recorder's entry, are measured alone, in processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

import cupy_coll as cc
from cupy_coll.recorder import Recorder

WARM_UP = 50  # operations of each turn that do not count
TIMEOUT = 60  # seconds a rank waits for another one
REPEATS = 100_000  # calls of what is measured alone
ALLOWED = 2.0  # microseconds that the flight recorder may take


def operation_times(check: bool, operations: int) -> list[float]:
    """Microseconds of each of so many operations."""
    context = cc.CommContext()
    context.init_distributed_env(timeout=TIMEOUT, check=check)
    tensor = torch.zeros(1, dtype=torch.float64)
    times = []
    for _ in range(WARM_UP + operations):
        begin = time.perf_counter()
        cc.all_reduce(tensor, cc.CommMode.GLOBAL)
        times.append((time.perf_counter() - begin) * 1e6)
    context.destroy()
    return times[WARM_UP:]


def processor_time(function: Callable[[], object]) -> float:
    """Microseconds of a call, the least of a few measurements; the loop around it is taken off."""

    def loop(body: Callable[[], object]) -> float:
        begin = time.process_time()
        for _ in range(REPEATS):
            body()
        return (time.process_time() - begin) / REPEATS * 1e6

    return min(loop(function) for _ in range(3)) - min(loop(lambda: None) for _ in range(3))


def question_time() -> float:
    """Of asking, before an operation, whether check mode is on, where it is off."""
    context = cc.CommContext()
    context.init_distributed_env(timeout=TIMEOUT, check=False)
    channel = context.get_group(cc.CommMode.GLOBAL)._data
    tensor = torch.zeros(1)
    cost = processor_time(lambda: channel.compare("all_reduce", tensor, cc.ReduceOp.SUM))
    context.destroy()
    return cost


def recorder_time() -> float:
    """Of an entry of the flight recorder, its start and its end."""
    recorder, tensors = Recorder(0, 1), [torch.zeros(1)]
    return processor_time(
        lambda: recorder.end(recorder.begin("0.data", "GLOBAL [0, 1]", "collective", 1, None, "all_reduce", tensors))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="What check mode and the flight recorder cost an operation.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each mode (default: %(default)s)")
    parser.add_argument("--ops", type=int, default=200, help="operations in a turn (default: %(default)s)")
    chosen = parser.parse_args()
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(chosen.rounds):
        for check in times:
            times[check] += operation_times(check, chosen.ops)
    question, recorder = question_time(), recorder_time()
    off, on = (statistics.median(times[check]) for check in (False, True))
    with cc.CommContext() as context:
        context.init_distributed_env(timeout=TIMEOUT, check=False)
        if context.is_main_rank():
            print(f"{context.get_world_size()} ranks, all_reduce of 8 bytes, {len(times[True]):,} operations a mode")
            print(f"{'':48} {'us':>8} {'ratio':>8}")
            for title, cost in (
                ("check mode off", off),
                ("check mode on", on),
                ("asking whether it is on (processor time)", question),
                ("flight recorder, an entry (processor time)", recorder),
            ):
                print(f"{title:48} {cost:8.2f} {cost / off:8.3f}")
            print(
                f"flight recorder: {recorder:.2f} us, allowed {ALLOWED:g}: {'ok' if recorder < ALLOWED else 'too slow'}"
            )
    return 0 if recorder < ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
