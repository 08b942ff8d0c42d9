"""Tensors in the memory of GPUs over NCCL, by CuPy's ``cupy.cuda.nccl``; no other module imports that.

The stream rules are those of torch's own NCCL backend: a synchronous operation is enqueued on the stream that the
program is on, an asynchronous one on the group's own stream, after what the program has enqueued so far. The host waits
for neither: an event on the stream tells when an operation has ended, and the watchdog looks at the events.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed import ReduceOp

from cupy_coll.bootstrap import SHARED_GPU_VARIABLE
from cupy_coll.device import Device, Event, Stream, is_cupy
from cupy_coll.dtypes import NcclType, Reduction, name_of, nccl_copy, nccl_reduction
from cupy_coll.errors import ArgumentError, CommTimeoutError, CupyCollError, PeerError, TransportError
from cupy_coll.transport.base import Channel, Communication, Kind, Ledger, Work
from cupy_coll.transport.memory import Target, apart, flat_of
from cupy_coll.transport.nccl_members import Member, installed_library, problem_of, warn_of_paths
from cupy_coll.transport.objects import agree, all_gather_objects

__all__ = ["NcclTransport", "has_binding", "version"]

# ncclResult_t: NCCL's name, and what a user can do.
ADVICE = {
    1: ("ncclUnhandledCudaError", "a CUDA call failed; NCCL_DEBUG=WARN shows which"),
    2: (
        "ncclSystemError",
        "a system call failed; NCCL_DEBUG=WARN shows which. Often /dev/shm is too small (containers), or "
        "NCCL_SOCKET_IFNAME must name the network interface",
    ),
    3: ("ncclInternalError", "the communicator was aborted, or NCCL has a bug; NCCL_DEBUG=WARN shows more"),
    4: (
        "ncclInvalidArgument",
        "this NCCL does not take the arguments, such as a newer type; NCCL_DEBUG=WARN shows more",
    ),
    5: (
        "ncclInvalidUsage",
        "the members called different operations, or share a GPU; CUPY_COLL_CHECK=1 finds the former",
    ),
    6: ("ncclRemoteError", "another member failed or ended, or the network to it did; look at the other ranks' output"),
    7: ("ncclInProgress", "the operation has not ended"),
}
IN_PROGRESS = 7
FIRST_WITH_SPLIT = 21800  # ncclCommSplit came with 2.18
LAST_NEWS = 0.5  # seconds after an asynchronous error in which the member that has left may say so

Enqueued: TypeAlias = tuple[list[Target], list[Any]]  # what has been written to, and what must live until it ends


class Look(NamedTuple):
    """What is left of a tensor in messages."""

    shape: torch.Size
    dtype: torch.dtype


def has_binding() -> bool:
    """Whether NCCL can be used in this process."""
    try:
        _binding()
    except TransportError:
        return False
    return True


def version() -> int:
    """The version of NCCL that this process has loaded, as ncclGetVersion gives it.

    Raises:
        TransportError: CuPy or NCCL cannot be used.
    """
    return _binding().get_version()


def _binding() -> ModuleType:
    """``cupy.cuda.nccl``; loads NCCL when it is first called."""
    # Overlapping communicators on one GPU may deadlock unless their kernels are launched in the host's order.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise TransportError(
            f"CuPy cannot be imported, and tensors on GPUs need it: {error}. Install it with the CUDA of your driver "
            "(pip install 'cupy_coll[cuda13]' or 'cupy_coll[cuda12]')"
        ) from error
    if not nccl.available:
        raise TransportError(
            "CuPy finds no NCCL library: install one (pip install nvidia-nccl-cu13 or nvidia-nccl-cu12), or put "
            "libnccl.so.2 on LD_LIBRARY_PATH; CUPY_DEBUG_LIBRARY_LOAD=1 shows where CuPy looks"
        )
    return nccl


def _code_of(error: Exception) -> int | None:
    """The ncclResult_t in an error of the binding; None where it is another error.

    The binding has no name for the newest codes, and raises KeyError with the code for them.
    """
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], int):
        return error.args[0]
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _translated(what: str, error: Exception) -> Exception:
    """NCCL's error with code, name and advice; any other one as it is."""
    code = _code_of(error)
    if code is None:
        return error
    name, advice = ADVICE.get(code, ("an error of a newer NCCL", "NCCL_DEBUG=WARN shows more"))
    text = name if isinstance(error, KeyError) else str(error)
    return TransportError(f"{what}: NCCL failed: {name} (code {code}): {advice}", code, text)


class NcclOperation(Communication):
    """One operation that has been given to NCCL.

    A synchronous one holds no tensors: their memory belongs to the stream that it runs on. An asynchronous one holds
    them until it has ended on its stream, whether anybody waits for it or not.
    """

    def __init__(
        self,
        transport: NcclTransport,
        name: str,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        kind: Kind,
        peer: int,
        index: int,
        async_op: bool,
    ) -> None:
        looks = [Look(tensor.shape, tensor.dtype) for tensor in tensors]
        super().__init__(transport.ledger, name, looks, outputs if async_op else (), kind, peer)
        self.transport = transport
        self.index = index  # of the GPU
        self.cupy = is_cupy(tensors)
        self.held: list[Any] = list(tensors) if async_op else []
        self.since = time.monotonic()
        self.event: Event | None = None  # None until everything is enqueued, and for ever while a graph is captured
        self.waits_on_host = False

    def wait(self, timeout: float | None = None) -> None:
        """Make the current stream wait; with a timeout, the host."""
        if self.error is not None:
            raise self.error
        if self.event is None:
            return
        if timeout is not None or self.waits_on_host:
            self.transport.wait_on_host(self, timeout)
        device = self.transport.device
        device.wait(device.current_stream(self.index, self.cupy), self.event)

    def test(self) -> bool:
        """Whether it has ended; does not wait."""
        self.transport.collect()
        return self.done

    def end(self, error: Exception | None = None) -> None:
        """It has ended on its stream, or will not end."""
        self.done = True
        self.error = error
        self.held = []
        if error is None:
            self.ledger.engine.recorder.end(self.entry)


class NcclTransport:
    """The communications of one group on GPU tensors (see ``base.Transport``).

    Its members are connected at the first operation, or ahead of it by :meth:`connect`: NCCL wants all of them then.

    Args:
        ledger: counts what is started; the transport's own.
        control: the group's channel for agreements.
        device: whose tensors these are.
    """

    def __init__(self, ledger: Ledger, control: Channel, device: Device) -> None:
        self.ledger = ledger
        self.device = device
        self.size = len(ledger.ranks)
        self.rank = ledger.rank
        self._control = control
        self._engine = ledger.engine
        self._index = -1  # of the GPU that is connected
        self._comm: Any = None
        self._side: Stream = None
        self._order = threading.RLock()  # operations are numbered as they are enqueued
        self._life = threading.Lock()  # of the communicator: it is not asked for errors while it ends
        self._flight_lock = threading.Lock()
        self._flight: deque[NcclOperation] = deque()
        self._watchdog_is_polite = False

    # ------------------------------------------------------------------ operations

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, *, async_op: bool = False) -> Work | None:
        kind = self._reduction("all_reduce", tensor, op)

        def enqueue(comm: Any, stream: int) -> Enqueued:
            target = Target(tensor, load=not kind.truth)
            source = _truths(flat_of(tensor)) if kind.truth else target.flat
            count = source.numel() * kind.units
            comm.allReduce(self._at(source), self._at(target.flat), count, kind.code, kind.op, stream)
            return [target], [source]

        def compare() -> None:
            self.ledger.compare("all_reduce", tensor, op)

        return self._run("all_reduce", enqueue, compare, [tensor], [tensor], async_op)

    def reduce(self, tensor: torch.Tensor, dst: int, op: Reduction, *, async_op: bool = False) -> Work | None:
        kind = self._reduction("reduce", tensor, op)
        root = self.rank == dst

        def enqueue(comm: Any, stream: int) -> Enqueued:
            targets = [Target(tensor, load=not kind.truth)] if root else []
            own = targets[0].flat if targets and not kind.truth else flat_of(tensor)
            source = _truths(own) if kind.truth else own
            written = targets[0].flat if targets else source  # only the root's is written
            count = source.numel() * kind.units
            comm.reduce(self._at(source), self._at(written), count, kind.code, kind.op, dst, stream)
            return targets, [source]

        def compare() -> None:
            self.ledger.compare("reduce", tensor, op, dst)

        return self._run("reduce", enqueue, compare, [tensor], [tensor] if root else [], async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None:
        kind = nccl_copy(tensor.dtype)

        def enqueue(comm: Any, stream: int) -> Enqueued:
            targets = [Target(tensor)] if self.rank != src else []
            flat = targets[0].flat if targets else flat_of(tensor)
            comm.broadcast(self._at(flat), self._at(flat), flat.numel() * kind.units, kind.code, src, stream)
            return targets, [flat]

        def compare() -> None:
            self.ledger.compare("broadcast", tensor, root=src)

        return self._run("broadcast", enqueue, compare, [tensor], [tensor], async_op)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> Work | None:
        kind = nccl_copy(source.dtype)

        def enqueue(comm: Any, stream: int) -> Enqueued:
            target = Target(output)
            own = flat_of(source)
            if self._at(own) != self._at(target.flat) + self.rank * own.nbytes:  # NCCL's own form in place
                own = apart(own, [target.flat])
            comm.allGather(self._at(own), self._at(target.flat), own.numel() * kind.units, kind.code, stream)
            return [target], [own]

        def compare() -> None:
            self.ledger.compare("all_gather", source)

        return self._run("all_gather", enqueue, compare, [source], [output], async_op)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: Reduction, *, async_op: bool = False
    ) -> Work | None:
        kind = self._reduction("reduce_scatter", output, op)

        def enqueue(comm: Any, stream: int) -> Enqueued:
            target = Target(output)
            whole = _truths(flat_of(source)) if kind.truth else flat_of(source)
            if self._at(target.flat) != self._at(whole) + self.rank * target.flat.nbytes:
                whole = apart(whole, [target.flat])
            count = target.flat.numel() * kind.units
            comm.reduceScatter(self._at(whole), self._at(target.flat), count, kind.code, kind.op, stream)
            return [target], [whole]

        def compare() -> None:
            self.ledger.compare("reduce_scatter", output, op)

        return self._run("reduce_scatter", enqueue, compare, [source], [output], async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None,
        dst: int,
        *,
        async_op: bool = False,
    ) -> Work | None:
        outputs = list(gather_list or ())
        inputs = [tensor if index == dst else None for index in range(self.size)]
        enqueue = self._exchange(outputs if self.rank == dst else [None] * self.size, inputs)

        def compare() -> None:
            self.ledger.compare("gather", tensor, root=dst)

        return self._run("gather", enqueue, compare, [tensor], outputs, async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None,
        src: int,
        *,
        async_op: bool = False,
    ) -> Work | None:
        outputs = [tensor if index == src else None for index in range(self.size)]
        inputs = list(scatter_list or ()) if self.rank == src else [None] * self.size
        enqueue = self._exchange(outputs, inputs)

        def compare() -> None:
            self.ledger.compare("scatter", tensor, root=src)

        return self._run("scatter", enqueue, compare, [tensor, *(scatter_list or ())], [tensor], async_op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Work | None:
        def compare() -> None:
            sends, receives = [x.numel() for x in inputs], [x.numel() for x in outputs]
            self.ledger.compare(f"all_to_all {name_of(inputs[0].dtype)}", sends=sends, receives=receives)

        return self._run("all_to_all", self._exchange(outputs, inputs), compare, inputs, outputs, async_op)

    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Work | None:
        def enqueue(comm: Any, stream: int) -> Enqueued:
            flat = flat_of(tensor)
            if flat.nbytes:
                comm.send(self._at(flat), flat.nbytes, _BYTES.code, dst, stream)
            return [], [flat]

        return self._run("send", enqueue, _nothing, [tensor], [], async_op, "send", dst)

    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None:
        def enqueue(comm: Any, stream: int) -> Enqueued:
            target = Target(tensor)
            if target.flat.nbytes:
                comm.recv(self._at(target.flat), target.flat.nbytes, _BYTES.code, src, stream)
            return [target], []

        return self._run("recv", enqueue, _nothing, [tensor], [tensor], async_op, "recv", src)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        def enqueue(comm: Any, stream: int) -> Enqueued:
            token = self.device.empty(1, torch.uint8, self._index).zero_()
            kind = nccl_reduction("barrier", token.dtype, ReduceOp.MAX, (0, 0))
            comm.allReduce(self._at(token), self._at(token), 1, kind.code, kind.op, stream)
            return [], [token]

        def compare() -> None:
            self.ledger.compare("barrier")

        work = self._run("barrier", enqueue, compare, [], [], True, on_host=True)
        assert work is not None
        if async_op:
            return work
        work.wait()
        return None

    # ------------------------------------------------------------------ what they share

    def _reduction(self, function: str, tensor: torch.Tensor, op: Reduction) -> NcclType:
        return nccl_reduction(function, tensor.dtype, op, self.device.capability(self.device.index_of(tensor)))

    def _at(self, tensor: torch.Tensor) -> int:
        return self.device.pointer(tensor)

    def _exchange(
        self, outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]
    ) -> Callable[[Any, int], Enqueued]:
        """Send ``inputs[i]`` to member i, receive ``outputs[i]`` from it, this one too; None: nothing goes there."""

        def enqueue(comm: Any, stream: int) -> Enqueued:
            targets = {peer: Target(output) for peer, output in enumerate(outputs) if output is not None}
            written = [target.flat for target in targets.values()]
            sources = {peer: apart(flat_of(x), written) for peer, x in enumerate(inputs) if x is not None}
            with _one_group():
                for peer, source in sources.items():
                    kind = nccl_copy(source.dtype)
                    if source.numel():
                        comm.send(self._at(source), source.numel() * kind.units, kind.code, peer, stream)
                for peer, target in targets.items():
                    kind = nccl_copy(target.flat.dtype)
                    if target.flat.numel():
                        comm.recv(self._at(target.flat), target.flat.numel() * kind.units, kind.code, peer, stream)
            return list(targets.values()), list(sources.values())

        return enqueue

    def _run(
        self,
        name: str,
        enqueue: Callable[[Any, int], Enqueued],
        compare: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        async_op: bool,
        kind: Kind = "collective",
        peer: int = -1,
        on_host: bool = False,
    ) -> Work | None:
        """Enqueue an operation.

        Args:
            enqueue: calls NCCL with the communicator and a stream.
            compare: what check mode does before.
            tensors, outputs: what the operation was called with, and what of it is written.
            on_host: its end is waited for on the host.
        """
        device = self.device
        self._engine.require_own_process(name)
        with self._order:
            self.ledger.require_sound(name)
            index = self._index_of(name, [*tensors, *outputs])
            current = device.current_stream(index, is_cupy(tensors))
            capturing = device.is_capturing(current)
            if self._comm is None and capturing:
                raise TransportError(
                    f"{name}: group {self.ledger.group} has not been connected yet, and that cannot be captured in a "
                    "graph; call its warm_up() before, on all members"
                )
            if not capturing:  # whose thread may not ask for events either
                compare()
                self.connect(name, index)
                self.collect()
            stream = self._side if async_op and not capturing else current
            operation = NcclOperation(self, name, tensors, outputs, kind, peer, index, async_op)
            operation.waits_on_host = on_host
            if not capturing:
                with self._flight_lock:
                    self._flight.append(operation)
            try:
                if stream is not current:
                    device.wait(stream, device.record(current))
                with device.on(stream):
                    targets, held = enqueue(self._comm, device.handle(stream))
                self._store(targets, stream)
                if capturing:
                    operation.end()
                else:
                    if async_op:
                        operation.held += [targets, held]
                    operation.event = device.record(stream)
            except Exception as error:
                raise self._failed(operation, error) from error
        return Work(operation) if async_op else None

    def _store(self, targets: Sequence[Target], stream: Stream) -> None:
        """Write results back where a tensor's memory is not contiguous, behind the operation on its stream."""
        for target in targets:
            if target.direct:
                target.store()
            else:
                with self.device.on(stream):
                    target.store()

    def _failed(self, operation: NcclOperation, error: Exception) -> Exception:
        """The members are out of step from now on: nobody knows what the others have enqueued."""
        error = _translated(operation.describe(), error)
        operation.end(error)
        self._give_up(error)
        return error

    def _give_up(self, error: Exception) -> None:
        self.ledger.error = self.ledger.error or error
        self._engine.failure = self._engine.failure or error

    def _index_of(self, name: str, tensors: Sequence[torch.Tensor]) -> int:
        """The GPU that the tensors are on: one for all, and the same as before."""
        indices = {self.device.index_of(tensor) for tensor in tensors}
        if not indices:
            return self.device.current() if self._comm is None else self._index
        index = indices.pop()
        if indices:
            names = ", ".join(map(self.device.name, sorted({index, *indices})))
            raise ArgumentError(f"{name}: the tensors are on {names}, expected one GPU")
        if self._comm is not None and index != self._index:
            raise ArgumentError(
                f"{name}: the tensor is on {self.device.name(index)}, expected {self.device.name(self._index)}, where "
                f"group {self.ledger.group} has been connected"
            )
        return index

    # ------------------------------------------------------------------ what is in flight

    def collect(self) -> None:
        """Let go of what has ended, from the oldest on."""
        with self._flight_lock:
            while self._flight and self._has_ended(self._flight[0]):
                self._flight.popleft()

    def _has_ended(self, operation: NcclOperation) -> bool:
        if not operation.done and operation.event is not None and self.device.has_passed(operation.event):
            operation.end()
        return operation.done

    def _in_flight(self) -> list[NcclOperation]:
        """All operations that have not ended, in the order of their start; they may be on several streams."""
        with self._flight_lock:
            self._flight = deque(operation for operation in self._flight if not self._has_ended(operation))
            return list(self._flight)

    def wait_on_host(self, operation: NcclOperation, timeout: float | None = None) -> None:
        """Return when an operation has ended on its stream.

        Raises:
            PeerError: a member has left without taking part.
            CommTimeoutError: the time is over; with a ``timeout`` the operation goes on.
        """
        engine = self._engine
        limit = engine.timeout if timeout is None else timeout

        def ended() -> bool:
            return self._has_ended(operation)

        try:
            if engine.wait_until(
                ended, operation.missing, operation.describe, limit, lambda: engine.given_up(operation)
            ):
                return
        except CupyCollError as error:
            self._give_up(error)
            raise
        if timeout is not None and not engine.given_up(operation):
            raise CommTimeoutError(f"{operation.describe()}: not ended after {limit:g} s; it goes on")
        timed_out = engine.timed_out(operation, engine.timeout)
        self._give_up(timed_out)
        raise timed_out

    def drain(self) -> None:
        """Wait for everything in flight."""
        for operation in self._in_flight():
            self.wait_on_host(operation)

    def poll(self) -> None:
        """Look for what has ended, failed or taken too long; called by the watchdog."""
        try:
            if not self._watchdog_is_polite:
                self.device.let_captures_be()
                self._watchdog_is_polite = True
            self._look_for_errors()
            for operation in self._in_flight():
                trouble = self._engine.trouble(operation, operation.since)
                if trouble is not None and not self._has_ended(operation):
                    raise trouble
        except Exception as error:  # whatever it is, nobody else would hear of it
            self._give_up(error)
            self._engine.end_job(error)

    def _look_for_errors(self) -> None:
        with self._life:
            if self._comm is None:
                return
            try:
                self._comm.check_async_error()
            except Exception as error:
                if _code_of(error) != IN_PROGRESS:
                    raise self._asynchronous(error) from error

    def _asynchronous(self, error: Exception) -> Exception:
        """NCCL's notice of a failure, which often follows from the end of a member."""
        oldest = next((operation.describe() for operation in self._in_flight()), "nothing in flight")
        error = _translated(f"group {self.ledger.group}, asynchronous error ({oldest})", error)
        begin = time.monotonic()
        while not self._engine.departed and time.monotonic() - begin < LAST_NEWS:
            time.sleep(0.01)  # the member's own notice may be on its way
            self._engine.deliver()
        departed = self._engine.departed
        gone = [rank for rank in self.ledger.ranks if rank in departed]
        if not gone:
            return error
        reasons = ", ".join(f"rank {rank} {departed[rank].reason}" for rank in gone)
        return PeerError(f"{error}; {reasons}", tuple(gone))

    # ------------------------------------------------------------------ the communicator

    def connect(self, function: str, index: int) -> None:
        """Make the communicator; called by all members, and only once.

        What fails before NCCL's own initialisation raises on every member, which can then go on without. That itself
        cannot be taken back: where a member does not get through, the job ends.
        """
        with self._order:
            if self._comm is not None:
                return
            unique_id = self._agree_on_id(function, index)
            what = f"{function}: connecting group {self.ledger.group} by NCCL"
            comm = self._made(what, index, lambda: _binding().NcclCommunicator(self.size, unique_id, self.rank))
            agree(self._control, function, None)  # so nobody leaves while another one still connects
            self._adopt(comm, index)

    def _adopt(self, comm: Any, index: int) -> None:
        self._index, self._side = index, self.device.side_stream(index)
        self._comm = comm
        self._engine.watch(self)

    def can_split(self) -> bool:
        """Whether this member could call :meth:`split` now."""
        if self._comm is None or self.ledger.error is not None or _binding().get_version() < FIRST_WITH_SPLIT:
            return False
        return not self.device.is_capturing(self.device.current_stream(self._index, False))

    def split(self, function: str, part: NcclTransport | None, number: int) -> None:
        """Connect ``part`` by splitting this communicator; called by all its members, which have agreed that all can.

        It needs no unique id and no meeting at the part's first operation. NCCL wants the communicator idle.

        Args:
            part: the transport of the new group that this rank is in, or None.
            number: tells the parts apart; -1 without one.
        """
        with self._order:
            self.drain()
            what = f"{function}: splitting NCCL's communicator of group {self.ledger.group}"
            key = 0 if part is None else part.rank
            comm = self._made(what, self._index, lambda: self._comm.commSplit(number, key))
            agree(self._control, function, None)
            if part is not None:
                part._adopt(comm, self._index)

    def _agree_on_id(self, function: str, index: int) -> tuple[int, ...]:
        ranks = self.ledger.ranks
        own, error = _tried(function, lambda: self._own_entry(index))
        members = all_gather_objects(self._control, function, "GPU", own, error)
        problem = problem_of(members, ranks)
        if problem:
            raise TransportError(f"{function}: group {self.ledger.group} cannot use NCCL: {problem}")
        if self.rank == 0:
            warn_of_paths(members, ranks)
        unique_id, error = _tried(function, _binding().get_unique_id) if self.rank == 0 else (None, None)
        return all_gather_objects(self._control, function, "unique id", unique_id, error)[0]

    def _own_entry(self, index: int) -> Member:
        version = _binding().get_version()
        shares = os.environ.get(SHARED_GPU_VARIABLE) == "1"
        return Member(socket.gethostname(), self.device.identity(index), version, installed_library(), shares)

    def _made(self, what: str, index: int, make: Callable[[], Any]) -> Any:
        """A communicator that NCCL makes with all members, in a thread, for it may not come back."""
        made: list[Any] = []

        def initialise() -> None:
            try:
                with self.device.at(index):
                    made.append(make())
            except Exception as error:
                made.append(error)

        threading.Thread(target=initialise, name="cupy_coll connects", daemon=True).start()
        limit = self._engine.timeout
        try:
            if not self._engine.wait_until(
                lambda: bool(made),
                lambda departed: [rank for rank in self.ledger.ranks if rank in departed],
                lambda: what,
                limit,
            ):
                states = self._engine.states(self.ledger.ranks)
                raise CommTimeoutError(
                    f"{what}: not ended after {limit:g} s{self._engine.states_in_words(self.ledger.ranks, states)}"
                )
        except CupyCollError as error:
            self._engine.end_job(error)  # the thread is inside NCCL for good
            raise
        if isinstance(made[0], Exception):
            failed = _translated(what, made[0])
            if self.size > 1:  # the others cannot get through without this one
                self._give_up(failed)
            raise failed from made[0]
        return made[0]

    def close(self, destroy: bool) -> None:
        """End the communicator: ``destroy`` it where all members do and nothing is in flight, else abort it."""
        self._engine.unwatch(self)
        self._engine.unregister(self.ledger)
        if destroy:
            comm = self._taken()
            if comm is not None:
                comm.destroy()
        else:
            self.abort()

    def abort(self) -> None:
        """Give up the communicator and what is in flight; may not come back."""
        comm = self._taken()
        if comm is not None:
            comm.abort()

    def _taken(self) -> Any:
        with self._life:
            comm, self._comm = self._comm, None
        return comm


_BYTES = nccl_copy(torch.uint8)


def _nothing() -> None:
    """Messages between two members are not compared in check mode."""


def _truths(flat: torch.Tensor) -> torch.Tensor:
    """A copy of bool's bytes as 0 and 1: memory from elsewhere may hold others."""
    return flat.view(torch.uint8).ne(0).view(torch.uint8)


@contextlib.contextmanager
def _one_group() -> Iterator[None]:
    """NCCL's calls in the block are issued together, at its end."""
    nccl = _binding()
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def _tried(function: str, make: Callable[[], Any]) -> tuple[Any, CupyCollError | None]:
    """What ``make`` gives, or the error that it raises, as one of ours."""
    try:
        return make(), None
    except CupyCollError as error:
        return None, type(error)(f"{function}: {error}")
    except Exception as error:
        translated = _translated(function, error)
        if not isinstance(translated, CupyCollError):
            translated = TransportError(f"{function}: {type(error).__name__}: {error}")
        translated.__cause__ = error
        return None, translated
