"""Asynchronous operations: Work, several in flight, dropped ones, timeouts, threads."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import torch
from support import Placed

import cupy_coll as cc


def test_work_of_every_operation(world, rank, size, expect):
    """A Work with all of torch's questions; result() and the future give the tensors that were written."""
    one = torch.ones(3)
    parts = [torch.zeros(3) for _ in range(size)]
    output, pieces = torch.zeros(3 * size), torch.ones(3 * size)
    calls = {
        "all_reduce": (lambda: cc.all_reduce(one, world, async_op=True), [one]),
        "broadcast": (lambda: cc.broadcast(one, world, async_op=True), None),
        "all_gather": (lambda: cc.all_gather(output, one, world, async_op=True), [output]),
        "reduce_scatter": (lambda: cc.reduce_scatter(one, pieces, world, async_op=True), [one]),
        "reduce": (lambda: cc.reduce(one, world, async_op=True), [one] if rank == 0 else None),
        "gather": (
            lambda: cc.gather(one, world, parts if rank == 0 else None, async_op=True),
            parts if rank == 0 else None,
        ),
        "scatter": (lambda: cc.scatter(one, world, parts if rank == 0 else None, async_op=True), [one]),
    }
    for label, (call, written) in calls.items():
        work = call()
        expect.that(isinstance(work, cc.Work), f"{label}: {work!r}")
        expect.that(isinstance(work, torch.distributed.Work), f"{label}: not torch's Work")
        expect(work.wait(), True, f"{label}: wait()")
        expect(work.wait(), True, f"{label}: a second wait()")
        expect(work.is_completed(), True, f"{label}: is_completed()")
        result, future = work.result(), work.get_future()
        expect.that(isinstance(future, torch.futures.Future) and future.done(), f"{label}: future")
        for values in (result, future.value()):
            expect.that(isinstance(values, list), f"{label}: {values!r} is not a list")
            if written is not None:
                expect([v.data_ptr() for v in values], [w.data_ptr() for w in written], f"{label}: result")


def test_completes_without_waiting(world, rank, size, share, expect):
    """is_completed() turns true by asking alone, and not before the last member has come."""
    tensor = torch.ones(5)
    work = cc.all_reduce(tensor, world, async_op=True) if rank else None
    share("all others have started")
    if work is not None:
        expect(work.is_completed(), False, "before rank 0 has started")
    share("they have looked")
    if work is None:
        work = cc.all_reduce(tensor, world, async_op=True)
    share("all have started")
    begin = time.monotonic()
    while not work.is_completed() and time.monotonic() - begin < 10:
        time.sleep(1e-4)
    expect(work.is_completed(), True, "after all have started")
    expect(tensor, torch.full((5,), float(size)))
    work.wait()


def test_the_call_does_not_wait(world, rank, size, share, expect):
    """An asynchronous call returns while the others have not called; so the test ends at all."""
    big = torch.full((200_000,), float(rank))
    works = []
    if rank != size - 1:
        works.append(cc.broadcast(big, world, src=size - 1, async_op=True))
    share("called")
    if rank == size - 1:
        works.append(cc.broadcast(big, world, src=size - 1, async_op=True))
    works[0].wait()
    expect(big, torch.full((200_000,), size - 1.0))


def test_many_in_flight_waited_in_any_order(group_of, rank, size, expect):
    """Several groups, several sizes; every rank waits in an order of its own."""
    started = []
    for turn in range(3):
        for ranks in group_of.several():
            group = group_of(ranks)
            if group is None:
                continue
            for count in (1, 1000, 70_000):
                tensor = torch.full((count,), rank + 1.0 + turn)
                right = float(sum(r + 1 + turn for r in ranks))
                started.append((cc.all_reduce(tensor, group, async_op=True), tensor, right, f"{ranks} {count}"))
                gathered = torch.zeros(group.size * count)
                work = cc.all_gather(gathered, torch.full((count,), float(rank)), group, async_op=True)
                whole = torch.tensor(ranks).float().repeat_interleave(count)
                started.append((work, gathered, whole, f"gather {ranks} {count}"))
    for work, tensor, right, label in started if rank % 2 else reversed(started):
        work.wait()
        right = right if isinstance(right, torch.Tensor) else torch.full_like(tensor, right)
        expect(tensor, right, label)


def test_async_and_sync_mixed(world, rank, size, expect):
    """A synchronous operation begun later ends although the earlier asynchronous one is waited for after it."""
    first, second = torch.full((50_000,), rank + 1.0), torch.full((3,), 1.0)
    work = cc.all_reduce(first, world, async_op=True)
    cc.all_reduce(second, world)
    cc.barrier()
    total = size * (size + 1) / 2
    expect(second, torch.full((3,), float(size)))
    work.wait()
    expect(first, torch.full((50_000,), total))


def test_dropped_works_complete(world, rank, size, share, expect):
    """Nobody waits, nobody keeps a handle or the tensors; later operations are not disturbed."""
    seen = torch.full((100_000,), 1.0)
    for _ in range(20):
        cc.all_reduce(torch.full((10_000,), float(rank)), world, async_op=True)
        cc.all_gather(torch.zeros(size * 1000), torch.ones(1000), world, async_op=True)
    cc.all_reduce(seen, world, async_op=True)
    gc.collect()
    cc.barrier()
    expect(seen, torch.full((100_000,), float(size)))  # in order: what was started before the barrier has ended
    after = torch.ones(2)
    cc.all_reduce(after, world)
    expect(after, torch.full((2,), float(size)))


def test_inputs_stay_alive(world, rank, size, expect):
    """The caller's last reference to an input may go before the operation has ended."""
    output = torch.zeros(size * 30_000)
    work = cc.all_gather(output, Placed(torch.full((30_000,), float(rank)), "strided").view, world, async_op=True)
    gc.collect()
    junk = [torch.full((30_000,), -1.0) for _ in range(20)]
    work.wait()
    del junk
    expect(output, torch.arange(float(size)).repeat_interleave(30_000))


def test_wait_with_a_timeout(group_of, share, expect):
    """The time given to one wait() is over: CommTimeoutError at that rank; the operation goes on."""
    group = group_of.of(2)
    if group is not None and group.rank == 0:
        tensor = torch.zeros(3)
        work = cc.recv(tensor, group.ranks[1], group, async_op=True)
        for timeout in (timedelta(milliseconds=100), 0.1):
            begin = time.monotonic()
            try:
                work.wait(timeout)
                expect.that(False, "wait() returned without a message")
            except cc.CommTimeoutError as error:
                expect.that("recv" in str(error), str(error))
            expect.that(0.05 < time.monotonic() - begin < 5, f"took {time.monotonic() - begin} s")
        expect(work.is_completed(), False)
        share("timed out")
        work.wait()
        expect(tensor, torch.full((3,), 5.0))
    else:
        share("timed out")
        if group is not None:
            cc.send(torch.full((3,), 5.0), group.ranks[0], group)


def test_from_other_threads(world, group_of, size, expect):
    """As autograd does it for CUDA tensors: operations of different groups, each called on a thread of its own."""
    groups = [world, group_of(range(size))]
    problems: list[object] = []

    def work_on(group):
        try:
            for _ in range(30):
                tensor = torch.ones(500)
                cc.all_reduce(tensor, group)
                if not torch.equal(tensor, torch.full((500,), float(size))):
                    problems.append(tensor)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work_on, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect(problems, [])


def test_future_callbacks(world, size, expect):
    tensor = torch.ones(2)
    future = cc.all_reduce(tensor, world, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / size)
    expect(halved.wait(), torch.ones(2))


def test_inference_tensors_outside_inference_mode(world, size, expect):
    """Tensors made in inference mode are written wherever the operation is called, goes on and ends."""
    with torch.inference_mode():
        made = [torch.ones(3), torch.ones(20_000), torch.ones(2, 3).t()]
        started = [torch.ones(3), torch.ones(20_000), torch.ones(2, 3).t()]
        works = [cc.all_reduce(tensor, world, async_op=True) for tensor in started]
        parts = torch.zeros(size)
        works.append(cc.all_gather(parts, torch.ones(1), world, async_op=True))
    for work in works:
        work.wait()
    for tensor in made:
        cc.all_reduce(tensor, world)
    usual = torch.ones(2, 3).t()
    version = usual._version
    with torch.inference_mode():
        cc.all_reduce(usual, world)
    expect.that(usual._version > version, "autograd does not know that the tensor was written")
    expect.that(not usual.is_inference(), "the usual tensor became one of inference mode")
    for tensor in (*made, *started, usual):
        expect(tensor.unique().tolist(), [float(size)], f"all_reduce of {list(tensor.shape)}")
    expect(parts.tolist(), [1.0] * size, "all_gather")
