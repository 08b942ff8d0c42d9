"""What all transports share: the operation in flight, the channel that keeps operations in order, and ``Work``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch

from cupy_coll.bootstrap import mpi
from cupy_coll.checkmode import CheckMode, in_words
from cupy_coll.dtypes import Reduction, reduction_name
from cupy_coll.errors import CupyCollError, MismatchError, PeerError, TransportError
from cupy_coll.recorder import Recorder

__all__ = ["Channel", "Communication", "Engine", "Kind", "Ledger", "Operation", "Steps", "Transport", "Work"]

# Yields MPI requests, is sent their statuses when all have completed, and returns when the operation is done.
Steps = Generator[list[Any], list[Any], None]
Kind = Literal["collective", "send", "recv"]


class Engine(Protocol):
    """What transports need of the process' lifecycle."""

    timeout: float
    failure: Exception | None
    recorder: Recorder
    check: CheckMode | None
    abandoned: list[Any]
    departed: dict[int, Any]

    def start(self, operation: Any) -> None: ...
    def progress(self) -> None: ...
    def wait(self, operation: Any, timeout: float | None = None) -> None: ...
    def register(self, channel: Any) -> None: ...
    def unregister(self, channel: Any) -> None: ...
    def watch(self, one: Any) -> None: ...
    def unwatch(self, one: Any) -> None: ...
    def require_own_process(self, what: str) -> None: ...
    def wait_until(
        self,
        done: Callable[[], bool],
        missing: Callable[[dict[int, Any]], list[int]],
        describe: Callable[[], str],
        limit: float,
        given_up: Callable[[], bool] = ...,
    ) -> bool: ...
    def given_up(self, operation: Any) -> bool: ...
    def trouble(self, operation: Any, since: float) -> CupyCollError | None: ...
    def timed_out(self, operation: Any, limit: float) -> Exception: ...
    def states(self, ranks: Sequence[int]) -> dict[int, Any]: ...
    def states_in_words(self, ranks: Sequence[int], states: dict[int, Any]) -> str: ...
    def end_job(self, error: Exception) -> None: ...
    def deliver(self) -> None: ...


class Transport(Protocol):
    """The communications of one group over one kind of memory.

    Roots and peers are indices in the group. Arguments have been checked by the caller. Every method returns a Work
    if ``async_op``, else None after the end.
    """

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, *, async_op: bool = False) -> Work | None: ...
    def reduce(self, tensor: torch.Tensor, dst: int, op: Reduction, *, async_op: bool = False) -> Work | None: ...
    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None: ...
    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> Work | None: ...
    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: Reduction, *, async_op: bool = False
    ) -> Work | None: ...
    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None,
        dst: int,
        *,
        async_op: bool = False,
    ) -> Work | None: ...
    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None,
        src: int,
        *,
        async_op: bool = False,
    ) -> Work | None: ...
    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Work | None: ...
    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Work | None: ...
    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None: ...
    def barrier(self, *, async_op: bool = False) -> Work | None: ...


class Ledger:
    """What this rank has started with the members of a group over one transport, numbered alike on all members.

    Args:
        engine: the process' lifecycle.
        key: names the ledger, the same on all members.
        ranks: the global rank of each member.
        rank: this process' index among them.
        group: the group's name, for messages.
    """

    def __init__(self, engine: Engine, key: str, ranks: tuple[int, ...], rank: int, group: str) -> None:
        self.engine = engine
        self.key = key
        self.ranks = ranks
        self.rank = rank
        self.group = group
        self.started = 0
        self.sends = [0] * len(ranks)
        self.recvs = [0] * len(ranks)
        self.error: Exception | None = None
        engine.register(self)

    def require_sound(self, name: str) -> None:
        """Refuse to go on after an operation has failed."""
        if self.error is None:
            return
        message = f"{name}: group {self.group} failed earlier and cannot be used any more: {self.error}"
        if isinstance(self.error, PeerError):
            raise PeerError(message, self.error.ranks) from self.error
        kind_of_error = type(self.error) if isinstance(self.error, CupyCollError) else TransportError
        raise kind_of_error(message) from self.error

    def next_number(self, kind: Kind, peer: int) -> int:
        """Count an operation that starts now."""
        if kind == "collective":
            number, self.started = self.started, self.started + 1
        else:
            counts = self.sends if kind == "send" else self.recvs
            number, counts[peer] = counts[peer], counts[peer] + 1
        return number

    def compare(
        self,
        name: str,
        tensor: torch.Tensor | None = None,
        op: Reduction | None = None,
        root: int | None = None,
        sends: Sequence[int] = (),
        receives: Sequence[int] = (),
    ) -> None:
        """In check mode wait for every member's call of a collective, and compare them.

        Args:
            name, tensor, op, root: what all members call with.
            sends, receives: elements for and from each member, where those may differ between members.

        Raises:
            MismatchError: on every member, where they do not belong together.
        """
        if self.engine.check is not None:
            reduction = "" if op is None else reduction_name(name, op)
            text = in_words(name, tensor, reduction, None if root is None else self.ranks[root])
            self.engine.check.compare(self.key, self.group, self.ranks, text, sends, receives)

    def started_with(self, rank: int) -> dict[str, int]:
        """How many operations of each kind have been started here that concern the global rank ``rank``."""
        if rank not in self.ranks:
            return {}
        index = self.ranks.index(rank)
        return {"collective": self.started, "send": self.sends[index], "recv": self.recvs[index]}

    def started_in_all(self) -> dict[str, Any]:
        """How many operations of each kind have been started here; point-to-point ones by global rank."""
        counts: dict[str, Any] = {"collective": self.started}
        for kind, numbers in (("send", self.sends), ("recv", self.recvs)):
            counts[kind] = {rank: number for rank, number in zip(self.ranks, numbers, strict=True) if number}
        if self.engine.check is not None:
            counts["check"] = self.engine.check.made(self.key)
        return counts


class Channel(Ledger):
    """One MPI communicator and what is in flight on it.

    Collectives run one after another in the order in which they were called: an operation of several messages must
    not let a later one overtake it on some of the ranks. Point-to-point operations run at once.

    Args:
        comm: a communicator that nobody else uses; freed by :meth:`close`.
        engine, key, ranks, group: as of :class:`Ledger`.
    """

    def __init__(self, comm: Any, engine: Engine, key: str, ranks: tuple[int, ...], group: str) -> None:
        self.comm = comm
        self.queue: deque[Operation] = deque()
        super().__init__(engine, key, ranks, comm.rank, group)

    def submit(
        self,
        name: str,
        steps: Steps,
        tensors: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        kind: Kind = "collective",
        peer: int = -1,
    ) -> Operation:
        """Start an operation.

        Args:
            name: the operation's, for messages.
            steps: what it does.
            tensors: what it was called with, for messages.
            outputs: what ``Work.result()`` gives.
            kind, peer: for point-to-point operations the other member's index.
        """
        try:
            self.require_sound(name)
        except CupyCollError:
            steps.close()
            raise
        operation = Operation(self, name, steps, tensors, outputs, kind, peer)
        if kind == "collective":
            self.queue.append(operation)
        self.engine.start(operation)
        return operation

    def run(self, name: str, steps: Steps, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Start an operation, wait for its end and raise its error."""
        self.submit(name, steps, tensors).wait()

    def close(self, free: bool) -> None:
        """Forget the channel; ``free`` its communicator where all members do."""
        self.engine.unregister(self)
        if free:
            self.comm.Free()


class Communication:
    """One operation of any transport, as far as messages, counts and the flight recorder know it.

    Args:
        ledger: counts it.
        name: the operation's, for messages.
        tensors: what it was called with, or what has their shape and dtype; held.
        outputs: what ``Work.result()`` gives.
        kind, peer: for point-to-point operations the other member's index.
    """

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        tensors: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        kind: Kind,
        peer: int,
    ) -> None:
        self.ledger = ledger
        self.name = name
        self.number = ledger.next_number(kind, peer)
        self.tensors = tensors
        self.outputs = outputs
        self.kind = kind
        self.peer = peer
        self.error: Exception | None = None
        self.done = False
        rank = None if kind == "collective" else ledger.ranks[peer]
        self.entry = ledger.engine.recorder.begin(ledger.key, ledger.group, kind, self.number, rank, name, tensors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that take part."""
        ranks = self.ledger.ranks
        return ranks if self.kind == "collective" else (ranks[self.ledger.rank], ranks[self.peer])

    @property
    def source_rank(self) -> int:
        """The global rank that a message comes from; -1 where it is no receive."""
        return self.ledger.ranks[self.peer] if self.kind == "recv" else -1

    @property
    def identity(self) -> tuple[Any, ...]:
        """The same on all ranks that take part."""
        if self.kind == "collective":
            return self.ledger.key, self.number
        source, target = (self.ledger.rank, self.peer) if self.kind == "send" else (self.peer, self.ledger.rank)
        return self.ledger.key, self.number, source, target

    def missing(self, departed: dict[int, Any]) -> list[int]:
        """The global ranks among ``departed`` that have not started their part of this operation."""
        ranks = self.ledger.ranks
        if self.kind == "collective":
            others, theirs = ranks, "collective"
        else:
            others, theirs = (ranks[self.peer],), "recv" if self.kind == "send" else "send"
        return [r for r in others if r in departed and departed[r].count(self.ledger.key, theirs) <= self.number]

    def describe(self) -> str:
        """The operation in words."""
        shapes = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self.tensors[:2])
        where = f"group {self.ledger.group}, operation {self.number}"
        if self.kind != "collective":
            where += f", {'to' if self.kind == 'send' else 'from'} rank {self.ledger.ranks[self.peer]}"
        return f"{self.name} ({where}{', ' + shapes if shapes else ''})"


class Operation(Communication):
    """One communication over MPI in flight; holds its tensors until it has ended."""

    def __init__(
        self,
        channel: Channel,
        name: str,
        steps: Steps,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        kind: Kind,
        peer: int,
    ) -> None:
        super().__init__(channel, name, tensors, outputs, kind, peer)
        self.channel = channel
        self.steps = steps
        self.requests: list[Any] | None = None
        self.statuses: list[Any] | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when it has ended; raise its error."""
        self.channel.engine.wait(self, timeout)
        if self.error is not None:
            raise self.error

    def test(self) -> bool:
        """Whether it has ended; take the steps that are possible now."""
        self.channel.engine.progress()
        return self.done

    def advance(self) -> bool:
        """Take the steps that are possible now; tell whether the operation has ended."""
        if self.done:
            return True
        if self.kind == "collective" and self.channel.queue[0] is not self:
            return False
        MPI = mpi()
        try:
            while True:
                if self.requests is None:
                    self.requests = self._step()
                else:
                    if not MPI.Request.Testall(self.requests, self.statuses):
                        return False
                    self.requests = self._step()
                self.statuses = [MPI.Status() for _ in self.requests]
        except StopIteration:
            self._end(None)
        except MPI.Exception as error:
            self._end(self._translate(error))
        except CupyCollError as error:
            self._end(type(error)(f"{self.describe()}: {error}"))
        except Exception as error:  # torch's own, such as too little memory: belongs to whoever waits
            self._end(error)
        return True

    def _step(self) -> list[Any]:
        """The next messages. In inference mode: where alone a tensor made in it, the caller's or ours, is written."""
        with torch.inference_mode():
            return next(self.steps) if self.statuses is None else self.steps.send(self.statuses)

    def _translate(self, error: Any) -> CupyCollError:
        MPI = mpi()
        codes = [error, *(MPI.Exception(s.Get_error()) for s in self.statuses or () if s.Get_error())]
        if any(code.Get_error_class() == MPI.ERR_TRUNCATE for code in codes):
            return MismatchError(f"{self.describe()}: a member sent more than this rank expected")
        code, text = error.Get_error_code(), error.Get_error_string()
        return TransportError(f"{self.describe()}: MPI failed: {text} (code {code})", code, text)

    def fail(self, error: Exception) -> None:
        """End without success; the channel is out of step with its other members from now on."""
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self.done = True
        self.error = error
        if error is None:
            self.channel.engine.recorder.end(self.entry)
        else:
            # MPI may still write into, or read from, the memory that the steps hold: it must live on.
            self.channel.engine.abandoned.append(self)
        if self.kind != "collective":
            return  # the messages between two members are in order whatever becomes of one
        if error is None:
            self.channel.queue.popleft()
            return
        self.channel.error = self.channel.error or error
        self.channel.engine.failure = self.channel.engine.failure or error
        while self.channel.queue:
            operation = self.channel.queue.popleft()
            if not operation.done:
                operation.done = True
                operation.error = error
                operation.steps.close()


class Awaitable(Protocol):
    """What a Work asks of its operation."""

    done: bool
    error: Exception | None
    outputs: Sequence[torch.Tensor]

    @property
    def source_rank(self) -> int: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def test(self) -> bool: ...


class Work(torch.distributed.Work):
    """The handle of an operation that was started with ``async_op=True``.

    It keeps the operation's tensors alive, and may be dropped: the operation ends anyhow.
    """

    def __init__(self, operation: Awaitable) -> None:
        super().__init__()
        self._operation = operation

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Return True when the operation has ended.

        On a GPU this makes the current stream wait, and not the host, unless there is a ``timeout``.

        Args:
            timeout: seconds (or a timedelta) for this call; when they have passed the operation goes on, and can be
                waited for again. None, or torch's zero: the timeout of the context, which the group does not survive.

        Raises:
            CommTimeoutError: the time is over.
            PeerError: a member left without taking part.
            TransportError, MismatchError: the operation failed.
        """
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._operation.wait(limit or None)
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended; takes the steps that are possible now, and does not wait."""
        return self._operation.test()

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""
        return self.is_completed() and self._operation.error is None

    def exception(self) -> Exception | None:
        """The error of an operation that failed."""
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that the operation wrote on this rank."""
        self.wait()
        return list(self._operation.outputs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait, and return a completed future of :meth:`result`."""
        devices: list[Any] = list({tensor.device for tensor in self._operation.outputs if tensor.is_cuda})
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        try:
            future.set_result(self.result())
        except CupyCollError as error:
            future.set_exception(error)  # type: ignore[arg-type]  # typed as a value
        return future

    def _source_rank(self) -> int:
        return self._operation.source_rank
