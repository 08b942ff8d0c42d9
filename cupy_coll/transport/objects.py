"""Python objects between the members of a group, and agreement: what fails on one rank raises on all."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from cupy_coll.errors import ArgumentError, CupyCollError
from cupy_coll.transport.base import Channel, Steps
from cupy_coll.transport.host import LARGEST, span

__all__ = ["agree", "all_gather_objects"]

SLOT = 512  # bytes that every member sends first; a message that fits travels in this one exchange
ALONE = 64 << 10  # bytes from which a pickled buffer travels by itself, from and into its own memory


def agree(channel: Channel, function: str, error: Exception | None) -> None:
    """Raise on every member where one has met an error before it sent anything.

    All raise an error of the same class with the same text, which names the ranks; the member's own is its cause.
    """
    _raise_everywhere(channel, function, error, _all_gather_bytes(channel, function, _report(error)))


def all_gather_objects(
    channel: Channel, function: str, argument: str, value: Any, error: Exception | None = None
) -> list[Any]:
    """Every member's ``value``, on every member, by pickle protocol 5 with out-of-band buffers.

    Args:
        argument: what the caller calls the value, for messages.
        error: what this member found wrong with its arguments; raises on every member, as in :func:`agree`.

    Raises:
        ArgumentError: on every member, where a value cannot be pickled on one or unpickled on one.
    """
    channel.compare(function)
    buffers: list[pickle.PickleBuffer] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as view:
            alone = view.nbytes >= ALONE
        if alone:
            buffers.append(buffer)
        return not alone

    head = b""
    try:
        if error is None:
            head = pickle.dumps(value, protocol=5, buffer_callback=in_band)
    except Exception as problem:  # whatever a __reduce__ raises
        error = _object_error(function, argument, "pickled", problem)
        buffers.clear()
    sizes = [len(buffer.raw()) for buffer in buffers]
    messages = _all_gather_bytes(channel, function, pickle.dumps((_report(error), sizes, head)))
    received = [pickle.loads(message) for message in messages]
    _raise_everywhere(channel, function, error, [report for report, _, _ in received])

    values: list[Any] = []
    for index, (_, their_sizes, their_head) in enumerate(received):
        parts = _broadcast_buffers(channel, function, index, their_sizes, buffers)
        try:
            values.append(pickle.loads(their_head, buffers=parts))
        except Exception as problem:  # whatever a __setstate__ raises
            rank = channel.ranks[index]
            error = error or _object_error(function, f"{argument} of rank {rank}", "unpickled", problem)
    agree(channel, function, error)
    return values


def _object_error(function: str, argument: str, what: str, problem: Exception) -> ArgumentError:
    reason = "".join(traceback.format_exception_only(problem)).strip()
    error = ArgumentError(f"{function}: {argument} cannot be {what}: {reason}")
    error.__cause__ = problem
    return error


def _report(error: Exception | None) -> bytes:
    if error is None:
        return b""
    kind = _public_class(error)
    attributes = vars(error) if isinstance(error, kind) else {}  # such as TransportError's code
    return pickle.dumps((kind, str(error) or type(error).__name__, attributes))


def _public_class(error: Exception) -> type[CupyCollError]:
    for kind in type(error).__mro__:
        if issubclass(kind, CupyCollError) and kind.__module__ == CupyCollError.__module__:
            return kind
    return ArgumentError


def _raise_everywhere(channel: Channel, function: str, own: Exception | None, reports: Sequence[bytes]) -> None:
    failed = {channel.ranks[index]: pickle.loads(report) for index, report in enumerate(reports) if report}
    if not failed:
        return
    ranks = ", ".join(map(str, failed))
    kind, text, attributes = next(iter(failed.values()))
    text = text.removeprefix(f"{function}: ")
    everywhere = kind(f"{function}: failed on rank{'s' * (len(failed) > 1)} {ranks}: {text}")
    vars(everywhere).update(attributes)
    raise everywhere from own


def _all_gather_bytes(channel: Channel, function: str, message: bytes) -> list[bytes]:
    """Every member's message. One exchange where all are short, else one more a rank with a long one."""
    size = len(channel.ranks)
    own = torch.zeros(SLOT, dtype=torch.uint8)
    length = len(message).to_bytes(8, "little")
    short = length + message[: SLOT - 8]
    own[: len(short)] = torch.frombuffer(bytearray(short), dtype=torch.uint8)
    slots = torch.empty((size, SLOT), dtype=torch.uint8)
    rest: dict[int, torch.Tensor] = {}

    def steps() -> Steps:
        yield [channel.comm.Iallgather(span(own), span(slots))]
        for index in range(size):
            count = int.from_bytes(slots[index, :8].numpy().tobytes(), "little") - (SLOT - 8)
            if count > 0:
                rest[index] = torch.empty(count, dtype=torch.uint8)
                if index == channel.comm.rank:
                    rest[index].copy_(torch.frombuffer(bytearray(message[SLOT - 8 :]), dtype=torch.uint8))
                yield from _broadcast(channel, rest[index], index)

    channel.run(function, steps())
    result = []
    for index in range(size):
        slot = slots[index].numpy().tobytes()
        count = int.from_bytes(slot[:8], "little")
        tail = rest[index].numpy().tobytes() if index in rest else b""
        result.append(slot[8 : min(SLOT, 8 + count)] + tail)
    return result


def _broadcast_buffers(
    channel: Channel, function: str, root: int, sizes: Sequence[int], own: Sequence[pickle.PickleBuffer]
) -> list[bytearray]:
    parts = [bytearray(nbytes) for nbytes in sizes]
    if not parts:
        return parts
    tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
    if root == channel.comm.rank:
        for part, buffer in zip(parts, own, strict=True):
            part[:] = buffer.raw()

    def steps() -> Steps:
        for tensor in tensors:
            yield from _broadcast(channel, tensor, root)

    channel.run(function, steps())
    return parts


def _broadcast(channel: Channel, tensor: torch.Tensor, root: int) -> Steps:
    for begin in range(0, tensor.nbytes, LARGEST):
        yield [channel.comm.Ibcast(span(tensor, begin, min(begin + LARGEST, tensor.nbytes)), root=root)]
