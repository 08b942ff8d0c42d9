"""./mpi_launch.sh -n 4 benchmarks/fuzz.py --seconds 60 --seed 1 [--ops N] [--only K]

Random operations, compared with answers that are computed apart from cupy_coll.

From the seed all ranks draw the same program: for each operation its group (in any order of ranks, without rank 0, of
one rank, the groups of a mesh), dtype, sizes (0, 1, uneven, a few of several MB), reduction, root, and whether it is
synchronous; of asynchronous ones several are in flight, and they are waited for in another order, or dropped. Memory
layouts (strided, transposed, offset, expanded, conjugated, NumPy arrays, leaves that require grad) are each rank's own.
What every rank puts in comes from the seed too, so each rank computes the right answer by itself, with NumPy, and
compares it bit for bit. It also checks what must not change: inputs, and the memory beside outputs.

Prints how many operations there were of each kind, wrong values and seconds. At a wrong value it prints how to run that
operation again, and ends with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from fuzz_operations import OPERATIONS, Drawn, Groups, Started, outside

import cupy_coll as cc

TIMEOUT = 60  # seconds the library waits for another rank
STRETCH = 25  # operations between two agreements whether to go on


def draw_groups(seed: int, size: int) -> Groups:
    """Lists of ranks by mode; of the modes of a mesh all lists."""
    rng = random.Random(f"{seed} groups")
    everyone = list(range(size))

    def some(least: int) -> list[int]:
        return rng.sample(everyone, rng.randint(min(least, size), size))

    groups: Groups = {
        "GLOBAL": [everyone],
        "SEQUENCE_PARALLEL": [some(2)],
        "REVERSED": [everyone[::-1]],
        "ALONE": [[rng.choice(everyone)]],
        **{f"SOME_{i}": [some(2)] for i in range(4)},
    }
    if size > 1:
        groups["WITHOUT_0"] = [rng.sample(everyone[1:], size - 1)]
    if size % 2 == 0:
        groups["DATA_PARALLEL"] = [everyone[start :: size // 2] for start in range(size // 2)]
        groups["TENSOR_PARALLEL"] = [everyone[: size // 2], everyone[size // 2 :]]
    return groups


def make_groups(groups: Groups, size: int) -> None:
    context = cc.CommContext()
    if size % 2 == 0:
        context.init_mesh(dp=2, tp=size // 2)
    for mode, lists in groups.items():
        if mode not in ("GLOBAL", "DATA_PARALLEL", "TENSOR_PARALLEL"):
            context.init_group(lists[0], mode)


@dataclass
class InFlight:
    """An asynchronous operation that has not been looked at since it was started."""

    drawn: Drawn
    started: Started
    due: int  # the number of the operation after which it is

    def finish(self) -> None:
        work, own = self.started.work, self.drawn.own
        if self.drawn.dropped:  # what is started later in the same group ends later
            self.started.work = None
            del work
            cc.barrier(self.drawn.mode)
            return
        how = own.choice(["wait", "wait", "timeout", "poll", "result", "future"])
        if how == "poll":
            while not work.is_completed():
                time.sleep(1e-5)
        elif how == "result":
            work.result()
        elif how == "future":
            work.get_future().wait()
        work.wait(TIMEOUT) if how == "timeout" else work.wait()


class Fuzz:
    """The program of one rank.

    Attributes:
        operations, seconds: by name; operations of groups that this rank is not in count too.
        wrong: number and name of each operation with a wrong value here.
    """

    def __init__(self, seed: int, size: int, rank: int) -> None:
        self.seed, self.size, self.rank = seed, size, rank
        self.groups = draw_groups(seed, size)
        self.operations: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.wrong: list[tuple[int, str]] = []
        self.in_flight: list[InFlight] = []

    def run(self, number: int) -> None:
        """Operation ``number``, and the end of those in flight whose turn it is."""
        drawn = Drawn(self.seed, number, self.groups, self.rank)
        self.operations[drawn.name] += 1
        with self.accounted(drawn):
            started = outside(drawn) if drawn.ranks is None else OPERATIONS[drawn.name](drawn)
        if started.work is None:
            self.compare(drawn, started)
        else:
            self.in_flight.append(InFlight(drawn, started, number + drawn.flight))
        self.finish(number)

    def finish(self, number: float) -> None:
        """End those in flight that are due, in an order that all ranks share."""
        due = [one for one in self.in_flight if one.due <= number]
        due.sort(key=lambda one: random.Random(f"{self.seed} {one.drawn.number} due").random())
        for one in due:
            self.in_flight.remove(one)
            with self.accounted(one.drawn):
                one.finish()
            self.compare(one.drawn, one.started)

    def compare(self, drawn: Drawn, started: Started) -> None:
        for problem in started.check():
            if problem:
                self.wrong.append((drawn.number, drawn.name))
                where = f"{drawn.name} in {drawn.mode} {drawn.ranks}"
                print(f"rank {self.rank}: operation {drawn.number}, {where}: {problem}", flush=True)

    @contextlib.contextmanager
    def accounted(self, drawn: Drawn) -> Iterator[None]:
        """Counts the seconds of an operation, and says which one it was that raised."""
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            error.add_note(f"in operation {drawn.number}; {again(self, drawn.number)}")
            raise
        finally:
            self.seconds[drawn.name] += time.perf_counter() - begin


def again(fuzz: Fuzz, number: int) -> str:
    """How to run an operation once more."""
    start = f"./mpi_launch.sh -n {fuzz.size} benchmarks/fuzz.py --seed {fuzz.seed}"
    return f"again: {start} --only {number}; with what was in flight before it: {start} --ops {number + 1}"


def run(fuzz: Fuzz, numbers: Iterator[int], seconds: float) -> None:
    """Until the numbers or the seconds end, or a value is wrong on any rank; rank 0 has the clock."""
    begin = time.monotonic()
    go_on = True
    while go_on:
        stretch = list(islice(numbers, STRETCH))
        for number in stretch:
            fuzz.run(number)
        fuzz.finish(float("inf"))
        wrong = cc.gather_jagged_object_lists(fuzz.wrong)
        verdict = [len(stretch) == STRETCH and not wrong and time.monotonic() - begin < seconds]
        cc.broadcast_object_list(verdict, cc.CommMode.GLOBAL)
        go_on = verdict[0]


def table(fuzz: Fuzz, wrong: Sequence[tuple[int, str]], seconds: float) -> str:
    """One line an operation: how many, wrong values of all ranks, and seconds of this rank, its inputs included."""
    lines = [f"{'operation':38} {'number':>8} {'wrong':>6} {'seconds':>8}"]
    for name in OPERATIONS:
        bad = sum(name == where for _, where in wrong)
        lines.append(f"{name:38} {fuzz.operations[name]:8,} {bad:6,} {fuzz.seconds[name]:8.1f}")
    lines.append(f"{'all':38} {sum(fuzz.operations.values()):8,} {len(wrong):6,} {seconds:8.1f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Random operations, compared with answers computed apart from cupy_coll."
    )
    parser.add_argument("--seconds", type=float, help="how long, about (default: 60, or as long as --ops takes)")
    parser.add_argument("--seed", type=int, default=0, help="what all draws come from (default: %(default)s)")
    parser.add_argument("--ops", type=int, help="end after so many operations")
    parser.add_argument("--only", type=int, metavar="K", help="run operation K alone")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    begin = time.monotonic()
    context = cc.CommContext()
    context.init_distributed_env(timeout=TIMEOUT)
    fuzz = Fuzz(chosen.seed, context.get_world_size(), context.get_global_rank())
    make_groups(fuzz.groups, fuzz.size)
    numbers: Iterator[int] = iter(range(chosen.ops)) if chosen.ops else count()
    if chosen.only is not None:
        numbers = iter([chosen.only])
    run(fuzz, numbers, chosen.seconds or (float("inf") if chosen.ops else 60))
    wrong = cc.gather_jagged_object_lists(fuzz.wrong)
    assert wrong is not None
    if context.is_main_rank():
        print(f"{fuzz.size} ranks, seed {fuzz.seed}")
        print(table(fuzz, wrong, time.monotonic() - begin))
        if wrong:
            print(again(fuzz, min(number for number, _ in wrong)))
    context.destroy()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
