"""Pure index maps: which token a position predicts, which position stands where. No communication.

Sequences are described by where each begins, ``cu_seqlens`` (int64 [sequences + 1], from 0 to the number of
positions). Sequences of one length S, unpacked, are the case ``[0, S]``.

Split over ``size`` ranks for causal attention, each sequence is cut into 2 * size equal parts, of which rank r holds
parts r and 2 * size - 1 - r: every rank then has as much attention to compute as any other. A rank's parts of all
sequences follow each other in its memory.

All maps are arithmetic on whole tensors, on the device of ``cu_seqlens``, without a look at its values on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "next_token_index",
    "packed_next_token_index",
    "place_of_position",
    "position_of_place",
    "unpacked_positions",
]


def next_token_index(tokens: int, positions: int) -> Tensor:
    """For each of ``positions`` of a sequence, the index among its ``tokens`` of the token that it predicts.

    Position i predicts token i + 1; the last token's position, and the padding after it, predict none.

    Returns:
        int64 [positions]; -1 where there is none.
    """
    index = torch.arange(1, positions + 1)
    return torch.where(index < tokens, index, -1)


def packed_next_token_index(cu_seqlens: Tensor, positions: int) -> Tensor:
    """For each position of packed sequences the position of the token that it predicts, in the same sequence.

    Returns:
        int64 [positions]; -1 at each sequence's last position.
    """
    begins = torch.zeros(positions + 1, dtype=torch.bool, device=cu_seqlens.device)
    begins[cu_seqlens] = True
    following = torch.arange(1, positions + 1, device=cu_seqlens.device)
    return torch.where(begins[1:], -1, following)


def _sequence_of(cu_seqlens: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """First position and length of the sequence that holds each of ``index``."""
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)  # passes over empty ones
    first = cu_seqlens[sequence]
    return first, cu_seqlens[sequence + 1] - first


def position_of_place(cu_seqlens: Tensor, positions: int, rank: int, size: int) -> Tensor:
    """The position in the packing of each element that ``rank`` of ``size`` holds, int64 [positions / size]."""
    place = torch.arange(positions // size, device=cu_seqlens.device)
    first, length = _sequence_of(cu_seqlens, place * size)
    part = length // (2 * size)  # positions of a part
    offset = place - first // size
    second = offset >= part  # of the two parts
    skipped = torch.where(second, (2 * size - 2 - rank) * part, rank * part)  # parts before, but for the rank's first
    return first + skipped + offset


def place_of_position(cu_seqlens: Tensor, positions: int, size: int) -> tuple[Tensor, Tensor]:
    """For each position of the packing the rank that holds it, and where in that rank's memory.

    Returns:
        (rank, place), each int64 [positions].
    """
    position = torch.arange(positions, device=cu_seqlens.device)
    first, length = _sequence_of(cu_seqlens, position)
    part = length // (2 * size)
    which = torch.div(position - first, part, rounding_mode="floor")  # of the 2 * size parts
    rank = torch.minimum(which, 2 * size - 1 - which)
    within = position - first - which * part
    return rank, first // size + within + torch.where(which >= size, part, 0)


def unpacked_positions(cu_seqlens: Tensor, columns: int) -> Tensor:
    """Packed sequences as rows: the position of column c of each, which is to predict token c + 1.

    Returns:
        int64 [sequences, columns]; -1 from a sequence's last position on.
    """
    column = torch.arange(columns, device=cu_seqlens.device)
    first, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    position = first + column
    return torch.where(position < end - 1, position, -1)
