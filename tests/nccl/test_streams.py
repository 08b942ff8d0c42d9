"""Which stream, which pointer, in which order: by the fake device's record, over the stand-in (which is not NCCL)."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from conftest import standin
from fake_device import CUPY_STREAM, TORCH_STREAM

import cupy_coll as cc
from cupy_coll import device


@pytest.fixture
def connected(fake, world):
    """The world's group, past its first operation."""
    cc.all_reduce(torch.ones(1), world)
    fake.take_log()
    standin.clear()
    fake._calls = 0
    return world


def test_the_tensors_own_pointer(fake, connected, size, expect):
    """Contiguous tensors are not copied, others come back right."""
    tensor, output, part = torch.ones(6), torch.zeros(size, 6), torch.zeros(6)
    cc.all_reduce(tensor, connected)
    cc.all_gather(output, tensor, connected)
    cc.reduce_scatter(part, output, connected)
    reduced, gathered, scattered = standin.data_calls()
    expect((reduced.send, reduced.receive), (tensor.data_ptr(), tensor.data_ptr()))
    expect((gathered.send, gathered.receive), (tensor.data_ptr(), output.data_ptr()))
    expect((scattered.send, scattered.receive), (output.data_ptr(), part.data_ptr()))
    standin.clear()
    fake._calls = 0
    memory = torch.zeros(3, 4)
    cc.all_reduce(memory.t().fill_(1), connected)
    expect(memory, torch.full((3, 4), float(size)))
    expect.that(standin.data_calls()[0].receive != memory.data_ptr(), "a transposed tensor was given as it is")


def test_synchronous_on_the_current_stream(fake, connected, expect):
    cc.all_reduce(torch.ones(3), connected)
    log = fake.take_log()
    expect([what for what, _, _ in log], ["on", "nccl", "record"])
    expect({stream for _, stream, _ in log}, {TORCH_STREAM})
    fake.stream = 0x300  # the program goes to another stream
    cc.all_reduce(torch.ones(3), connected)
    expect({stream for _, stream, _ in fake.take_log()}, {0x300})
    fake.stream = TORCH_STREAM


def test_asynchronous_after_an_event_of_the_current_stream(fake, connected, size, expect):
    tensor = torch.ones(3)
    work = cc.all_reduce(tensor, connected, async_op=True)
    (first, current, event), (second, side, waited), _, call, (last, end_stream, end) = fake.take_log()
    expect((first, current), ("record", TORCH_STREAM))
    expect((second, waited), ("wait", event))
    expect.that(side != TORCH_STREAM, "on the current stream")
    expect(call, ("nccl", side, "AllReduce"))
    expect((last, end_stream), ("record", side))
    work.wait()
    expect(fake.take_log(), [("wait", TORCH_STREAM, end)])
    expect(tensor, torch.full((3,), float(size)))
    again = cc.all_reduce(tensor, connected, async_op=True)
    expect(fake.take_log()[1][1], side, "the group's own stream is one")
    again.wait()


def test_the_host_does_not_wait(fake, connected, size, share, expect):
    """The call and wait() return while nothing has run; is_completed() tells."""
    standin.asynchronous(True)
    standin.hold(True)
    fake.holding = True
    tensor = torch.ones(5)
    work = cc.all_reduce(tensor, connected, async_op=True)
    expect(work.wait(), True)
    expect(work.is_completed(), False, "before it has run")
    expect(tensor, torch.ones(5), "not written yet")
    with pytest.raises(cc.CommTimeoutError, match="goes on"):
        work.wait(timeout=0.05)
    share("all have seen it")
    standin.hold(False)
    expect(work.wait(timeout=10), True)
    expect(work.is_completed(), True)
    expect(tensor, torch.full((5,), float(size)))


def test_a_dropped_work(fake, connected, size, share, expect):
    """Inputs and outputs live until the operation has ended; then they go."""
    standin.asynchronous(True)
    standin.hold(True)
    fake.holding = True
    source, output = torch.ones(1000), torch.zeros(size * 1000)
    alive = [weakref.ref(source), weakref.ref(output)]
    cc.all_gather(output, source, connected, async_op=True)
    del source, output
    gc.collect()
    expect.that(all(reference() is not None for reference in alive), "dropped while in flight")
    share("all have seen it")
    standin.hold(False)
    fake.synchronize()
    begin = time.monotonic()
    while any(reference() is not None for reference in alive) and time.monotonic() - begin < 5:
        time.sleep(0.02)  # the watchdog collects what has ended
    expect([reference() for reference in alive], [None, None], "kept after the end")


def test_synchronous_operations_hold_nothing(fake, connected, expect):
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor)
    cc.all_reduce(tensor, connected)
    del tensor
    expect(alive(), None)


def test_barrier_waits_on_the_host(fake, connected, expect):
    standin.asynchronous(True)
    transport = connected.transport_for(torch.ones(1))
    transport.barrier()
    expect(standin.pending(), 0)
    transport.barrier(async_op=True).wait()
    expect(standin.pending(), 0)


def test_cupy_runs_on_its_own_stream(fake, connected, expect):
    """What stands for a CuPy array goes to the stream that CuPy is on, and its Work makes that one wait."""
    tensor = device.mark_as_cupy(torch.ones(3))
    cc.all_reduce(tensor, connected)
    expect({stream for _, stream, _ in fake.take_log()}, {CUPY_STREAM})
    work = cc.all_reduce(tensor, connected, async_op=True)
    expect(fake.take_log()[0][1], CUPY_STREAM)
    work.wait()
    expect([stream for _, stream, _ in fake.take_log()], [CUPY_STREAM])


def test_capture(fake, connected, group_of, size, expect):
    """While a graph is captured everything is on the capturing stream, and nobody asks for events."""
    cc.all_reduce(torch.ones(3), connected)  # in flight, as far as the transport knows
    fake.take_log()
    fake.capturing = True
    work = cc.all_reduce(torch.ones(3), connected, async_op=True)
    cc.all_reduce(torch.ones(3), connected)
    work.wait()
    log = fake.take_log()
    expect([(what, stream) for what, stream, _ in log], [("on", TORCH_STREAM), ("nccl", TORCH_STREAM)] * 2)
    fake.capturing = False
    expect(work.is_completed(), True)
    fake.capturing = True
    unconnected = cc.CommContext().init_group(list(range(size)), "UNCONNECTED")
    with pytest.raises(cc.TransportError, match=r"all_reduce.*captured in a graph.*warm_up"):
        cc.all_reduce(torch.ones(3), unconnected)
    fake.capturing = False
    unconnected.warm_up()
    fake.capturing = True
    cc.all_reduce(torch.ones(3), unconnected)
    fake.capturing = False
    unconnected.close()


def test_the_watchdog_lets_captures_be(fake, connected, expect):
    begin = time.monotonic()
    while not fake.polite and time.monotonic() - begin < 5:
        time.sleep(0.02)
    expect(fake.polite, True)


def test_one_group_of_messages(fake, connected, size, rank, expect):
    """Exchanges are issued together: between two ranks each way, or all would wait for each other."""
    cc.all_to_all_uneven(torch.ones(size, 2), [1] * size, [1] * size, connected)
    names = [call.name for call in standin.calls()]
    expect(names, ["GroupStart", *["Send"] * size, *["Recv"] * size, "GroupEnd"])
    expect(len({call.group for call in standin.data_calls()}), 1)


def test_no_shortcut_at_size_one(fake, group_of, rank, size, expect):
    for member in range(size):
        alone = group_of([member])
        if alone is None:
            continue
        cc.all_reduce(torch.ones(2), alone)
        standin.clear()
        fake._calls = 0
        tensor, output = torch.arange(3.0), torch.zeros(3)
        cc.all_reduce(tensor, alone)
        cc.all_gather(output, tensor, alone)
        cc.gather(tensor, alone, [output], member)
        expect([call.name for call in standin.data_calls()], ["AllReduce", "AllGather", "Send", "Recv"])
        expect(output, torch.arange(3.0))


def test_sequence_counts_both_transports(fake, connected, expect):
    before = connected.sequence
    cc.all_reduce(torch.ones(2), connected)
    fake.enabled = False
    cc.all_reduce(torch.ones(2), connected)
    expect(connected.sequence - before, 2)
