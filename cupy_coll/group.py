"""A group of ranks and its communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cupy_coll import check
from cupy_coll.device import Device, devices, owner_of
from cupy_coll.errors import ArgumentError
from cupy_coll.transport.base import Channel, Engine, Ledger, Transport
from cupy_coll.transport.host import HostTransport
from cupy_coll.transport.nccl import NcclTransport, has_binding
from cupy_coll.transport.objects import all_gather_objects

__all__ = ["Group"]


class Group:
    """An ordered set of ranks that communicate; made by :class:`~cupy_coll.CommContext`.

    Attributes:
        ranks: the members' global ranks; the position is the rank in the group.
        rank: this process' position.
        size: the number of members.
        name: the mode and the ranks, for messages.
    """

    def __init__(
        self,
        comms: Sequence[Any],
        engine: Engine,
        ranks: tuple[int, ...],
        mode: str,
        serial: int | str,
        host_only: bool,
    ) -> None:
        self.ranks = ranks
        self.rank: int = comms[0].rank
        self.size = len(ranks)
        self.name = f"{mode} {list(ranks)}" if len(ranks) <= 8 else f"{mode} ({len(ranks)} ranks from {ranks[0]})"
        self.host_only = host_only
        self._engine = engine
        self._closed = False
        # Tensors, agreements and objects each have a communicator: none waits for the other's messages.
        self._data, self.control, self.objects = (
            Channel(one, engine, f"{serial}.{kind}", ranks, self.name)
            for one, kind in zip(comms, ("data", "control", "objects"), strict=True)
        )
        self._host = HostTransport(self._data)
        self._nccl: NcclTransport | None = None
        self._serial = serial

    def __repr__(self) -> str:
        return f"<Group {self.name}, rank {self.rank} of {self.size}{', closed' if self._closed else ''}>"

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` or ``CommContext().destroy()`` has been called."""
        return self._closed

    @property
    def sequence(self) -> int:
        """The number of collective operations on tensors that this rank has started in the group."""
        return self._data.started + (self._nccl.ledger.started if self._nccl else 0)

    @property
    def host(self) -> Transport:
        """The transport for host memory."""
        return self._host

    def transport_for(self, tensor: torch.Tensor) -> Transport:
        """The transport that can reach the memory of ``tensor``.

        Raises:
            ArgumentError: the tensor is on a device that the group does not serve.
        """
        owner = owner_of(tensor)
        if owner is None and tensor.device.type == "cpu":
            return self._host
        if owner is None or self.host_only:
            served = (
                "CPU tensors (it was made with a host backend or use_cpu)" if self.host_only else "CPU and CUDA tensors"
            )
            raise ArgumentError(f"group {self.name}: the tensor is on {tensor.device}, expected {served}")
        return self._on(owner)

    def _on(self, owner: Device) -> NcclTransport:
        if self._nccl is None:
            ledger = Ledger(self._engine, f"{self._serial}.nccl", self.ranks, self.rank, self.name)
            self._nccl = NcclTransport(ledger, self.control, owner)
        return self._nccl

    def warm_up(self) -> None:
        """Make every connection of the group now instead of at its first operation; called by all members.

        NCCL's is made on each member's current GPU (``torch.cuda.set_device``), where every member has a GPU and NCCL.

        Raises:
            TransportError: on every member, where NCCL cannot be used as the members are placed.
        """
        function = "warm_up"
        check.open_group(function, self)
        self._host.barrier()
        owner = None if self.host_only else next((device for device in devices() if device.count()), None)
        usable = owner is not None and has_binding()
        if all(all_gather_objects(self.control, function, "devices", usable)) and owner is not None:
            self._on(owner).connect(function, owner.current())

    def torch(self) -> torch.distributed.ProcessGroup:
        """A torch ProcessGroup of these ranks in this order that shares the communicators; called by all members.

        Raises:
            GroupError: torch.distributed is not initialised with the backend "cupy_coll".
        """
        from cupy_coll.torch_backend import process_group_of

        return process_group_of(self)

    def can_split(self) -> bool:
        """Whether NCCL has connected the group and could split its communicator now."""
        return self._nccl is not None and self._nccl.can_split()

    def split(self, function: str, part: Group | None, number: int) -> None:
        """Give ``part`` a piece of this group's NCCL communicator; called by all members where all of them can split.

        Args:
            part: the new group that this rank is in, or None.
            number: the same on all members of one part, another one for each part; -1 without a part.
        """
        assert self._nccl is not None
        self._nccl.split(function, None if part is None else part._on(self._nccl.device), number)

    def close(self) -> None:
        """Finish what is in flight and free the group's communicators; called by all members.

        Raises:
            PeerError: a member has left instead.
        """
        if self._closed:
            return
        if self._nccl is not None:
            self._nccl.drain()
        self._host.barrier()
        self.release(free=True)

    def release(self, free: bool) -> None:
        """Forget the communicators without asking the other members; ``free`` them where all do so."""
        if self._closed:
            return
        self._closed = True
        if self._nccl is not None:
            self._nccl.close(destroy=free)
        for channel in (self._data, self.control, self.objects):
            channel.close(free)
