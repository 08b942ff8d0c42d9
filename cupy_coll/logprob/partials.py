"""A shard's one-read summary of its logits, the message that carries it, and the merge of all messages.

The vocabulary [0, V) is cut into 16 tiles of equal width, counted from the global column 0. For each row and
tile a shard computes ``m`` = max x and ``s`` = sum exp(x - m), with entropy also ``t`` = sum (x - m) exp(x - m),
and the target's logit where it owns it. One all-gather of these numbers is all that a forward sends; every rank
then merges the tiles in column order, and so gets the same bits.

Message of one rank, in the compute dtype (float32, or float64 for float64 logits)::

    [ header: 4 int64, bit for bit | row 0 | row 1 | ... ]
    header: start, end, columns, rows
    row:    slots x (m, s[, t]), logit of the target (or of each of several)

The number of slots follows from the number of ranks alone, so ranks never negotiate a layout: 16 / ranks where
that divides, else 1. A rank whose range looks like an equal share that tile bounds cut evenly fills its slots
with its tiles; any other rank puts its whole shard into the first and (-inf, 0) into the rest.

Why the bits are the same for any number of rows, chunk, alignment, and any tensor-parallel size that cuts
between tiles: a tile is summed by ``torch.sum`` over the last dimension of a contiguous buffer, in which the
order of additions follows from the index in the row alone; elementwise functions give the same bits wherever an
element lies (both tried for the AVX-512, AVX2 and plain paths of torch). torch splits the sum of a single row of
more than 32,768 numbers over threads: tiles are cut into sub-tiles of 16,384 columns, merged in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cupy_coll.errors import ArgumentError, MismatchError
from cupy_coll.logprob.rows import Rows, block_elements, row_blocks

__all__ = [
    "IGNORED",
    "TILES",
    "MessageLayout",
    "Shard",
    "Summary",
    "check_ranges",
    "check_rows",
    "compute_dtype",
    "merge_messages",
    "merge_tiles",
    "owners_of",
    "pivot_of",
    "shard_message",
    "sum_in_order",
    "tp_invariant",
]

TILES = 16
SUBTILE_COLUMNS = 16_384
STREAMS = 8
IGNORED = -100
"""Target of a row that counts for nothing: value 0, gradient zero."""

LOWEST = -1e4
"""exp(LOWEST) is 0 in every compute dtype; stands for -inf where 0 * (-inf) has to be 0."""

_NEG_INF = float("-inf")
_LOWEST_FLOAT32, _LOWEST_FLOAT64 = (torch.finfo(dtype).min for dtype in (torch.float32, torch.float64))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits of ``dtype`` are summed, sent and returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def slots_per_rank(ranks: int) -> int:
    """Tile slots that each of ``ranks`` members has in its message."""
    return TILES // ranks if TILES % ranks == 0 else 1


def tp_invariant(vocab_size: int, tp_size: int) -> bool:
    """Whether this layout is one of those that give the same bits whatever the tensor-parallel size.

    Log-probabilities, entropies and gradients over a vocabulary of ``vocab_size`` columns in ``tp_size``
    equal shards are then bitwise those of the same vocabulary in 1, 2, 4, 8 or 16 equal shards. (They are the
    same on all ranks, and for any batch and chunk, in every layout.)

    Raises:
        ArgumentError: a size is below 1.
    """
    for name, value in (("vocab_size", vocab_size), ("tp_size", tp_size)):
        if value < 1:
            raise ArgumentError(f"tp_invariant: {name} is {value}, expected at least 1")
    return vocab_size % TILES == 0 and TILES % tp_size == 0


@dataclass(frozen=True)
class Shard:
    """What one rank holds: columns [start, end) of the vocabulary, as the first columns of its logits.

    ``start`` is None where the caller does not say (log-softmax, entropy): the ranks' shards then simply
    follow each other, and no ranges are compared.
    """

    rank: int  # index in the group
    ranks: int
    columns: int  # of the local logits, padding included
    start: int | None = None
    end: int | None = None

    @property
    def width(self) -> int:
        """Columns that count. A range that does not fit its columns is clipped here; the merge reports it."""
        if self.start is None or self.end is None:
            return self.columns
        return min(max(self.end - self.start, 0), self.columns)

    @property
    def first_column(self) -> int:
        return self.rank * self.width if self.start is None else self.start

    @property
    def tiles(self) -> int:
        """Tiles that the shard is summed in: all slots of an equal share, else 1."""
        slots = slots_per_rank(self.ranks)
        equal_share = self.first_column == self.rank * self.width
        return slots if equal_share and self.width and self.width % slots == 0 else 1

    def local_target(self, target: Tensor) -> Tensor:
        """Column of each target in this shard, int64; -100 stays, -1 where another rank owns it (or nobody)."""
        local = target.to(torch.int64) - self.first_column
        elsewhere = torch.where(target == IGNORED, IGNORED, -1)
        return torch.where((local >= 0) & (local < self.width), local, elsewhere)


@dataclass(frozen=True)
class MessageLayout:
    """Where things lie in a message; follows from what all ranks know without asking."""

    ranks: int
    rows: int
    entropy: bool
    dtype: torch.dtype
    targets: int = 1  # of a row

    HEADER_INTS = 4
    MAXIMA: tuple[int, ...] = (0,)
    """The fields of a slot that are -inf where it is empty; the others are 0."""

    @property
    def slots(self) -> int:
        return slots_per_rank(self.ranks)

    @property
    def fields(self) -> int:
        return 3 if self.entropy else 2

    @property
    def row_length(self) -> int:
        return self.slots * self.fields + self.targets

    @property
    def header_length(self) -> int:
        return self.HEADER_INTS * 8 // self.dtype.itemsize

    @property
    def length(self) -> int:
        return self.header_length + self.rows * self.row_length

    def pack(self, shard: Shard, tiles: Tensor, target_logit: Tensor) -> Tensor:
        """Build the message from tiles [rows, shard.tiles, fields] and target_logit [rows] or [rows, targets]."""
        message = torch.empty(self.length, dtype=self.dtype, device=tiles.device)
        header = torch.tensor([shard.start or 0, shard.end or 0, shard.columns, self.rows])
        message[: self.header_length].view(torch.int64).copy_(header)
        body = message[self.header_length :].view(self.rows, self.row_length)
        slots = body[:, : self.slots * self.fields].view(self.rows, self.slots, self.fields)
        slots[:, : shard.tiles] = tiles
        slots[:, shard.tiles :] = 0
        for field in self.MAXIMA:
            slots[:, shard.tiles :, field] = _NEG_INF
        body[:, self.slots * self.fields :] = target_logit.view(self.rows, self.targets)
        return message

    def unpack(self, gathered: Tensor) -> tuple[list[list[int]], Tensor, Tensor]:
        """Split the messages into headers, tiles [rows, ranks * slots, fields] and logits [ranks, rows * targets]."""
        messages = gathered.view(self.ranks, self.length)
        header = messages[:, : self.header_length].flatten().clone().view(torch.int64)
        body = messages[:, self.header_length :].view(self.ranks, self.rows, self.row_length)
        slots = body[..., : self.slots * self.fields].unflatten(-1, (self.slots, self.fields))
        tiles = slots.transpose(0, 1).reshape(self.rows, self.ranks * self.slots, self.fields)
        logits = body[..., self.slots * self.fields :].flatten(1)
        return header.view(self.ranks, self.HEADER_INTS).tolist(), tiles, logits


def pivot_of(maximum: Tensor, out: Tensor | None = None) -> Tensor:
    """The maximum to subtract: finite where it is -inf, so that -inf - pivot is -inf, not NaN. NaN stays NaN."""
    return torch.clamp(maximum, min=_LOWEST_FLOAT64 if maximum.dtype == torch.float64 else _LOWEST_FLOAT32, out=out)


def sum_in_order(values: Tensor) -> Tensor:
    """Sum over the last dimension, from the first to the last."""
    total = values[..., 0].clone()
    for i in range(1, values.shape[-1]):
        total += values[..., i]
    return total


def merge_tiles(tiles: Tensor, scale: float) -> Tensor:
    """Merge tiles [..., n, fields] in column order into one [..., fields]."""
    m, s = tiles[..., 0], tiles[..., 1]
    maximum = m.amax(-1)
    delta = (m - pivot_of(maximum).unsqueeze(-1)).mul_(scale)
    factor = delta.exp()
    merged = [maximum, sum_in_order(s * factor)]
    if tiles.shape[-1] == 3:
        moved = tiles[..., 2] + delta.clamp_(min=LOWEST) * s
        merged.append(sum_in_order(moved * factor))
    return torch.stack(merged, -1)


@torch.inference_mode()  # views of blocks cost less where autograd does not watch them
def _write_partials(
    blocks: Iterable[Tensor], sizes: list[int], buffers: list[Tensor], scale: float, out: Tensor
) -> None:
    """(m, s[, t]) over the columns of blocks of rows.

    Args:
        blocks: each [rows, tiles, streams, columns / streams].
        sizes: the rows of each.
        buffers: one, or with entropy two, of at least as many rows as any block and otherwise its shape.
        out: [fields, sum of sizes, tiles], written.
    """
    pivots = torch.empty_like(out[0])
    # Views made in one call each: made block by block they would cost a tenth of the arithmetic.
    cut = [whole.split(sizes) for whole in (*out, pivots, pivots[..., None, None])]
    for x, m, s, *t, pivot, pivot_of_columns in zip(blocks, *cut, strict=True):
        rows = x.shape[0]
        d, *others = buffers if rows == buffers[0].shape[0] else (buffer[:rows] for buffer in buffers)
        widened = x.dtype != d.dtype
        if widened:
            torch.amax(d.copy_(x).flatten(-2), -1, out=m)
        else:  # not in the cache yet: memory serves several streams faster than one
            torch.amax(x.amax(-2), -1, out=m)
        pivot_of(m, out=pivot)
        torch.sub(d if widened else x, pivot_of_columns, out=d)
        if scale != 1.0:
            d.mul_(scale)
        if not t:
            torch.sum(d.exp_().flatten(-2), -1, out=s)
            continue
        e = torch.exp(d, out=others[0])
        torch.sum(e.flatten(-2), -1, out=s)
        torch.sum(e.mul_(d.clamp_(min=LOWEST)).flatten(-2), -1, out=t[0])


def _shard_tiles(
    logits: Tensor,
    rows: Rows,
    shard: Shard,
    active: Tensor | None,
    layout: MessageLayout,
    scale: float,
    chunk_size: int | None,
) -> Tensor:
    """Partials [rows in memory order, shard.tiles, fields] in one read of the logits."""
    tiles, width = shard.tiles, shard.width // shard.tiles
    columns = min(max(width, 1), SUBTILE_COLUMNS)
    firsts = range(0, max(width, 1), columns)
    dtype, device = layout.dtype, logits.device
    parts = torch.zeros(len(firsts), layout.fields, rows.count, tiles, dtype=dtype, device=device)  # of each sub-tile
    parts[:, 0] = _NEG_INF
    most = block_elements(device)
    together = max(1, min(tiles, most // columns))
    step = min(max(1, most // (together * columns)), chunk_size or most)
    buffers = [torch.empty(step * together * columns, dtype=dtype, device=device) for _ in range(layout.fields - 1)]
    for first, (run,) in rows.runs(logits[..., : shard.width]) if width else ():
        by_tile = run.unflatten(-1, (tiles, width))
        blocks = list(row_blocks(run.shape[0], step, None if active is None else active[first : first + run.shape[0]]))
        sizes = [block.stop - block.start if isinstance(block, slice) else block.numel() for block in blocks]
        all_rows = sum(sizes) == run.shape[0]
        for part, column in zip(parts, firsts, strict=True):
            for tile in range(0, tiles, together):
                some = slice(tile, tile + together)
                source = by_tile[:, some, column : column + columns]
                source = source.unflatten(-1, (1 if source.shape[-1] % STREAMS else STREAMS, -1))
                shape = (step, *source.shape[1:])
                scratch = [buffer[: math.prod(shape)].view(shape) for buffer in buffers]
                result = part[:, first : first + run.shape[0], some]
                into = result if all_rows else torch.empty_like(result[:, : sum(sizes)])
                _write_partials((source[block] for block in blocks), sizes, scratch, scale, into)
                if not all_rows:
                    for block, values in zip(blocks, into.split(sizes, 1), strict=True):
                        result[:, block] = values
    by_subtile = parts.permute(2, 3, 0, 1)
    return by_subtile.squeeze(2) if len(firsts) == 1 else merge_tiles(by_subtile, scale)


def _target_logits(logits: Tensor, rows: Rows, local: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits of the targets ``local`` [rows in memory order(, targets)] where this rank owns them, else 0."""
    out = torch.zeros(local.shape, dtype=dtype, device=logits.device)
    for first, (run,) in rows.runs(logits):
        columns = local[first : first + run.shape[0]]
        mine = columns >= 0
        row, *_ = mine.nonzero(as_tuple=True)
        out[first : first + run.shape[0]][mine] = run[row, columns[mine]].to(dtype)
    return out


def shard_message(
    logits: Tensor,
    local_target: Tensor | None,
    shard: Shard,
    layout: MessageLayout,
    *,
    scale: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Summarise this rank's logits [..., columns] in one read; the message to gather, [layout.length].

    Args:
        local_target: [...] or [..., layout.targets] as :meth:`Shard.local_target` gives it, or None. Rows of which
            all targets are ignored are not read, unless for their entropy.
        scale: 1 / temperature.
        chunk_size: bounds the rows of a block.
    """
    logits = logits.detach()
    rows = Rows(logits)
    active = None
    target_logit = torch.zeros(rows.count, layout.targets, dtype=layout.dtype, device=logits.device)
    if local_target is not None:
        local = rows.flatten(local_target)
        target_logit = _target_logits(logits, rows, local, layout.dtype)
        active = None if layout.entropy else (local != IGNORED).view(rows.count, layout.targets).any(-1)
    tiles = _shard_tiles(logits, rows, shard, active, layout, scale, chunk_size)
    return layout.pack(shard, rows.restore(tiles), rows.restore(target_logit))


@dataclass(frozen=True)
class Summary:
    """What all shards together say of each row, the same bits on every rank; [rows] in the caller's order."""

    maximum: Tensor
    log_sum: Tensor  # of exp((x - maximum) * scale): kept apart from the maximum, for precision
    logprob: Tensor | None  # [rows * targets]
    entropy: Tensor | None


def check_rows(function: str, headers: list[list[int]], rows: int) -> None:
    for rank, (_, _, _, its_rows) in enumerate(headers):
        if its_rows != rows:
            raise MismatchError(
                f"{function}: vocab_parallel_logits has {its_rows} rows on rank {rank} of the group, {rows} on this one"
            )


def check_ranges(function: str, headers: list[list[int]]) -> None:
    """Raise, on every rank alike, where the ranks' ranges do not fit their columns or each other."""
    expected = 0
    for rank, (start, end, columns, _) in enumerate(headers):
        if not 0 <= start <= end or end - start > columns:
            raise ArgumentError(
                f"{function}: vocab_start_index and vocab_end_index of rank {rank} of the group are [{start}, {end}), "
                f"expected a range within the vocabulary of at most the {columns} columns of its logits"
            )
        if start == end:
            continue  # owns nothing, wherever it says that nothing lies
        if start != expected:
            fault = "a gap" if start > expected else "an overlap or a wrong order"
            ranges = ", ".join(f"[{h[0]}, {h[1]})" for h in headers)
            raise MismatchError(
                f"{function}: the vocabulary ranges of the group's ranks have {fault}: rank {rank} begins at {start}, "
                f"expected {expected} (ranges in rank order: {ranges})"
            )
        expected = end


def owners_of(function: str, target: Tensor, headers: list[list[int]], name: str = "target") -> Tensor:
    """The rank [rows] that owns each target; 0 for ignored ones. Raises where nobody does."""
    ends: list[int] = []
    for start, end, *_ in headers:  # a rank that owns nothing ends where the one before it does
        ends.append(end if end > start else ends[-1] if ends else 0)
    lost = ((target < 0) | (target >= ends[-1])) & (target != IGNORED)
    if bool(lost.any()):
        raise ArgumentError(
            f"{function}: {name} holds {int(target[lost][0])}, expected {IGNORED} or a token of the vocabulary "
            f"[0, {ends[-1]}) (no rank owns {int(lost.sum())} of {target.numel()} targets)"
        )
    bounds = torch.tensor(ends, device=target.device)
    owner = torch.searchsorted(bounds, target.reshape(-1).to(torch.int64), right=True)
    return torch.where(target.reshape(-1) == IGNORED, 0, owner)


def merge_messages(
    function: str, gathered: Tensor, target: Tensor | None, layout: MessageLayout, *, scale: float = 1.0
) -> Summary:
    """Merge all ranks' messages [ranks * layout.length] in column order.

    Args:
        function: the caller's name, for errors.
        gathered: the messages in rank order, the same bytes on every rank.
        target: [...] or [..., layout.targets] global token ids, the same on every rank, or None.

    Raises:
        ArgumentError: a rank's range does not fit its columns; a target that nobody owns.
        MismatchError: ranges with a gap, an overlap or in a wrong order; different numbers of rows.
    """
    headers, tiles, target_logits = layout.unpack(gathered)
    check_rows(function, headers, layout.rows)
    if target is not None:
        check_ranges(function, headers)
        owner = owners_of(function, target, headers)
    merged = merge_tiles(tiles, scale)
    maximum, total = merged[:, 0].contiguous(), merged[:, 1]
    log_sum = total.log()
    logprob = None
    if target is not None:
        target_logit = target_logits.gather(0, owner.unsqueeze(0)).squeeze(0)
        by_row = target_logit.view(layout.rows, layout.targets) - maximum.unsqueeze(-1)
        logprob = by_row.mul_(scale).sub_(log_sum.unsqueeze(-1)).flatten()
        logprob.masked_fill_(target.reshape(-1) == IGNORED, 0.0)
    entropy = log_sum - merged[:, 2] / total if layout.entropy else None
    return Summary(maximum, log_sum, logprob, entropy)
