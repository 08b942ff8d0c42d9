"""Small messages between the processes of a world, beside their collectives: departures, questions, checks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

from cupy_coll.bootstrap import mpi

__all__ = ["Mailbox"]

TAG = 1


class Mailbox:
    """Messages of a kind and a content; those from one process to another keep their order.

    Args:
        comm: a communicator of the world that nobody else uses.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.handlers: dict[str, Callable[[int, Any], None]] = {}
        self._sending: list[tuple[Any, bytes]] = []

    def post(self, kind: str, content: Any, ranks: Iterable[int]) -> None:
        """Send to ``ranks``, without waiting; to oneself nothing is sent."""
        MPI = mpi()
        message = pickle.dumps((kind, content))
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        for rank in ranks:
            if rank != self.rank:
                self._sending.append((self.comm.Isend([message, MPI.BYTE], rank, TAG), message))

    def deliver(self) -> None:
        """Hand every message that has come to the handler of its kind: ``handler(source, content)``."""
        MPI = mpi()
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
            message = bytearray(status.Get_count(MPI.BYTE))
            source = status.Get_source()
            self.comm.Recv([message, MPI.BYTE], source, TAG)
            kind, content = pickle.loads(message)
            self.handlers[kind](source, content)

    def all_sent(self) -> bool:
        """Whether everything posted has been taken over by MPI."""
        return bool(mpi().Request.Testall([request for request, _ in self._sending]))

    def free(self) -> None:
        """Free the communicator; called by every process."""
        self.comm.Free()
