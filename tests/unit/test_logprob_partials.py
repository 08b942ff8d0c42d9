"""The message of a shard: layout without negotiation, exact ranges, merge in column order."""

from __future__ import annotations

import pytest
import torch

from cupy_coll import MismatchError
from cupy_coll.logprob.partials import MessageLayout, Shard, merge_messages, merge_tiles, shard_message

INF = float("inf")


@pytest.mark.parametrize(("ranks", "slots"), [(1, 16), (2, 8), (3, 1), (4, 4), (5, 1), (8, 2), (16, 1), (32, 1)])
@pytest.mark.parametrize("entropy", [False, True])
def test_length_follows_from_the_ranks_alone(ranks, slots, entropy):
    for dtype, header in ((torch.float32, 8), (torch.float64, 4)):
        layout = MessageLayout(ranks, 7, entropy, dtype)
        assert layout.length == header + 7 * (slots * (3 if entropy else 2) + 1)


@pytest.mark.parametrize(
    ("shard", "tiles"),
    [
        (Shard(1, 4, 8, 8, 16), 4),  # an equal share that tile bounds cut evenly
        (Shard(1, 4, 6, 6, 12), 1),  # tile bounds do not
        (Shard(1, 4, 8, 9, 17), 1),  # not where an equal share would be
        (Shard(3, 4, 8, 24, 28), 1),  # padding: narrower than the others
        (Shard(0, 4, 8, 0, 0), 1),  # nothing
        (Shard(2, 3, 8, 16, 24), 1),  # no tiles for three
        (Shard(1, 2, 16), 8),  # no range given: an equal share
    ],
)
def test_tiles_of_a_shard(shard, tiles):
    assert shard.tiles == tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_packed_is_unpacked(dtype):
    """Ranges beyond what a float32 can count arrive exactly."""
    layout = MessageLayout(2, 3, False, dtype)
    tiles = torch.arange(3 * 8 * 2, dtype=dtype).view(3, 8, 2)
    big = 2**40 + 1
    first = layout.pack(Shard(0, 2, 8, 0, 8), tiles, torch.tensor([1, 2, 3], dtype=dtype))
    second = layout.pack(Shard(1, 2, big, big, 2 * big), tiles[:, :1] + 100, torch.zeros(3, dtype=dtype))
    headers, together, logits = layout.unpack(torch.cat([first, second]))
    assert headers == [[0, 8, 8, 3], [big, 2 * big, big, 3]]
    assert torch.equal(together[:, :8], tiles)
    assert torch.equal(together[:, 8], tiles[:, 0] + 100)
    assert torch.equal(together[:, 9:, 0], torch.full((3, 7), -INF, dtype=dtype))
    assert not together[:, 9:, 1].any()
    assert logits.tolist() == [[1, 2, 3], [0, 0, 0]]


def test_tiles_merge_in_column_order():
    # exp(0), exp(-1): sums of powers of two, exact in any order but one
    tiles = torch.tensor([[[0.0, 1.0], [0.0, 2.0**-24], [0.0, 2.0**-24]]])
    assert merge_tiles(tiles, 1.0)[0].tolist() == [0.0, 1.0]  # (1 + e) + e, each lost; 1 + (e + e) is not
    assert merge_tiles(tiles.flip(1), 1.0)[0].tolist() == [0.0, 1 + 2.0**-23]


def test_tiles_without_anything_and_with_nan():
    nothing, one, nan = [-INF, 0.0, 0.0], [2.0, 3.0, -1.0], [float("nan")] * 3
    merged = merge_tiles(torch.tensor([[nothing, one], [nothing, nothing], [nothing, nan], [one, nan]]), 1.0)
    assert merged[0].tolist() == one
    assert merged[1].tolist() == nothing
    assert merged[2:].isnan().all()


def test_different_numbers_of_rows_are_seen():
    layout = MessageLayout(2, 2, False, torch.float32)
    message = shard_message(torch.zeros(2, 8), None, Shard(0, 2, 8, 0, 8), layout)
    other = message.clone()
    other[: layout.header_length].view(torch.int64)[3] = 1
    with pytest.raises(MismatchError, match="1 rows on rank 1 of the group, 2 on this one"):
        merge_messages("logprob", torch.cat([message, other]), None, layout)
