"""Index maps, by hand and against loops over sequences."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_coll.layout import (
    next_token_index,
    packed_next_token_index,
    place_of_position,
    position_of_place,
    unpacked_positions,
)


@st.composite
def packings(draw):
    """(size, lengths): lengths that size ranks can split, empty ones and ones of a single part among them."""
    size = draw(st.integers(1, 4))
    parts = draw(st.lists(st.integers(0, 4), max_size=6))
    return size, [2 * size * n for n in parts]


def cu(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])


def slow_order(lengths, size):
    """Positions by rank, a sequence at a time."""
    order, first = [[] for _ in range(size)], 0
    for length in lengths:
        part = length // (2 * size)
        parts = [list(range(first + i * part, first + (i + 1) * part)) for i in range(2 * size)]
        for rank in range(size):
            order[rank] += parts[rank] + parts[2 * size - 1 - rank]
        first += length
    return order


def test_next_token_index():
    assert next_token_index(4, 4).tolist() == [1, 2, 3, -1]
    assert next_token_index(3, 6).tolist() == [1, 2, -1, -1, -1, -1]
    assert next_token_index(1, 2).tolist() == [-1, -1]
    assert next_token_index(0, 0).tolist() == []


def test_packed_next_token_index():
    assert packed_next_token_index(torch.tensor([0, 3, 5]), 5).tolist() == [1, 2, -1, 4, -1]
    assert packed_next_token_index(torch.tensor([0, 0, 1, 1, 3, 3]), 3).tolist() == [-1, 2, -1]
    assert packed_next_token_index(torch.tensor([0]), 0).tolist() == []


def test_two_ranks_hold_the_outer_and_the_inner_parts():
    whole = torch.tensor([0, 8])
    assert position_of_place(whole, 8, 0, 2).tolist() == [0, 1, 6, 7]
    assert position_of_place(whole, 8, 1, 2).tolist() == [2, 3, 4, 5]
    rank, place = place_of_position(whole, 8, 2)
    assert rank.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert place.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_unpacked_positions():
    positions = unpacked_positions(torch.tensor([0, 3, 3, 4, 9]), 3)
    assert positions.tolist() == [[0, 1, -1], [-1] * 3, [-1] * 3, [4, 5, 6]]
    assert unpacked_positions(torch.tensor([0, 3]), 0).shape == (1, 0)
    assert unpacked_positions(torch.tensor([0]), 2).shape == (0, 2)


@settings(max_examples=60, deadline=None)
@given(packings())
def test_order_of_context_parallel_ranks(packing):
    size, lengths = packing
    begins, total = cu(lengths), sum(lengths)
    expected = slow_order(lengths, size)
    assert [position_of_place(begins, total, rank, size).tolist() for rank in range(size)] == expected
    rank, place = place_of_position(begins, total, size)
    assert [expected[r][p] for r, p in zip(rank.tolist(), place.tolist(), strict=True)] == list(range(total))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=6), st.integers(0, 9))
def test_packed_sequences_by_a_loop(lengths, columns):
    begins, total = cu(lengths), sum(lengths)
    following, rows, first = [], [], 0
    for length in lengths:
        following += [*range(first + 1, first + length), -1][:length]
        rows.append([first + c if c + 1 < length else -1 for c in range(columns)])
        first += length
    assert packed_next_token_index(begins, total).tolist() == following
    assert unpacked_positions(begins, columns).tolist() == rows
    assert position_of_place(begins, total, 0, 1).tolist() == list(range(total))
