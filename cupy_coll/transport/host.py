"""Tensors in host memory over MPI.

MPI moves bytes; torch reduces them, in rank order (see ``reduction``). So every dtype travels, and an all-reduce has
the same bits on all ranks by construction: each element is reduced on one rank and copied to the others, or reduced
from the same numbers in the same order on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cupy_coll.bootstrap import mpi
from cupy_coll.dtypes import Reduction, name_of
from cupy_coll.errors import MismatchError
from cupy_coll.transport.base import Channel, Kind, Steps, Work
from cupy_coll.transport.memory import Target, apart, flat_of
from cupy_coll.transport.reduction import reduce_in_rank_order

__all__ = ["HostTransport", "span"]

SMALL = 32 << 10  # bytes of all ranks together up to which a reduction is one all-gather and local arithmetic
PIECE = 4 << 20  # bytes of a reduction in flight at a time: its buffers stay in the cache
LARGEST = 1 << 30  # bytes of one MPI call; some MPIs count in a C int
PEER_TAG, INNER_TAG = 1, 2  # the user's send and recv; messages of an operation of all members


def span(tensor: torch.Tensor, begin: int = 0, end: int | None = None) -> list[Any]:
    """The bytes [begin, end) of a contiguous tensor as an MPI message."""
    MPI = mpi()
    end = tensor.nbytes if end is None else end
    return [MPI.buffer.fromaddress(tensor.data_ptr() + begin, end - begin), MPI.BYTE]


def _ranges(nbytes: int, largest: int = LARGEST) -> list[tuple[int, int]]:
    return [(begin, min(begin + largest, nbytes)) for begin in range(0, nbytes, largest)]


class HostTransport:
    """The communications of one group on CPU tensors (see ``base.Transport``).

    Args:
        channel: carries the messages.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.comm = channel.comm
        self.size = len(channel.ranks)
        self.rank = channel.rank

    # ------------------------------------------------------------------ operations

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, *, async_op: bool = False) -> Work | None:
        self.channel.compare("all_reduce", tensor, op)
        steps = self._all_reduce(Target(tensor, load=True), op)
        return self._submit("all_reduce", steps, [tensor], [tensor], async_op)

    def reduce(self, tensor: torch.Tensor, dst: int, op: Reduction, *, async_op: bool = False) -> Work | None:
        self.channel.compare("reduce", tensor, op, dst)
        steps = self._reduce(tensor, dst, op)
        return self._submit("reduce", steps, [tensor], [tensor] if self.rank == dst else [], async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None:
        self.channel.compare("broadcast", tensor, root=src)
        return self._submit("broadcast", self._broadcast(tensor, src), [tensor], [tensor], async_op)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> Work | None:
        self.channel.compare("all_gather", source)
        return self._submit("all_gather", self._all_gather(output, source), [source], [output], async_op)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: Reduction, *, async_op: bool = False
    ) -> Work | None:
        self.channel.compare("reduce_scatter", output, op)
        return self._submit("reduce_scatter", self._reduce_scatter(output, source, op), [source], [output], async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None,
        dst: int,
        *,
        async_op: bool = False,
    ) -> Work | None:
        self.channel.compare("gather", tensor, root=dst)
        outputs = list(gather_list or ())
        inputs = [tensor if index == dst else None for index in range(self.size)]
        steps = self._exchange(outputs if self.rank == dst else [None] * self.size, inputs)
        return self._submit("gather", steps, [tensor], outputs, async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None,
        src: int,
        *,
        async_op: bool = False,
    ) -> Work | None:
        self.channel.compare("scatter", tensor, root=src)
        outputs = [tensor if index == src else None for index in range(self.size)]
        inputs = list(scatter_list or ()) if self.rank == src else [None] * self.size
        return self._submit("scatter", self._exchange(outputs, inputs), [tensor], [tensor], async_op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Work | None:
        sends, receives = [x.numel() for x in inputs], [x.numel() for x in outputs]
        self.channel.compare(f"all_to_all {name_of(inputs[0].dtype)}", sends=sends, receives=receives)
        return self._submit("all_to_all", self._exchange(outputs, inputs), inputs, outputs, async_op)

    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Work | None:
        return self._submit("send", self._send(tensor, dst), [tensor], [], async_op, "send", dst)

    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None:
        return self._submit("recv", self._recv(tensor, src), [tensor], [tensor], async_op, "recv", src)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        self.channel.compare("barrier")
        return self._submit("barrier", self._barrier(), [], [], async_op)

    def _submit(
        self,
        name: str,
        steps: Steps,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        async_op: bool,
        kind: Kind = "collective",
        peer: int = -1,
    ) -> Work | None:
        work = Work(self.channel.submit(name, steps, tensors, outputs, kind, peer))
        if async_op:
            return work
        work.wait()
        return None

    # ------------------------------------------------------------------ their steps

    def _barrier(self) -> Steps:
        yield [self.comm.Ibarrier()]

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Steps:
        target = Target(tensor, load=self.rank == src)
        for begin, end in _ranges(target.flat.nbytes):
            yield [self.comm.Ibcast(span(target.flat, begin, end), root=src)]
        if self.rank != src:
            target.store()

    def _all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Steps:
        target = Target(output)
        own = apart(flat_of(source), [target.flat])
        if target.flat.nbytes <= LARGEST:
            yield [self.comm.Iallgather(span(own), span(target.flat))]
        else:
            rows = target.flat.view(self.size, -1)
            rows[self.rank].copy_(own)
            for index in range(self.size):
                for begin, end in _ranges(own.nbytes):
                    yield [self.comm.Ibcast(span(rows[index], begin, end), root=index)]
        target.store()

    def _all_reduce(self, target: Target, op: Reduction) -> Steps:
        flat = target.flat
        if flat.nbytes * self.size <= SMALL:
            parts = torch.empty((self.size, flat.numel()), dtype=flat.dtype)
            yield [self.comm.Iallgather(span(flat), span(parts))]
            reduce_in_rank_order(parts.unbind(), op, out=flat)
        else:
            for piece in flat.split(max(1, PIECE // flat.itemsize)):
                shares = self._shares(piece)
                mine = shares[self.rank]
                yield from self._reduce_share(shares, op, mine)
                counts, starts = self._bytes_of(shares)
                message = [span(piece)[0], counts, starts, mpi().BYTE]
                yield [self.comm.Iallgatherv(mpi().IN_PLACE, message)]
        target.store()

    def _reduce(self, tensor: torch.Tensor, dst: int, op: Reduction) -> Steps:
        root = self.rank == dst
        own = flat_of(tensor)
        target = Target(tensor) if root else None
        for begin in range(0, own.numel(), step := max(1, PIECE // own.itemsize)):
            shares = self._shares(own[begin : begin + step])
            mine = torch.empty_like(shares[self.rank])
            yield from self._reduce_share(shares, op, mine)
            counts, starts = self._bytes_of(shares)
            whole = None
            if target is not None:
                whole = [span(target.flat[begin : begin + step])[0], counts, starts, mpi().BYTE]
            yield [self.comm.Igatherv(span(mine), whole, root=dst)]
        if target is not None:
            target.store()

    def _reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: Reduction) -> Steps:
        target = Target(output)
        rows = apart(flat_of(source), [target.flat]).view(self.size, -1)
        for begin in range(0, target.flat.numel(), step := max(1, PIECE // (output.itemsize * self.size))):
            mine = target.flat[begin : begin + step]
            yield from self._reduce_share([row[begin : begin + step] for row in rows.unbind()], op, mine)
        target.store()

    def _reduce_share(self, shares: Sequence[torch.Tensor], op: Reduction, mine: torch.Tensor) -> Steps:
        """Send ``shares[i]`` to member i; reduce what comes for this one into ``mine``."""
        parts = torch.empty((self.size, mine.numel()), dtype=mine.dtype)
        yield from self._exchange(parts.unbind(), shares)
        reduce_in_rank_order(parts.unbind(), op, out=mine)

    def _exchange(self, outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]) -> Steps:
        """Send ``inputs[i]`` to member i and receive ``outputs[i]`` from it; None: nothing goes that way."""
        targets = [None if output is None else Target(output) for output in outputs]
        written = [target.flat for target in targets if target is not None]
        sources = [None if source is None else apart(flat_of(source), written) for source in inputs]
        requests, expected = [], []
        for shift in range(1, self.size):
            source, target = (self.rank - shift) % self.size, targets[(self.rank - shift) % self.size]
            if target is not None:
                for begin, end in _ranges(target.flat.nbytes):
                    requests.append(self.comm.Irecv(span(target.flat, begin, end), source, INNER_TAG))
                    expected.append((source, end - begin))
        for shift in range(1, self.size):
            peer = (self.rank + shift) % self.size
            data = sources[peer]
            if data is not None:
                requests += [self.comm.Isend(span(data, *r), peer, INNER_TAG) for r in _ranges(data.nbytes)]
        own_target, own_source = targets[self.rank], sources[self.rank]
        if own_target is not None and own_source is not None:
            own_target.flat.copy_(own_source)
        statuses = yield requests
        for (source, nbytes), status in zip(expected, statuses, strict=False):
            self._check_received(source, nbytes, status)
        for target in targets:
            if target is not None:
                target.store()

    def _send(self, tensor: torch.Tensor, dst: int) -> Steps:
        flat = flat_of(tensor)
        yield [self.comm.Isend(span(flat, *r), dst, PEER_TAG) for r in _ranges(flat.nbytes) or [(0, 0)]]

    def _recv(self, tensor: torch.Tensor, src: int) -> Steps:
        target = Target(tensor)
        ranges = _ranges(target.flat.nbytes) or [(0, 0)]
        statuses = yield [self.comm.Irecv(span(target.flat, *r), src, PEER_TAG) for r in ranges]
        for (begin, end), status in zip(ranges, statuses, strict=True):
            self._check_received(src, end - begin, status)
        target.store()

    # ------------------------------------------------------------------ arithmetic

    def _shares(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Cut into one contiguous part a member, of equal length but for the last ones."""
        share = -(-flat.numel() // self.size)
        return [flat[index * share : (index + 1) * share] for index in range(self.size)]

    @staticmethod
    def _bytes_of(shares: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        counts = [share.nbytes for share in shares]
        return counts, [sum(counts[:index]) for index in range(len(counts))]

    def _check_received(self, source: int, expected: int, status: Any) -> None:
        count = status.Get_count(mpi().BYTE)
        if count != expected:
            rank = self.channel.ranks[source]
            raise MismatchError(f"rank {rank} sent {count} bytes where this rank expected {expected}")
