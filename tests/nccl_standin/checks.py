"""What tests/jobs/test_nccl_standin.py runs on ranks: the stand-in through CuPy's own binding, on host memory.

Every rank runs every check; after each the ranks compare what they found, and rank 0 prints it. The status is the
number of checks that failed on any rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import nccl_standin

standin = nccl_standin.load()

from cupy.cuda import nccl  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
LAST = SIZE - 1
TYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16, torch.float32),
    *(torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
)  # by NCCL's codes
SUM, PROD, MAX, MIN, AVG = range(5)
NAMES = ("sum", "prod", "max", "min", "avg")
SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(2, 7)
F32 = TYPES.index(torch.float32)
SOON = "0.3"  # seconds until a wait that must fail does

checks: list[Callable[[], None]] = []
kept: list[nccl.NcclCommunicator] = []  # until all ranks have ended the check: peers notice that one is destroyed


def check(function: Callable[[], None]) -> Callable[[], None]:
    checks.append(function)
    return function


def fresh() -> nccl.NcclCommunicator:
    identity = WORLD.bcast(nccl.get_unique_id() if RANK == 0 else None)
    kept.append(nccl.NcclCommunicator(SIZE, identity, RANK))
    return kept[-1]


@contextlib.contextmanager
def planted(here: bool = True, **variables: str) -> Iterator[None]:
    """NCCL_STANDIN_<name> set to its value, on the ranks where ``here`` is true."""
    names = {f"NCCL_STANDIN_{name}": value for name, value in variables.items()} if here else {}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


@contextlib.contextmanager
def fails(status: int, *words: str) -> Iterator[None]:
    """The block raises NcclError with this status, and what the library wrote contains the words."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        got = None
        try:
            yield
        except nccl.NcclError as error:
            got = error.status
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode()
    assert got == status, f"status {got}, expected {status}; it wrote: {text}"
    assert len(text.splitlines()) == 1 or not words, f"not one line: {text}"
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"


def abort_once_in_a_call(comm: nccl.NcclCommunicator, seconds: float) -> threading.Thread:
    """Starts a thread that aborts this long after the next call with data."""
    before = len(standin.data_calls())

    def work() -> None:
        while len(standin.data_calls()) == before:
            time.sleep(0.005)
        time.sleep(seconds)
        comm.abort()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def equal(got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    assert got.dtype == expected.dtype
    assert raw(got) == raw(expected), f"{what}: got {got}, expected {expected}"


def values(code: int, count: int, rank: int) -> torch.Tensor:
    """Random, another for every rank. Small enough for products of four in fp8; integers use all their bits."""
    generator = np.random.default_rng([code, count, rank])
    dtype = TYPES[code]
    if dtype.is_floating_point:
        floats = generator.uniform(0.3, 4, count) * generator.choice([-1, 1], count)
        return torch.from_numpy(floats).to(dtype)
    numpy_type = np.dtype(str(dtype).removeprefix("torch."))
    return torch.from_numpy(np.frombuffer(generator.bytes(count * numpy_type.itemsize), numpy_type).copy())


def step(a: torch.Tensor, b: torch.Tensor, reduction: int) -> torch.Tensor:
    """One pairwise step, rounded as NCCL rounds it. Not for AVG, nor for NaN."""
    if not a.dtype.is_floating_point:
        x, y = a.numpy(), b.numpy()
        with np.errstate(over="ignore"):
            return torch.from_numpy((np.add, np.multiply, np.maximum, np.minimum)[reduction](x, y))
    operation = (torch.add, torch.mul, torch.maximum, torch.minimum)[reduction]
    if a.dtype in (torch.float32, torch.float64):
        return operation(a, b)
    # fp16 and bf16 are exact enough in float32 that rounding twice is rounding once; fp8 goes through fp16
    between = torch.float16 if a.dtype.itemsize == 1 else a.dtype
    return operation(a.float(), b.float()).to(between).to(a.dtype)


def reduced(parts: list[torch.Tensor], reduction: int, post: bool = False) -> torch.Tensor:
    """What a reduction of these tensors, in their order, must give to the bit."""
    dtype, n = parts[0].dtype, len(parts)
    before = reduction == AVG and dtype.is_floating_point and not post
    if reduction == AVG and dtype.is_floating_point:
        scale = torch.tensor(1.0 / n, dtype=torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)
    if before:
        parts = [step(part, scale, PROD) for part in parts]
    total = parts[0].clone()
    for part in parts[1:]:
        total = step(total, part, SUM if reduction == AVG else reduction)
    if reduction != AVG or before:
        return total
    if dtype.is_floating_point:
        return step(total, scale, PROD)
    wide = total.numpy()
    quotients = [abs(int(x)) // n * (1 if x >= 0 else -1) for x in wide]  # towards zero
    return torch.from_numpy(np.array(quotients, wide.dtype))


def filled_like(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory of the same type that holds something else."""
    return torch.full((int(np.prod(shape)) * tensor.itemsize,), 0x2A, dtype=torch.uint8).view(tensor.dtype).view(shape)


# --- Values ----------------------------------------------------------------------------------------------------------


@check
def every_reduction_of_every_type() -> None:
    comm, count, root = fresh(), 61, LAST
    for code in range(len(TYPES)):
        for reduction in range(5):
            what = f"{TYPES[code]} {NAMES[reduction]}"
            all_values = [values(code, SIZE * count, rank) for rank in range(SIZE)]
            expected, mine = reduced(all_values, reduction), all_values[RANK].clone()
            blocks = expected.view(SIZE, count)

            output = filled_like(mine, SIZE * count)
            comm.allReduce(mine.data_ptr(), output.data_ptr(), SIZE * count, code, reduction, 0)
            equal(output, expected, f"all-reduce {what}")
            equal(mine, all_values[RANK], f"input of all-reduce {what}")

            output = filled_like(mine, SIZE * count)
            comm.reduce(mine.data_ptr(), output.data_ptr(), SIZE * count, code, reduction, root, 0)
            equal(output, expected if root == RANK else filled_like(mine, SIZE * count), f"reduce {what}")

            output = filled_like(mine, count)
            comm.reduceScatter(mine.data_ptr(), output.data_ptr(), count, code, reduction, 0)
            equal(output, blocks[RANK], f"reduce-scatter {what}")

            place = mine.data_ptr() + RANK * count * mine.itemsize  # in place, then all-reduce in place
            comm.reduceScatter(mine.data_ptr(), place, count, code, reduction, 0)
            equal(mine.view(SIZE, count)[RANK], blocks[RANK], f"reduce-scatter in place {what}")
            mine = all_values[RANK].clone()
            comm.allReduce(mine.data_ptr(), mine.data_ptr(), SIZE * count, code, reduction, 0)
            equal(mine, expected, f"all-reduce in place {what}")
    with planted(AVG="post"):
        for code in range(len(TYPES)):
            all_values = [values(code, count, rank) for rank in range(SIZE)]
            comm.allReduce(all_values[RANK].data_ptr(), output.data_ptr(), 0, code, AVG, 0)
            output = filled_like(all_values[0], count)
            comm.allReduce(all_values[RANK].data_ptr(), output.data_ptr(), count, code, AVG, 0)
            equal(output, reduced(all_values, AVG, post=True), f"avg afterwards {TYPES[code]}")


@check
def rounding_at_every_step() -> None:
    """In bf16 256 + 1 is 256, so adding ones one by one stays there; fp16 likewise at 2048; fp8 saturates."""
    comm = fresh()
    for dtype, start in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        x = torch.tensor([start if RANK == 0 else 1.0], dtype=dtype)
        comm.allReduce(x.data_ptr(), x.data_ptr(), 1, TYPES.index(dtype), SUM, 0)
        equal(x, torch.tensor([start], dtype=dtype))
    for dtype, top in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        x = torch.tensor([top, -top, float("nan")], dtype=dtype)
        comm.allReduce(x.data_ptr(), x.data_ptr(), 3, TYPES.index(dtype), SUM, 0)
        assert x.float()[:2].tolist() == [top, -top], x
        assert x.float()[2].isnan()
    x = torch.tensor([60000.0, -60000.0], dtype=torch.float16)
    comm.allReduce(x.data_ptr(), x.data_ptr(), 2, TYPES.index(torch.float16), SUM, 0)
    assert x.tolist() == [float("inf"), float("-inf")], x


@check
def every_bit_pattern_of_small_floats() -> None:
    """x + 0, with x all numbers of the type: the conversions are exact, subnormal numbers and infinities included."""
    comm = fresh()
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        bits = 8 * dtype.itemsize
        integers = torch.arange(2**bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.uint16)
        numbers = integers.view(dtype)
        x = numbers.clone() if RANK == 0 else torch.zeros(2**bits, dtype=dtype)
        comm.allReduce(x.data_ptr(), x.data_ptr(), 2**bits, TYPES.index(dtype), SUM, 0)
        expected = numbers.float() + 0.0  # -0 + 0 is 0
        if dtype == torch.float8_e5m2:
            expected = expected.nan_to_num(nan=float("nan"), posinf=57344.0, neginf=-57344.0)
        assert torch.equal(x.float().isnan(), expected.isnan()), dtype
        equal(x.float().nan_to_num(), expected.nan_to_num(), str(dtype))


@check
def nan_infinity_and_signed_zero() -> None:
    comm = fresh()
    nan, inf = float("nan"), float("inf")
    # columns: NaN here and there, NaN everywhere, infinities, zeros of both signs
    mine = [nan, nan, inf, -inf, -0.0] if RANK == 0 else [float(RANK), nan, 1.0, 1.0, 0.0]
    for code, dtype in enumerate(TYPES):
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            continue
        for reduction, expected in (
            (MAX, [float(LAST), nan, inf, 1.0, 0.0]),
            (MIN, [1.0, nan, 1.0, -inf, -0.0]),
            (SUM, [nan, nan, inf, -inf, 0.0]),
        ):
            x = torch.tensor(mine, dtype=dtype)
            comm.allReduce(x.data_ptr(), x.data_ptr(), 5, code, reduction, 0)
            got, wanted = x.tolist(), torch.tensor(expected, dtype=dtype).tolist()
            assert str(got) == str(wanted), f"{dtype} {NAMES[reduction]}: got {got}, expected {wanted}"


@check
def integers_wrap_and_average_towards_zero() -> None:
    comm = fresh()
    for code, dtype in enumerate(TYPES[:6]):
        limits = torch.iinfo(dtype)
        x = torch.tensor([limits.max, limits.max], dtype=dtype)
        comm.allReduce(x.data_ptr(), x.data_ptr(), 2, code, SUM, 0)
        bits = 2**limits.bits
        total = SIZE * limits.max % bits
        assert x.tolist() == [total - bits if total > limits.max else total] * 2, (dtype, x)
        if limits.min < 0:
            x = torch.tensor([-1 if RANK else -SIZE, 1 if RANK else SIZE], dtype=dtype)  # 2 - 1/n
            comm.allReduce(x.data_ptr(), x.data_ptr(), 2, code, AVG, 0)
            assert x.tolist() == [-1, 1], (dtype, x)


@check
def copies_of_every_type() -> None:
    comm, count = fresh(), 77
    for code in range(len(TYPES)):
        all_values = [values(code, count, rank) for rank in range(SIZE)]
        mine = all_values[RANK].clone()
        expected = torch.cat([v.view(torch.uint8) for v in all_values]).view(TYPES[code])
        output = filled_like(mine, SIZE * count)
        comm.allGather(mine.data_ptr(), output.data_ptr(), count, code, 0)
        equal(output, expected, f"all-gather {TYPES[code]}")
        output = filled_like(mine, SIZE * count)
        place = output.data_ptr() + RANK * count * mine.itemsize
        output.view(torch.uint8).view(SIZE, -1)[RANK] = mine.view(torch.uint8)
        comm.allGather(place, output.data_ptr(), count, code, 0)
        equal(output, expected, f"all-gather in place {TYPES[code]}")
        for root in range(SIZE):
            output = filled_like(mine, count)
            comm.broadcast(mine.data_ptr() if root == RANK else 0, output.data_ptr(), count, code, root, 0)
            equal(output, all_values[root], f"broadcast {TYPES[code]} from {root}")
            output = mine.clone()
            comm.bcast(output.data_ptr(), count, code, root, 0)
            equal(output, all_values[root], f"bcast {TYPES[code]} from {root}")


@check
def long_tensors() -> None:
    """Longer than any buffer of the library, and not a multiple of one."""
    comm, count = fresh(), 200_003
    index = torch.arange(count, dtype=torch.float64)
    x = (index % 1000 + RANK).float()
    y = torch.zeros_like(x)
    comm.allReduce(x.data_ptr(), y.data_ptr(), count, F32, SUM, 0)
    equal(y, (SIZE * (index % 1000) + SIZE * LAST / 2).float())
    gathered = torch.zeros(SIZE, count)
    comm.allGather(x.data_ptr(), gathered.data_ptr(), count, F32, 0)
    equal(gathered, torch.stack([(index % 1000 + rank).float() for rank in range(SIZE)]))
    comm.broadcast(x.data_ptr(), y.data_ptr(), count, F32, LAST, 0)
    equal(y, gathered[LAST])
    comm.reduceScatter(gathered.data_ptr(), y.data_ptr(), count, F32, MAX, 0)
    equal(y, gathered[RANK])
    comm.reduce(x.data_ptr(), y.data_ptr(), count, F32, MIN, 0, 0)  # rank 0's own are the least; elsewhere y stays
    equal(y, gathered[RANK])
    small = torch.full((count,), RANK + 1, dtype=torch.uint8)
    comm.allReduce(small.data_ptr(), small.data_ptr(), count, TYPES.index(torch.uint8), SUM, 0)
    assert (small == SIZE * (SIZE + 1) // 2).all()


@check
def nothing_to_send() -> None:
    comm = fresh()
    for code in (0, F32):
        comm.allReduce(0, 0, 0, code, SUM, 0)
        comm.reduce(0, 0, 0, code, SUM, 0, 0)
        comm.broadcast(0, 0, 0, code, LAST, 0)
        comm.allGather(0, 0, 0, code, 0)
        comm.reduceScatter(0, 0, 0, code, AVG, 0)


# --- Groups ----------------------------------------------------------------------------------------------------------


@check
def grouped_all_to_all() -> None:
    """Uneven, some empty, some longer than the way between two ranks holds; to itself too; sends before receives."""
    comm = fresh()

    def count(source: int, target: int) -> int:
        return (source + 2 * target) % 5 * 11_003

    for turn in (1.0, 2.0):  # the second begins in the middle of what holds the bytes on their way
        inputs = [torch.full((count(RANK, peer),), turn + 100 * RANK + 10 * peer) for peer in range(SIZE)]
        outputs = [torch.zeros(count(peer, RANK)) for peer in range(SIZE)]
        nccl.groupStart()
        try:
            for peer in range(SIZE):
                comm.send(inputs[peer].data_ptr(), count(RANK, peer), F32, peer, 0)
            nccl.groupStart()
            try:
                for peer in reversed(range(SIZE)):
                    comm.recv(outputs[peer].data_ptr(), count(peer, RANK), F32, peer, 0)
            finally:
                nccl.groupEnd()
            assert not any(output.any() for output in outputs), "issued before the outermost end"
        finally:
            nccl.groupEnd()
        for peer in range(SIZE):
            equal(outputs[peer], torch.full((count(peer, RANK),), turn + 100 * peer + 10 * RANK))


@check
def messages_of_one_pair_keep_their_order() -> None:
    comm, right, left = fresh(), (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent = [torch.full((i,), float(i + 10 * RANK)) for i in (3, 1, 2)]
    got = [torch.zeros(i) for i in (3, 1, 2)]
    nccl.groupStart()
    for tensor in got:
        comm.recv(tensor.data_ptr(), tensor.numel(), F32, left, 0)
    for tensor in sent:
        comm.send(tensor.data_ptr(), tensor.numel(), F32, right, 0)
    nccl.groupEnd()
    for tensor, i in zip(got, (3, 1, 2), strict=True):
        equal(tensor, torch.full((i,), float(i + 10 * left)))
    x = torch.full((50_000,), float(RANK))
    if RANK == 0:  # outside a group
        comm.send(x.data_ptr(), 50_000, F32, 1, 0)
    elif RANK == 1:
        comm.recv(x.data_ptr(), 50_000, F32, 0, 0)
        assert (x == 0).all()


@check
def groups_of_many_calls() -> None:
    """Collectives in order, messages between them, two communicators in another order on every other rank."""
    comms = [fresh(), fresh()]
    tensors = [torch.ones(1000), torch.ones(1000)]
    mine, received = torch.full((1000,), float(RANK)), torch.zeros(SIZE, 1000)
    nccl.groupStart()
    for which in (0, 1) if RANK % 2 else (1, 0):
        comm, pointer = comms[which], tensors[which].data_ptr()
        comm.allReduce(pointer, pointer, 1000, F32, SUM, 0)
        if which == 0:
            comm.send(mine.data_ptr(), 1000, F32, 0, 0)
        comm.allReduce(pointer, pointer, 1000, F32, SUM, 0)
        if which == 0 and RANK == 0:
            for peer in range(SIZE):
                comm.recv(received[peer].data_ptr(), 1000, F32, peer, 0)
    nccl.groupEnd()
    assert all((tensor == SIZE**2).all() for tensor in tensors)
    if RANK == 0:
        equal(received, torch.arange(SIZE).float()[:, None].expand(-1, 1000))


# --- Communicators ---------------------------------------------------------------------------------------------------


def ranks_of(comm: nccl.NcclCommunicator) -> list[int]:
    """The world's ranks behind a communicator's, which the communicator has to tell by itself."""
    mine, all_of_them = torch.tensor([RANK]), torch.zeros(comm.size(), dtype=torch.int64)
    comm.allGather(mine.data_ptr(), all_of_them.data_ptr(), 1, TYPES.index(torch.int64), 0)
    return all_of_them.tolist()


@check
def what_a_communicator_knows() -> None:
    with planted(DEVICE=str(RANK + 3)):
        comm = fresh()
    assert (comm.size(), comm.rank_id(), comm.device_id()) == (SIZE, RANK, RANK + 3)
    comm.check_async_error()
    [alone] = nccl.NcclCommunicator.initAll([7])
    assert (alone.size(), alone.rank_id(), alone.device_id()) == (1, 0, 7)
    assert ranks_of(alone) == [RANK]
    with fails(INVALID_ARGUMENT, "2 devices in one process"):
        nccl.NcclCommunicator.initAll(2)


@check
def split_by_colour_and_key() -> None:
    world = fresh()
    backwards = world.commSplit(0, -RANK)
    assert ranks_of(backwards) == list(reversed(range(SIZE)))
    assert backwards.rank_id() == LAST - RANK
    parity = world.commSplit(RANK % 2, 0)  # the same key: in the order of the parent
    assert ranks_of(parity) == list(range(RANK % 2, SIZE, 2))
    rest = world.commSplit(-1 if RANK == 0 else 3, RANK)
    assert (rest is None) == (RANK == 0)
    if rest is not None:
        assert ranks_of(rest) == list(range(1, SIZE))
        again = rest.commSplit(0, 0)
        assert ranks_of(again) == list(range(1, SIZE))
    assert ranks_of(world) == list(range(SIZE))


@check
def many_communicators_leave_nothing() -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("nccl_standin")
        return len(os.listdir("/proc/self/fd")), maps - str(standin.path).count("nccl_standin") * loaded

    loaded = Path("/proc/self/maps").read_text().count(str(standin.path))
    world = fresh()
    before = held()
    kept = [world.commSplit(0, 0) for _ in range(100)]
    assert ranks_of(kept[-1]) == list(range(SIZE))
    assert held() == (before[0], before[1] + 100)
    for comm in kept:
        comm.destroy()
    for _ in range(50):
        fresh().destroy()
    assert held() == before
    assert not [name for name in os.listdir("/dev/shm") if "standin" in name]


@check
def two_threads_with_a_communicator_each() -> None:
    comms, wrong = [fresh(), fresh()], []

    def work(which: int) -> None:
        for turn in range(100):
            x = torch.full((which * 20_000 + 3,), float(turn))
            comms[which].allReduce(x.data_ptr(), x.data_ptr(), x.numel(), F32, SUM, 0)
            if not (x == SIZE * turn).all():
                wrong.append((which, turn))

    thread = threading.Thread(target=work, args=(1,))
    thread.start()
    work(0)
    thread.join()
    assert not wrong


# --- Failures --------------------------------------------------------------------------------------------------------


@check
def ranks_that_disagree() -> None:
    """Whatever differs: every rank gets the error, and one line that names both sides."""
    x, y = torch.ones(100), torch.zeros(100)
    a, b = x.data_ptr(), y.data_ptr()
    agreed = "rank 0 called AllReduce(count 10, float32, sum)"
    for call, what in (
        (lambda comm: comm.allReduce(a, b, 11, F32, SUM, 0), "AllReduce(count 11, float32, sum)"),
        (lambda comm: comm.allReduce(a, b, 0, F32, SUM, 0), "AllReduce(count 0, float32, sum)"),
        (lambda comm: comm.allReduce(a, b, 10, 2, SUM, 0), "AllReduce(count 10, int32, sum)"),
        (lambda comm: comm.allReduce(a, b, 10, F32, AVG, 0), "AllReduce(count 10, float32, avg)"),
        (lambda comm: comm.reduce(a, b, 10, F32, SUM, 0, 0), "Reduce(count 10, float32, sum, root 0)"),
        (lambda comm: comm.commSplit(0, 0), "CommSplit"),
    ):
        comm = fresh()
        with fails(INVALID_USAGE, agreed, f"rank {LAST} called {what}"):
            if RANK == LAST:
                call(comm)
            else:
                comm.allReduce(a, b, 10, F32, SUM, 0)
        with fails(INVALID_USAGE):
            comm.check_async_error()
        with fails(INVALID_USAGE, "AllReduce: the communicator has failed before"):
            comm.allReduce(a, b, 10, F32, SUM, 0)
    with fails(INVALID_USAGE, "rank 0 called Broadcast(count 1, float32, root 0), rank 1 called", "root 1)"):
        fresh().broadcast(a, b, 1, F32, min(RANK, 1), 0)


@check
def messages_that_disagree() -> None:
    x = torch.ones(100)
    for count, code, what in ((4, F32, "Recv(count 4, float32)"), (5, 2, "Recv(count 5, int32)")):
        comm = fresh()
        if RANK < 2:
            with fails(INVALID_USAGE, f"rank 0 called Send(count 5, float32), rank 1 called {what}"):
                if RANK == 0:
                    comm.send(x.data_ptr(), 5, F32, 1, 0)
                else:
                    comm.recv(x.data_ptr(), count, code, 0, 0)
        WORLD.Barrier()


@check
def a_rank_that_does_not_come() -> None:
    x = torch.ones(4)
    late = "rank 0 has not come to collective 2, AllReduce(count 4, float32, sum)"
    for waits_in, seconds, more in (
        ("nothing", SOON, "its last was AllReduce(count 4, float32, sum)"),
        ("send", "1", "it waits in Send(count 2, float32) to rank 1"),
    ):
        comm = fresh()
        comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)
        WORLD.Barrier()
        start = time.monotonic()
        with planted(TIMEOUT=seconds if RANK == 1 else "20"):
            if RANK == 1:
                with fails(REMOTE_ERROR, f"after {seconds} s, {late}; {more}"):
                    comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)
            elif RANK > 1:
                with fails(REMOTE_ERROR, "AllReduce(count 4, float32, sum) ends, for rank 1 has failed"):
                    comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)
            elif waits_in == "send":
                with fails(REMOTE_ERROR, "Send(count 2, float32) ends, for rank 1 has failed"):
                    comm.send(x.data_ptr(), 2, F32, 1, 0)
        assert time.monotonic() - start < 10
        if RANK:
            with fails(REMOTE_ERROR):
                comm.check_async_error()
        WORLD.Barrier()


@check
def a_message_that_is_not_received() -> None:
    comm, x = fresh(), torch.ones(4)
    if RANK == 1:
        with planted(TIMEOUT=SOON), fails(REMOTE_ERROR, "rank 0 has not called its side of Send(count 4, float32)"):
            comm.send(x.data_ptr(), 4, F32, 0, 0)


@check
def abort_wakes_this_rank_and_the_others() -> None:
    comm, x = fresh(), torch.ones(4)
    start = time.monotonic()
    if RANK == 0:
        thread = abort_once_in_a_call(comm, 0.1)
        with fails(INTERNAL_ERROR, "AllReduce(count 4, float32, sum) ends, for this rank has aborted the communicator"):
            comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)
        thread.join()
    else:
        with fails(REMOTE_ERROR, "Recv(count 4, float32) ends, for rank 0 has aborted its communicator"):
            comm.recv(x.data_ptr(), 4, F32, 0, 0)
        comm.abort()
    assert time.monotonic() - start < 10


@check
def a_peer_that_has_destroyed_its_communicator() -> None:
    comm, x = fresh(), torch.ones(4)
    comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)
    if RANK == 0:
        comm.destroy()
    elif RANK == 1:
        with fails(REMOTE_ERROR, "Recv(count 4, float32) waits for rank 0, which has destroyed its communicator"):
            comm.recv(x.data_ptr(), 4, F32, 0, 0)


@check
def wrong_arguments() -> None:
    comm, x = fresh(), torch.zeros(SIZE * 8)
    a = x.data_ptr()
    for words, call in (
        ("AllReduce: no such data type (count 1, type 12", lambda: comm.allReduce(a, a, 1, 12, SUM, 0)),
        ("AllReduce: no such reduction", lambda: comm.allReduce(a, a, 1, F32, 5, 0)),
        ("Broadcast: no such rank", lambda: comm.broadcast(a, a, 1, F32, SIZE, 0)),
        ("Send: no such rank", lambda: comm.send(a, 1, F32, -1, 0)),
        ("AllReduce: a null pointer", lambda: comm.allReduce(a, 0, 1, F32, SUM, 0)),
        ("Recv: a null pointer", lambda: comm.recv(0, 1, F32, 0, 0)),
        ("AllReduce: a misaligned pointer", lambda: comm.allReduce(a + 2, a + 2, 1, F32, SUM, 0)),
        ("Send: a misaligned pointer", lambda: comm.send(a + 1, 1, F32, 0, 0)),
        ("AllReduce: buffers that overlap", lambda: comm.allReduce(a, a + 4, 2, F32, SUM, 0)),
        ("AllGather: buffers that overlap", lambda: comm.allGather(a + 4 * 2 * ((RANK + 1) % SIZE), a, 2, F32, 0)),
        ("ReduceScatter: buffers that overlap", lambda: comm.reduceScatter(a, a + 4, 8, F32, SUM, 0)),
    ):
        with fails(INVALID_ARGUMENT, words):
            call()
    with fails(INVALID_USAGE, "GroupEnd without GroupStart"):
        nccl.groupEnd()
    nccl.groupStart()
    comm.allReduce(a, a, 1, F32, SUM, 0)
    with fails(INVALID_ARGUMENT, "no such reduction"):
        comm.allReduce(a, a, 1, F32, 5, 0)
    with fails(INVALID_ARGUMENT, "GroupEnd: a call of the group failed (error 4), none is issued"):
        nccl.groupEnd()
    comm.allReduce(a, a, SIZE * 8, F32, SUM, 0)  # nothing of all that has reached the others
    assert (x == 0).all()
    with fails(INVALID_ARGUMENT, "not a unique id"):
        nccl.NcclCommunicator(SIZE, bytes(128), RANK)


@check
def ranks_that_disagree_on_initialisation() -> None:
    identity = WORLD.bcast(nccl.get_unique_id() if RANK == 0 else None)
    status = 0
    with planted(TIMEOUT=SOON):
        # The last rank counts one rank more. Which of them notices first is open, and for one that comes when the
        # others have given up the unique id stands for nothing any more; but none succeeds.
        try:
            nccl.NcclCommunicator(SIZE + (RANK == LAST), identity, RANK)
        except nccl.NcclError as error:
            status = error.status
    assert status in (INVALID_USAGE, REMOTE_ERROR, SYSTEM_ERROR), status


# --- Planted failures ------------------------------------------------------------------------------------------------


@check
def planted_unique_id() -> None:
    with planted(RANK == 0, FAIL_UNIQUE_ID=str(SYSTEM_ERROR)):
        if RANK == 0:
            with fails(SYSTEM_ERROR, "GetUniqueId: planted error 2"):
                nccl.get_unique_id()
        else:
            nccl.get_unique_id()


@check
def planted_error_of_initialisation() -> None:
    identity = WORLD.bcast(nccl.get_unique_id() if RANK == 0 else None)
    with planted(RANK == 1, FAIL_INIT=str(INTERNAL_ERROR)), planted(TIMEOUT=SOON):
        status, words = (INTERNAL_ERROR, "planted error 3") if RANK == 1 else (REMOTE_ERROR, "")
        with fails(status, words):
            nccl.NcclCommunicator(SIZE, identity, RANK)
    if RANK == 1:
        with planted(FAIL_INIT="7"):
            try:
                nccl.NcclCommunicator(SIZE, identity, RANK)
            except KeyError:  # CuPy has no name for this result
                pass
            else:
                raise AssertionError("no error")


@check
def planted_initialisation_that_blocks() -> None:
    """Shortly here; the other threads run meanwhile."""
    identity = WORLD.bcast(nccl.get_unique_id() if RANK == 0 else None)
    made, ticks = [], 0
    with planted(RANK == LAST, BLOCK_INIT="0.3"):
        thread = threading.Thread(target=lambda: made.append(nccl.NcclCommunicator(SIZE, identity, RANK)))
        start = time.monotonic()
        thread.start()
        while thread.is_alive():
            time.sleep(0.01)
            ticks += 1
        assert time.monotonic() - start > 0.25
    assert ticks > 5
    assert ranks_of(made[0]) == list(range(SIZE))


@check
def planted_asynchronous_error() -> None:
    comm, x = fresh(), torch.ones(4)
    standin.clear()
    with planted(RANK == LAST, ASYNC_ERROR=f"2:{REMOTE_ERROR}"):
        for _ in range(2):
            comm.check_async_error()
            comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)
        assert (x == SIZE**2).all()
        if RANK == LAST:
            with fails(REMOTE_ERROR):
                comm.check_async_error()
            with fails(REMOTE_ERROR, "Bcast: the communicator has failed before (error 6)"):
                comm.bcast(x.data_ptr(), 4, F32, 0, 0)
            comm.abort()
        else:
            comm.check_async_error()
            with fails(REMOTE_ERROR):
                comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)


@check
def planted_rank_that_never_arrives() -> None:
    comm, x = fresh(), torch.ones(4)
    standin.clear()
    with planted(RANK == 1, NEVER_ARRIVE="2"):
        comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)
        if RANK == 1:
            thread = abort_once_in_a_call(comm, 0.6)
            start = time.monotonic()
            with fails(INTERNAL_ERROR):
                comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)
            assert time.monotonic() - start > 0.5
            thread.join()
        else:
            with planted(TIMEOUT=SOON), fails(REMOTE_ERROR):
                comm.allReduce(x.data_ptr(), x.data_ptr(), 4, F32, SUM, 0)


@check
def planted_version() -> None:
    assert nccl.get_version() == nccl_standin.VERSION
    with planted(VERSION="22806"):
        assert nccl.get_version() == 22806


# --- The log and the asynchronous mode -------------------------------------------------------------------------------


@check
def the_log() -> None:
    comm, x, y = fresh(), torch.ones(SIZE * 8), torch.ones(SIZE * 8)
    a, b = x.data_ptr(), y.data_ptr()
    standin.clear()
    comm.reduce(a, b, 8, F32, MAX, LAST, 111)
    nccl.groupStart()
    comm.send(a, 3, F32, RANK, 222)
    comm.recv(b, 3, F32, RANK, 333)
    nccl.groupEnd()
    comm.allGather(a, b, 8, F32, 0)
    comm.destroy()
    calls = standin.calls()
    assert [call.name for call in calls] == [
        "Reduce",
        "GroupStart",
        "Send",
        "Recv",
        "GroupEnd",
        "AllGather",
        "CommDestroy",
    ]
    reduce, _, send, receive, _, gather, destroy = calls
    assert (reduce.send, reduce.receive, reduce.count, reduce.type, reduce.reduction, reduce.root, reduce.stream) == (
        *(a, b, 8, F32, MAX, LAST, 111),
    )
    assert (send.send, send.receive, send.root, send.stream, send.reduction) == (a, 0, RANK, 222, -1)
    assert (receive.send, receive.receive, receive.root, receive.stream) == (0, b, RANK, 333)
    assert (reduce.group, gather.group) == (0, 0)
    assert send.group == receive.group > 0
    assert gather.root == -1
    assert all((c.communicator, c.rank, c.size) == (destroy.communicator, RANK, SIZE) for c in (reduce, send, gather))
    assert len(set(WORLD.allgather(destroy.communicator))) == 1
    assert standin.data_calls() == [reduce, send, receive, gather]
    assert standin.calls("Send", "CommDestroy") == [send, destroy]


@check
def asynchronous_calls() -> None:
    """Nothing happens while held; then in the order of each stream, and other streams do not wait."""
    comms = [fresh(), fresh()]
    x, y = torch.ones(1000), torch.ones(1000)
    standin.asynchronous(True)
    try:
        standin.hold(True)
        for comm, tensor, stream in [(comms[0], x, 16), (comms[1], y, 32)][:: 1 if RANK % 2 else -1]:
            comm.allReduce(tensor.data_ptr(), tensor.data_ptr(), 1000, F32, SUM, stream)
            comm.allReduce(tensor.data_ptr(), tensor.data_ptr(), 1000, F32, SUM, stream)
        time.sleep(0.05)
        assert (x == 1).all()
        assert (standin.pending(16), standin.pending(48), standin.pending()) == (2, 0, 4)
        standin.hold(False)
        standin.wait(16)
        assert (x == SIZE**2).all()
        standin.wait()
        assert (y == SIZE**2).all()
        assert standin.pending() == 0

        WORLD.Barrier()
        if RANK:  # rank 0 comes later: with a real GPU the host would go on, too
            comms[0].allReduce(x.data_ptr(), x.data_ptr(), 1000, F32, SUM, 16)
            comms[1].allGather(0, 0, 0, F32, 32)
        WORLD.Barrier()
        if not RANK:
            comms[1].allGather(0, 0, 0, F32, 32)
            comms[0].allReduce(x.data_ptr(), x.data_ptr(), 1000, F32, SUM, 16)
        standin.wait()
        assert (x == SIZE**3).all()
        comms[0].check_async_error()
    finally:
        standin.hold(False)
        standin.asynchronous(False)


@check
def asynchronous_failures() -> None:
    x = torch.ones(1000)
    standin.asynchronous(True)
    try:
        comm = fresh()  # in flight on all ranks but the first, when that aborts
        if RANK:
            comm.allReduce(x.data_ptr(), x.data_ptr(), 1000, F32, SUM, 16)
            assert standin.pending(16) == 1
        WORLD.Barrier()
        if RANK == 0:
            comm.abort()
        else:
            standin.wait(16)
            with fails(REMOTE_ERROR):
                comm.check_async_error()
        comm = fresh()  # aborted here while in flight here
        standin.clear()
        with planted(NEVER_ARRIVE="1"):
            comm.allReduce(x.data_ptr(), x.data_ptr(), 1000, F32, SUM, 16)
        comm.allReduce(x.data_ptr(), x.data_ptr(), 1000, F32, SUM, 16)
        assert standin.pending(16) == 2
        comm.abort()
        assert standin.pending(16) == 0
        WORLD.Barrier()
        comm = fresh()  # a disagreement
        comm.allReduce(x.data_ptr(), x.data_ptr(), 1000 - RANK, F32, SUM, 16)
        standin.wait(16)
        with fails(INVALID_USAGE):
            comm.check_async_error()
    finally:
        standin.asynchronous(False)
    assert (x == 1).all()


def main() -> int:
    faulthandler.dump_traceback_later(80, exit=True)
    os.environ["NCCL_STANDIN_TIMEOUT"] = "20"
    chosen = [function for function in checks if len(sys.argv) < 2 or function.__name__ in sys.argv[1:]]
    failed = 0
    for function in chosen:
        start = time.monotonic()
        problem = ""
        try:
            function()
        except BaseException:
            problem = traceback.format_exc()
        problems = WORLD.allgather(problem)
        kept.clear()
        if RANK == 0:
            verdict = "FAILED" if any(problems) else "passed"
            print(f"{verdict} {function.__name__} on {SIZE} ranks ({time.monotonic() - start:.2f} s)", flush=True)
            for rank, text in enumerate(problems):
                if text:
                    print(f"rank {rank}: {text}", flush=True)
        failed += any(problems)
    if RANK == 0:
        print(f"{len(chosen) - failed} of {len(chosen)} checks passed", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
