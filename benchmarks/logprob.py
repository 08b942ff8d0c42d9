"""./mpi_launch.sh -n 2 benchmarks/logprob.py [--rows 512] [--columns 65536] [--dtypes float32 bfloat16] [--rounds 9]

Log-probabilities of vocabulary-parallel logits: ours, against the usual algorithm in plain torch.

The usual algorithm computes the log-softmax of the whole shard in float32 with three all-reduces (the maxima, the sums,
the targets' log-probabilities), keeps the softmax and makes the gradient from it. It runs twice: over this package's
transport, and over torch.distributed's gloo.

In every round each of the three runs once, in turning order, between barriers; a run lasts as long as on the slowest
rank. Printed for each dtype and for forward, and forward with backward:

    ms      median time of a run
    ratio   median over the rounds of (time / our time in the same round): how many times as fast we are
    wrong   values (and elements of the gradient) of all ranks that are off from float64 by more than 1e-5 relative plus
            1e-6 * max(1, |value|), and for a gradient of 16 bits more than its rounding
    MiB     peak of a rank's memory during a run, beyond what it held before (the gradient included); "-" where the
            system does not say
    calls   of the transport, on a rank
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cupy_coll as cc

Reduce = Callable[[Tensor, Any], Any]
Function = Callable[[Tensor], Tensor]
ROWS_AT_ONCE = 16  # of the float64 reference


class Usual(torch.autograd.Function):
    """Forward: log-softmax of the shard in float32, three all-reduces. Backward: from the saved softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, all_reduce: Reduce) -> Tensor:  # type: ignore[override]
        x = logits.float()
        maximum = x.amax(-1, keepdim=True)
        all_reduce(maximum, cc.ReduceOp.MAX)
        shifted = x - maximum
        softmax = shifted.exp()
        total = softmax.sum(-1, keepdim=True)
        all_reduce(total, cc.ReduceOp.SUM)
        local = target - start
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        logprob = shifted.sub_(total.log()).gather(-1, local.unsqueeze(-1)).squeeze(-1)
        logprob.masked_fill_(elsewhere, 0.0)
        all_reduce(logprob, cc.ReduceOp.SUM)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(softmax.div_(total), local, elsewhere)
        return logprob

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        softmax, local, elsewhere = ctx.saved_tensors
        result = softmax * -gradient.unsqueeze(-1)
        result.scatter_add_(-1, local.unsqueeze(-1), gradient.masked_fill(elsewhere, 0.0).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None


@dataclass
class Seen:
    """What the runs of one algorithm showed."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    peak: float = 0.0  # MiB
    calls: int = 0


@dataclass
class Problem:
    """One rank's logits [rows, columns], the targets [rows] and incoming gradients [rows] of all ranks."""

    group: cc.Group
    logits: Tensor
    target: Tensor
    gradient: Tensor

    @property
    def start(self) -> int:
        return self.group.rank * self.logits.shape[-1]


def draw(group: cc.Group, rows: int, columns: int, dtype: torch.dtype) -> Problem:
    ours, everybodys = torch.Generator().manual_seed(1 + group.rank), torch.Generator().manual_seed(0)
    logits = torch.randn(rows, columns, generator=ours).mul_(3).to(dtype).requires_grad_()
    target = torch.randint(0, columns * group.size, (rows,), generator=everybodys)
    return Problem(group, logits, target, torch.randn(rows, generator=everybodys))


def reference(problem: Problem) -> tuple[Tensor, Callable[[int], Tensor]]:
    """Log-probabilities in float64, and this rank's gradient of ROWS_AT_ONCE rows from a given one."""
    group, logits = problem.group, problem.logits.detach()
    blocks = [block.double() for block in logits.split(ROWS_AT_ONCE)]
    maximum = torch.cat([block.amax(-1) for block in blocks])
    cc.all_reduce(maximum, group, cc.ReduceOp.MAX)
    total = torch.cat(
        [(b - m.unsqueeze(-1)).exp().sum(-1) for b, m in zip(blocks, maximum.split(ROWS_AT_ONCE), strict=True)]
    )
    cc.all_reduce(total, group)
    del blocks
    local = problem.target - problem.start
    mine = (local >= 0) & (local < logits.shape[-1])
    at_target = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1).double()
    at_target.masked_fill_(~mine, 0.0)
    cc.all_reduce(at_target, group)

    def gradient(first: int) -> Tensor:
        rows = slice(first, first + ROWS_AT_ONCE)
        p = (logits[rows].double() - maximum[rows].unsqueeze(-1)).exp_().div_(total[rows].unsqueeze(-1))
        at = mine[rows].nonzero().flatten()
        p.neg_()[at, local[rows][at]] += 1
        return p.mul_(problem.gradient[rows].unsqueeze(-1))

    return at_target - maximum - total.log(), gradient


def count_wrong(actual: Tensor, expected: Tensor) -> int:
    """NaN is wrong too."""
    size = expected.abs()
    rounding = torch.finfo(actual.dtype).eps if actual.dtype.itemsize == 2 else 0.0
    limit = (1e-5 + rounding) * size + 1e-6 * size.clamp(min=1)
    return int((~((actual.double() - expected).abs() <= limit)).sum())


def run(problem: Problem, function: Function, backward: bool) -> tuple[Tensor, Tensor | None]:
    value = function(problem.logits)
    return value, torch.autograd.grad(value, problem.logits, problem.gradient)[0] if backward else None


def kib(name: str) -> float | None:
    """A line of this process' status."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def inspect(problem: Problem, function: Function, backward: bool, calls: Callable[[], int], seen: Seen) -> None:
    """One run for everything but its time."""
    before = calls()
    can_see = reset_peak()
    held = kib("VmRSS")
    value, gradient = run(problem, function, backward)
    peak = kib("VmHWM")
    seen.calls = calls() - before
    seen.peak = (peak - held) / 1024 if can_see and peak is not None and held is not None else float("nan")
    expected, gradient_of = reference(problem)
    seen.wrong = count_wrong(value.detach(), expected)
    if gradient is not None:
        firsts = range(0, len(gradient), ROWS_AT_ONCE)
        seen.wrong += sum(count_wrong(gradient[i : i + ROWS_AT_ONCE], gradient_of(i)) for i in firsts)


def measure(
    problem: Problem,
    functions: dict[str, Function],
    calls: dict[str, Callable[[], int]],
    backward: bool,
    rounds: int,
) -> dict[str, Seen]:
    names = list(functions)
    seen = {name: Seen() for name in names}
    for name in names:
        run(problem, functions[name], backward)  # code, scratch and connections are there now
        inspect(problem, functions[name], backward, calls[name], seen[name])
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            cc.barrier(problem.group)
            began = time.perf_counter()
            run(problem, functions[name], backward)
            seen[name].seconds.append(time.perf_counter() - began)
    for one in seen.values():
        slowest = torch.tensor([*one.seconds, one.peak], dtype=torch.float64)
        cc.all_reduce(slowest, problem.group, cc.ReduceOp.MAX)
        *one.seconds, one.peak = slowest.tolist()
        wrong = torch.tensor([one.wrong])
        cc.all_reduce(wrong, problem.group)
        one.wrong = int(wrong)
    return seen


class Gloo:
    """torch.distributed's all-reduce over gloo between the same ranks."""

    def __init__(self, context: cc.CommContext, group: cc.Group) -> None:
        self.calls = 0
        alone = context.get_local_world_size() == group.size
        if alone:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = None
        where: list[Any] = [None]
        if group.rank == 0:
            host = "127.0.0.1" if alone else socket.gethostname()
            store = dist.TCPStore(host, 0, group.size, True, wait_for_workers=False)
            where = [(host, store.port)]
        cc.broadcast_object_list(where, group)
        if store is None:
            store = dist.TCPStore(*where[0], group.size, False)
        limit = datetime.timedelta(seconds=120)
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size, timeout=limit)

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        self.calls += 1
        dist.all_reduce(tensor, op)


def table(dtype: str, what: str, seen: dict[str, Seen]) -> str:
    ours = seen["ours"]
    lines = []
    for name, one in seen.items():
        ratio = statistics.median(b / a for a, b in zip(ours.seconds, one.seconds, strict=True))
        peak = "-" if one.peak != one.peak else f"{one.peak:.0f}"
        lines.append(
            f"{dtype:<10}{what:<20}{name:<24}{statistics.median(one.seconds) * 1e3:>9.1f}{ratio:>8.2f}"
            f"{one.wrong:>8}{peak:>8}{one.calls:>7}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Log-probabilities: ours against the usual three all-reduces.")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=65_536, help="of the vocabulary, a rank")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of torch, a rank")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with cc.CommContext() as context:
        context.init_distributed_env(timeout=120)
        group = context.get_group(cc.CommMode.GLOBAL)
        gloo = Gloo(context, group)
        wrong = 0
        for dtype in arguments.dtypes:
            problem = draw(group, arguments.rows, arguments.columns, getattr(torch, dtype))
            start, end, target = problem.start, problem.start + arguments.columns, problem.target
            functions: dict[str, Function] = {
                "ours": lambda x, t=target, a=start, b=end: cc.DistributedLogprob.apply(x, t, a, b, group),
                "usual, same transport": lambda x, t=target, a=start: Usual.apply(
                    x, t, a, lambda tensor, op: cc.all_reduce(tensor, group, op)
                ),
                "usual, gloo": lambda x, t=target, a=start: Usual.apply(x, t, a, gloo.all_reduce),
            }
            calls = dict.fromkeys(functions, lambda: group.sequence) | {"usual, gloo": lambda: gloo.calls}
            for backward in (False, True):
                seen = measure(problem, functions, calls, backward, arguments.rounds)
                wrong += seen["ours"].wrong
                if group.rank == 0:
                    if dtype == arguments.dtypes[0] and not backward:
                        print(
                            f"# {group.size} ranks, {arguments.threads} thread(s) each, {arguments.rows} rows x "
                            f"{arguments.columns} columns a rank, {arguments.rounds} rounds, torch {torch.__version__}"
                        )
                        heads = f"{'ms':>9}{'ratio':>8}{'wrong':>8}{'MiB':>8}{'calls':>7}"
                        print(f"{'dtype':<10}{'pass':<20}{'algorithm':<24}{heads}")
                    print(table(dtype, "forward + backward" if backward else "forward", seen), flush=True)
        dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
