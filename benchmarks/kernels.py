"""python benchmarks/kernels.py [--rounds 20] [--seconds 240] [--sanitize] [--dry-run]

The CUDA kernels of log-probabilities beside a copy on the same GPU, and torch's own cross entropy, plain and compiled.

For each type and shape: forward, forward with entropy, backward, backward with entropy. Each is timed by events, in
turn with the copy, over enough buffers that none is left in the cache. Printed:

    us        median time of a call
    GB/s      the fewest bytes that the call must move (forward: logits; backward: logits and gradient) over that time
    of copy   that, over the bandwidth (bytes read and written) of a copy of as many logits in the same round
    torch     time of torch.nn.functional.cross_entropy (of its backward) over ours; compiled: of torch.compile's
    wrong     of 8 rows, those that differ from float64

--sanitize calls each kernel once on small shapes, for compute-sanitizer. --dry-run does all of it on a processor with
small shapes and few rounds, to see that it runs; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cupy_coll.device import CudaDevice, Device
from cupy_coll.logprob import launch
from cupy_coll.logprob.partials import MessageLayout, Shard
from cupy_coll.logprob.sweeps import Upstream

SHAPES = [(rows, columns) for columns in (32_768, 131_072, 262_144) for rows in (16, 256, 8192)]
CACHE = 256 << 20  # bytes of logits after which a buffer has left the cache
GOALS = {"forward": 0.90, "backward": 0.85}  # of the copy's bandwidth, from 8,192 rows on


class Timer:
    """Seconds of calls on a GPU, by events; on a processor by the clock."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def __call__(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Case:
    """Logits of one shape and type, several of them, and what is called on them."""

    def __init__(self, device: Device, place: str, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.device, self.rows, self.columns, self.dtype = device, rows, columns, dtype
        nbytes = rows * columns * dtype.itemsize
        count = 1 if place == "cpu" else max(1, min(64, CACHE // nbytes))
        self.logits = [torch.randn(rows, columns, device=place).to(dtype) for _ in range(count)]
        self.results = [torch.empty_like(self.logits[0]) for _ in range(count)]
        self.target = torch.randint(0, columns, (rows,), device=place)
        self.upstream = torch.randn(rows, device=place)
        self.shard = Shard(0, 1, columns, 0, columns)
        self.turn = 0

    def next(self) -> tuple[Tensor, Tensor]:
        self.turn += 1
        return self.logits[self.turn % len(self.logits)], self.results[self.turn % len(self.results)]

    def forward(self, entropy: bool, logits: Tensor | None = None):
        logits = self.next()[0] if logits is None else logits
        layout = MessageLayout(1, self.rows, entropy, torch.float32)
        message = launch.softmax_partials(self.device, logits, self.target, self.shard, layout, 1.0)
        return launch.merge_partials(self.device, message, self.target, layout, 1.0)

    def backward(self, entropy: bool, summary) -> Tensor:
        logits, result = self.next()
        upstream = Upstream(self.upstream, self.upstream if entropy else None, self.target)
        numbers = summary.maximum, summary.log_sum, summary.entropy
        launch.logprob_backward(self.device, result, logits, *numbers, upstream, self.columns, 1.0)
        return result

    def copy(self) -> None:
        logits, result = self.next()
        result.copy_(logits)

    def wrong(self) -> int:
        """Of up to 8 rows: those whose log-probability, entropy or gradient differ from float64."""
        logits, some = self.logits[0], slice(0, min(8, self.rows))
        summary = self.forward(True, logits)
        self.turn = -1  # so that the next logits are the first
        gradient = self.backward(True, summary)[some].double()
        wide = logits[some].double().requires_grad_()
        logs = torch.log_softmax(wide, -1)
        value = logs.gather(-1, self.target[some].unsqueeze(-1)).squeeze(-1)
        entropy = -(logs * logs.exp()).sum(-1)
        ((value + entropy) * self.upstream[some].double()).sum().backward()
        rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(self.dtype, 0.0)
        off = (gradient - wide.grad).abs() > 2e-6 + (1e-5 + rounding) * wide.grad.abs()
        bad = off.any(-1) | ((summary.logprob[some].double() - value).abs() > 2e-5)
        return int((bad | ((summary.entropy[some].double() - entropy).abs() > 2e-5)).sum())


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


def others(case: Case, timer: Timer, rounds: int, compiled: Callable | None) -> dict[str, list[float]]:
    """Seconds of torch's cross entropy and of its backward, plain and compiled; nan where memory is too small."""
    seconds: dict[str, list[float]] = {}
    for name, function in (("torch", cross_entropy), ("compiled", compiled)):
        seconds[name] = [float("nan")] * 2
        if function is None:
            continue
        leaf = case.logits[0].detach().requires_grad_()
        call = partial(function, leaf, case.target)
        with contextlib.suppress(torch.OutOfMemoryError):
            times: list[list[float]] = [[], []]
            for _ in range(max(3, rounds // 4)):
                held: list[Tensor] = []
                times[0].append(timer(lambda call=call, held=held: held.append(call())))
                leaf.grad = None
                times[1].append(timer(lambda held=held: held[0].backward(case.upstream)))
            seconds[name] = [statistics.median(one[1:]) for one in times]
    return seconds


def measure(case: Case, timer: Timer, rounds: int, compiled: Callable | None) -> Iterator[tuple]:
    """(pass, us, GB/s, share of the copy's bandwidth, torch's time over ours, compiled's) of each pass."""
    summaries = {entropy: case.forward(entropy) for entropy in (False, True)}
    nbytes = case.rows * case.columns * case.dtype.itemsize
    passes = {
        "forward": (nbytes, lambda: case.forward(False)),
        "forward, entropy": (nbytes, lambda: case.forward(True)),
        "backward": (2 * nbytes, lambda: case.backward(False, summaries[False])),
        "backward, entropy": (2 * nbytes, lambda: case.backward(True, summaries[True])),
    }
    beside = others(case, timer, rounds, compiled)
    for name, (moved, call) in passes.items():
        call()
        pairs = [(timer(call), timer(case.copy)) for _ in range(rounds)]
        ours = statistics.median(pair[0] for pair in pairs)
        share = statistics.median((moved / a) / (2 * nbytes / b) for a, b in pairs)
        ratios = [beside[other]["backward" in name] / ours for other in ("torch", "compiled")]
        yield name, ours * 1e6, moved / ours / 1e9, share, *ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="The CUDA kernels beside a copy and torch's cross entropy.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=240.0, help="no new shape is begun after this time")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    began, shapes, device, place = time.monotonic(), SHAPES, CudaDevice(), "cuda"
    compiled = None
    if arguments.dry_run:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
        from kernels_on_host.device import HostDevice

        device, place, shapes, arguments.rounds = HostDevice(checks=False), "cpu", [(4, 4096), (2, 8192)], 2
    elif not arguments.sanitize:
        compiled = torch.compile(cross_entropy)
    if arguments.sanitize:
        shapes = [(3, 4099), (5, 16 * 520)]
    timer, wrong, missed = Timer(place == "cuda"), 0, []
    print(
        f"# {'a processor, a dry run' if place == 'cpu' else torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    head = ("rows", "columns", "type", "pass", "us", "GB/s", "of copy", "torch", "compiled", "wrong")
    print(f"{head[0]:>6}{head[1]:>9}  {head[2]:9}{head[3]:18}" + "".join(f"{word:>10}" for word in head[4:]))
    for dtype in (torch.bfloat16, torch.float32):
        for rows, columns in shapes:
            if time.monotonic() - began > arguments.seconds:
                print(f"# {rows} x {columns} {dtype}: left out, the time is over")
                continue
            case = Case(device, place, rows, columns, dtype)
            bad = case.wrong()
            wrong += bad
            if arguments.sanitize:
                case.backward(False, case.forward(False))
                continue
            for name, us, speed, share, *ratios in measure(case, timer, arguments.rounds, compiled):
                numbers = f"{us:>10.1f}{speed:>10.0f}{share:>10.2f}" + "".join(f"{one:>10.2f}" for one in ratios)
                print(f"{rows:>6}{columns:>9}  {str(dtype)[6:]:9}{name:18}{numbers}{bad:>10}", flush=True)
                if place == "cuda" and rows >= 8192 and share < GOALS[name.split(",")[0]]:
                    missed.append(f"{rows} x {columns} {dtype} {name}: {share:.2f}")
            del case
    for line in missed:
        print(f"# below its goal ({GOALS}): {line}")
    print(f"# wrong rows: {wrong}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
