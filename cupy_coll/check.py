"""Checks of arguments: what one rank can see is refused there, before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from cupy_coll.dtypes import name_of
from cupy_coll.errors import ArgumentError, DTypeError, GroupError, MismatchError, ShapeError

__all__ = [
    "DEFAULT_ROOT",
    "alike",
    "describe",
    "gathered_shape",
    "open_group",
    "ranks_in_words",
    "root",
    "same_on_all",
    "storage",
    "tensor_list",
]


class _DefaultRoot(int):
    """The 0 of a ``src=0`` that the caller left out."""


DEFAULT_ROOT = _DefaultRoot(0)


class Members(Protocol):
    """What the checks ask of a group."""

    ranks: tuple[int, ...]
    size: int
    name: str

    @property
    def closed(self) -> bool: ...


def describe(tensor: torch.Tensor) -> str:
    """``[3, 7] float32 on cpu``."""
    return f"{list(tensor.shape)} {name_of(tensor.dtype)} on {tensor.device}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 1``."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def open_group(function: str, group: Members) -> None:
    """Refuse a group that is closed."""
    if group.closed:
        raise GroupError(f"{function}: group {group.name} is closed")


def root(function: str, group: Members, name: str, rank: Any, group_rank: Any) -> int:
    """The index in the group of the member given by global rank (``src``) or by index (``group_src``)."""
    if group_rank is not None:
        if rank is not None and not isinstance(rank, _DefaultRoot):
            raise GroupError(f"{function}: {name}={rank} and group_{name}={group_rank} are given, expected one of them")
        index = _integer(group_rank)
        if index is None or not 0 <= index < group.size:
            raise GroupError(
                f"{function}: group_{name} must be an index from 0 to {group.size - 1} of group {group.name}, "
                f"got {group_rank!r}"
            )
        return index
    found = _integer(rank)
    if found is None or found not in group.ranks:
        raise GroupError(
            f"{function}: {name} must be a global rank of group {group.name}, one of {list(group.ranks)}, got {rank!r}"
        )
    return group.ranks.index(found)


def storage(function: str, name: str, tensor: torch.Tensor, written: bool) -> None:
    """Refuse what is not a plain tensor in memory and, where it is written, one whose elements share memory."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        raise ArgumentError(
            f"{function}: {name} must be a dense tensor in memory, got a {tensor.layout} tensor "
            f"({name_of(tensor.dtype)} on {tensor.device})"
        )
    if not _in_memory(tensor):
        raise ArgumentError(
            f"{function}: {name} must be a dense tensor in memory, got a {type(tensor).__name__} without memory of its "
            "own, such as torch.func (vmap, grad), FakeTensorMode or a DTensor gives"
        )
    if written and _overlaps(tensor):
        raise ShapeError(
            f"{function}: {name} is written, but its elements share memory (shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}, as expand() gives); clone() it"
        )


def alike(function: str, name: str, tensor: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    """Refuse two tensors that differ in dtype or device."""
    if tensor.dtype != like.dtype:
        raise DTypeError(
            f"{function}: {name} is {name_of(tensor.dtype)}, expected {name_of(like.dtype)} as {like_name}"
        )
    if tensor.device != like.device:
        raise ArgumentError(f"{function}: {name} is on {tensor.device}, expected {like.device} as {like_name}")


def gathered_shape(
    function: str, whole_name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor, size: int
) -> None:
    """Refuse a tensor that does not hold ``size`` times ``part``, concatenated along dim 0 or stacked."""
    alike(function, whole_name, whole, part_name, part)
    shape = list(part.shape)
    concatenated = [size * shape[0], *shape[1:]] if shape else [size]
    if list(whole.shape) not in (concatenated, [size, *shape]):
        raise ShapeError(
            f"{function}: {whole_name} is {list(whole.shape)}, expected {concatenated} or {[size, *shape]}: "
            f"{size} ranks, {part_name} is {describe(part)}"
        )


def tensor_list(
    function: str, name: str, tensors: Any, like_name: str, like: torch.Tensor, size: int, written: bool
) -> None:
    """Refuse what is not a list of ``size`` tensors that look like ``like``."""
    if not isinstance(tensors, Sequence) or len(tensors) != size:
        got = f"{len(tensors)} tensors" if isinstance(tensors, Sequence) else f"{tensors!r}"
        raise ArgumentError(f"{function}: {name} must be a list of {size} tensors, one a rank, got {got}")
    for index, tensor in enumerate(tensors):
        storage(function, f"{name}[{index}]", tensor, written)
        alike(function, f"{name}[{index}]", tensor, like_name, like)
        if tensor.shape != like.shape:
            raise ShapeError(
                f"{function}: {name}[{index}] is {list(tensor.shape)}, expected {list(like.shape)} as {like_name}"
            )


def same_on_all(function: str, what: str, ranks: Sequence[int], values: Sequence[Any]) -> None:
    """Refuse values, one of each rank and known to all, that differ; so every rank raises the same."""
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != values[0]]
    if odd:
        theirs = values[list(ranks).index(odd[0])]
        raise MismatchError(
            f"{function}: ranks disagree on {what}: rank {ranks[0]} has {values[0]!r}, rank {odd[0]} has {theirs!r} "
            f"(ranks that differ from rank {ranks[0]}: {odd})"
        )


def _integer(value: Any) -> int | None:
    """An int, also NumPy's; None where it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _in_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements have addresses."""
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # torch: no storage
        return False


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may have the same address."""
    if tensor.numel() == 0:
        return False
    reach = 0  # the largest offset that the dimensions looked at so far can give
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
