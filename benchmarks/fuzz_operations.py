"""The operations of the fuzz program, each with its right answer, computed apart from cupy_coll."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fuzz_values import (
    DTYPES,
    FLOATS,
    UNSIGNED,
    WITH_GRADIENT,
    Buffer,
    difference,
    joined,
    of_bytes,
    part_of,
    reduced,
    reductions_of,
)
from torch import Tensor

import cupy_coll as cc

LONGEST_FLIGHT = 6  # operations that are started before an asynchronous one is waited for, at most

Groups = dict[str, list[list[int]]]  # a mode's groups: one, or those of a mesh, all of one size
Check = Callable[[], Iterator[str]]


@dataclass
class Started:
    """An operation that has been called: what is in flight, and what is right when it has ended."""

    check: Check
    work: Any = None


class Drawn:
    """One operation as all ranks draw it. ``rng`` gives all ranks the same, ``own`` each rank its own."""

    def __init__(self, seed: int, number: int, groups: Groups, rank: int) -> None:
        self.seed, self.number, self.rank = seed, number, rank
        self.rng = random.Random(f"{seed} {number}")
        self.own = random.Random(f"{seed} {number} {rank}")
        self.mode = self.rng.choice(list(groups))
        self.name = self.rng.choice(list(OPERATIONS))
        if "sequence_parallel" in self.name:
            self.mode = cc.ParallelMode.SEQUENCE_PARALLEL
        self.size = len(groups[self.mode][0])
        if self.name == "send" and self.size == 1:
            self.name = "barrier"
        self.ranks = next((ranks for ranks in groups[self.mode] if rank in ranks), None)
        self.is_async = self.rng.random() < 0.5
        self.dropped = self.rng.random() < 0.3
        self.flight = self.rng.randint(1, LONGEST_FLIGHT)
        self.expanded = self.rng.random() < 0.1

    @property
    def index(self) -> int:
        assert self.ranks is not None
        return self.ranks.index(self.rank)

    @property
    def members(self) -> list[int]:
        assert self.ranks is not None
        return self.ranks

    def group(self) -> Any:
        """The group as its mode or as itself."""
        if self.mode == cc.CommMode.GLOBAL and self.own.random() < 0.2:
            return None
        return self.mode if self.own.random() < 0.5 else cc.CommContext().get_group(self.mode)

    def root(self, name: str) -> tuple[int, dict[str, int]]:
        """A root's index, and the arguments that say so, as a global rank or as an index."""
        index = self.rng.randrange(self.size)
        as_index = self.own.random() < 0.5
        return index, {f"group_{name}": index} if as_index else {name: self.members[index]}

    # What is in the tensors.

    def elements(self, dtype: torch.dtype, copies: int = 1) -> int:
        """How many, where ``copies`` tensors of so many elements are in memory at once."""
        kind = self.rng.choices(["zero", "one", "few", "some", "many", "huge"], [5, 5, 50, 30, 9.5, 0.5])[0]
        most = {"zero": 0, "one": 1, "few": 60, "some": 3_000, "many": 400_000 // dtype.itemsize}
        if kind == "huge":
            return self.rng.randint(5_000_000, 9_000_000) // dtype.itemsize // copies
        return self.rng.randint(min(1, most[kind]), most[kind])

    def shape(self, elements: int, least: int = 0) -> list[int]:
        """About so many elements, in ``least`` to 4 dimensions."""
        dims = self.rng.randint(least, 4)
        if not dims:
            return []
        lengths = [1] * dims
        for position in self.rng.sample(range(dims), dims - 1):
            lengths[position] = self.rng.choice([1, 2, 3, 5, 8])
        rest = elements // int(np.prod(lengths))
        lengths[lengths.index(1) if 1 in lengths else 0] *= rest if elements == 0 else max(1, rest)
        return lengths

    def generator(self, rank: int, salt: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.number, rank, salt])

    def bits(self, shape: Sequence[int], dtype: torch.dtype, rank: int, salt: int = 0) -> Tensor:
        """Any bytes: NaNs with a payload and negative zeros among them."""
        stretched = self.expanded and len(shape) > 0 and shape[0] > 1
        drawn = [1, *shape[1:]] if stretched else list(shape)
        raw = self.generator(rank, salt).integers(0, 256, int(np.prod(drawn)) * dtype.itemsize, np.uint8)
        if dtype == torch.bool:
            raw &= 1
        return of_bytes(raw, dtype).view(drawn).expand(shape)

    def numbers(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int, reduction: str = "", salt: int = 0
    ) -> Tensor:
        """What can be reduced: rounding, overflow of integers and, for MIN and MAX, NaN and infinity occur."""
        if not dtype.is_floating_point and not dtype.is_complex:
            if reduction != "AVG" or dtype.itemsize < 8:
                return self.bits(shape, dtype, rank, salt)
            least = 0 if dtype in UNSIGNED else -(2**58)  # a sum that does not fit into 64 bits has no average
            whole = self.generator(rank, salt).integers(least, 2**58, int(np.prod(shape)))
            return torch.from_numpy(whole).to(dtype).view(shape)
        generator = self.generator(rank, salt)
        elements = int(np.prod(shape))
        if dtype.is_complex:
            pairs = generator.integers(-4, 5, (2, elements))
            return torch.from_numpy(pairs[0] + 1j * pairs[1]).to(dtype).view(shape)
        values = torch.from_numpy(generator.standard_normal(elements))
        if reduction in ("MIN", "MAX"):
            for special in (float("nan"), float("inf"), float("-inf")):
                values[torch.from_numpy(generator.random(elements) < 0.02)] = special
        return values.to(dtype).view(shape)

    def each(self, make: Callable[[int], Tensor]) -> list[Tensor]:
        """What each member puts in."""
        return [make(rank) for rank in self.members]

    def read(self, values: Tensor) -> Buffer:
        return Buffer(values, self.own, written=False)

    def write(self, values: Tensor) -> Buffer:
        return Buffer(values, self.own, written=True)

    def blank(self, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """A buffer for an output, with something else in it."""
        fill = np.full(int(np.prod(shape)) * dtype.itemsize, 1, np.uint8)
        return self.write(of_bytes(fill, dtype).view(shape))

    def object(self, rank: int, salt: int, depth: int = 2) -> Any:
        rng = random.Random(f"{self.seed} {self.number} {rank} {salt}")
        return self._object(rng, depth)

    def _object(self, rng: random.Random, depth: int) -> Any:
        kind = rng.choice(["int", "text", "none", "float", "array", "tensor", "list", "dict", "bytes"])
        if kind in ("list", "dict") and depth:
            items = [self._object(rng, depth - 1) for _ in range(rng.randint(0, 4))]
            return items if kind == "list" else {f"key {i}": item for i, item in enumerate(items)}
        length = rng.choice([0, 1, 3, 100, 100, 20_000])
        generator = np.random.default_rng(rng.getrandbits(60))
        simple: dict[str, Callable[[], Any]] = {
            "int": lambda: rng.getrandbits(rng.choice([3, 60, 200])),
            "text": lambda: "äx" * rng.choice([0, 5, 400]),
            "float": rng.random,
            "array": lambda: generator.integers(0, 99, (length, 2)),
            "tensor": lambda: torch.from_numpy(generator.standard_normal(length)).to(rng.choice(FLOATS)),
            "bytes": lambda: generator.bytes(length),
        }
        return simple.get(kind, lambda: None)()


def floating_point_or_any(d: Drawn) -> tuple[torch.dtype, bool]:
    """A dtype, and whether gradients are checked too."""
    differentiate = d.rng.random() < 0.6
    return d.rng.choice(WITH_GRADIENT if differentiate else DTYPES), differentiate


# ------------------------------------------------------------------------------------------------ the operations


def all_reduce(d: Drawn) -> Started:
    dtype = d.rng.choice(DTYPES)
    name = d.rng.choice(reductions_of(dtype))
    shape = d.shape(d.elements(dtype))
    parts = d.each(lambda rank: d.numbers(shape, dtype, rank, name))
    buffer = d.write(parts[d.index])
    work = cc.all_reduce(buffer.argument, d.group(), getattr(cc.ReduceOp, name), async_op=d.is_async)
    return Started(lambda: iter([buffer.holds(reduced(parts, name))]), work)


def reduce(d: Drawn) -> Started:
    dtype = d.rng.choice(DTYPES)
    name = d.rng.choice(reductions_of(dtype))
    shape = d.shape(d.elements(dtype))
    root, where = d.root("dst")
    parts = d.each(lambda rank: d.numbers(shape, dtype, rank, name))
    is_root = root == d.index
    buffer = d.write(parts[d.index]) if is_root else d.read(parts[d.index])
    work = cc.reduce(buffer.argument, d.group(), op=getattr(cc.ReduceOp, name), async_op=d.is_async, **where)
    return Started(lambda: iter([buffer.holds(reduced(parts, name)) if is_root else buffer.unchanged()]), work)


def reduce_scatter(d: Drawn) -> Started:
    dtype = d.rng.choice(DTYPES)
    name = d.rng.choice(reductions_of(dtype))
    shape = d.shape(d.elements(dtype, d.size))
    stacked = d.rng.random() < 0.5 or not shape
    whole = [d.size, *shape] if stacked else [d.size * shape[0], *shape[1:]]
    parts = d.each(lambda rank: d.numbers(whole, dtype, rank, name))
    source, target = d.read(parts[d.index]), d.blank(shape, dtype)
    work = cc.reduce_scatter(
        target.argument, source.argument, d.group(), getattr(cc.ReduceOp, name), async_op=d.is_async
    )

    def check() -> Iterator[str]:
        yield source.unchanged()
        mine = [part_of(part, 0, d.index, d.size).reshape(shape) for part in parts]
        yield target.holds(reduced(mine, name))

    return Started(check, work)


def broadcast(d: Drawn) -> Started:
    dtype = d.rng.choice(DTYPES)
    shape = d.shape(d.elements(dtype))
    root, where = d.root("src")
    values = d.bits(shape, dtype, d.members[root])
    buffer = d.read(values) if root == d.index else d.blank(shape, dtype)
    work = cc.broadcast(buffer.argument, d.group(), async_op=d.is_async, **where)
    return Started(lambda: iter([buffer.holds(values)]), work)


def all_gather(d: Drawn) -> Started:
    dtype = d.rng.choice(DTYPES)
    shape = d.shape(d.elements(dtype, d.size))
    stacked = d.rng.random() < 0.5 or not shape
    inside = d.own.random() < 0.15  # the input is this rank's place in the output
    parts = d.each(lambda rank: d.bits(shape, dtype, rank))
    whole = torch.stack(parts) if stacked else joined(parts, 0)
    target = d.blank(list(whole.shape), dtype)
    source = d.read(parts[d.index])
    if inside and isinstance(target.argument, Tensor):
        place = part_of(target.view, 0, d.index, d.size)
        argument: Any = place[0] if stacked else place
        argument.copy_(parts[d.index])
    else:
        inside, argument = False, source.argument
    work = cc.all_gather(target.argument, argument, d.group(), async_op=d.is_async)

    def check() -> Iterator[str]:
        yield source.unchanged()
        yield target.holds(whole)

    return Started(check, work)


def gather(d: Drawn) -> Started:
    dtype = d.rng.choice(DTYPES)
    shape = d.shape(d.elements(dtype, d.size))
    root, where = d.root("dst")
    parts = d.each(lambda rank: d.bits(shape, dtype, rank))
    source = d.read(parts[d.index])
    targets = [d.blank(shape, dtype) for _ in parts] if root == d.index else []
    given = [target.argument for target in targets] or None
    work = cc.gather(source.argument, d.group(), given, async_op=d.is_async, **where)

    def check() -> Iterator[str]:
        yield source.unchanged()
        for target, part in zip(targets, parts, strict=False):
            yield target.holds(part)

    return Started(check, work)


def scatter(d: Drawn) -> Started:
    dtype = d.rng.choice(DTYPES)
    shape = d.shape(d.elements(dtype, d.size))
    root, where = d.root("src")
    parts = [d.bits(shape, dtype, d.members[root], salt) for salt in range(d.size)]
    target = d.blank(shape, dtype)
    sources = [d.read(part) for part in parts] if root == d.index else []
    given = [source.argument for source in sources] or None
    work = cc.scatter(target.argument, d.group(), given, async_op=d.is_async, **where)

    def check() -> Iterator[str]:
        yield target.holds(parts[d.index])
        for source in sources:
            yield source.unchanged()

    return Started(check, work)


def send(d: Drawn) -> Started:
    """And recv, on another rank; the rest of the group does nothing."""
    dtype = d.rng.choice(DTYPES)
    shape = d.shape(d.elements(dtype))
    source, target = d.rng.sample(range(d.size), 2)
    d.dropped = False  # nothing that follows in the group says that it has ended
    values = d.bits(shape, dtype, d.members[source])
    peer = {source: target, target: source}.get(d.index)
    if peer is None:
        return Started(lambda: iter(()))
    name = "dst" if d.index == source else "src"
    by_index = d.own.random() < 0.5
    where = {f"group_{name}": peer, name: None} if by_index else {name: d.members[peer]}
    buffer = d.read(values) if d.index == source else d.blank(shape, dtype)
    function = cc.send if d.index == source else cc.recv
    work = function(buffer.argument, comm_mode=d.group(), async_op=d.is_async, **where)
    return Started(lambda: iter([buffer.holds(values)]), work)


def barrier(d: Drawn) -> Started:
    """On one node, where clocks are the same: nobody has left before everybody has come."""
    came = time.monotonic()
    cc.barrier(d.group())
    left = time.monotonic()

    def check() -> Iterator[str]:
        times = cc.gather_jagged_object_lists([(came, left)], d.mode)
        assert times is not None
        if cc.CommContext().get_local_world_size() == cc.CommContext().get_world_size():
            yield "left before all had come" if max(t for t, _ in times) > min(t for _, t in times) else ""

    return Started(check)


def broadcast_object_list(d: Drawn) -> Started:
    length = d.rng.randint(0, 4)
    root, where = d.root("src")
    right = [d.object(d.members[root], salt) for salt in range(length)]
    given = right if d.index == root else [None] * length
    cc.broadcast_object_list(given, d.group(), **where)
    return Started(lambda: iter([difference(given, right)]))


def gather_jagged_object_lists(d: Drawn) -> Started:
    lists = [[d.object(rank, salt) for salt in range(d.rng.randint(0, 3))] for rank in d.members]
    result = cc.gather_jagged_object_lists(lists[d.index], d.group())
    return Started(lambda: iter([difference(result, [item for items in lists for item in items])]))


def all_reduce_dict(d: Drawn) -> Started:
    dtype = d.rng.choice([torch.float32, torch.float64, torch.int64, torch.bfloat16])
    name = d.rng.choice(["SUM", "AVG", "MIN", "MAX", "PRODUCT"])
    keys = [f"key {i}" for i in range(d.rng.choice([0, 1, 3, 200]))]
    parts = d.each(lambda rank: d.numbers([len(keys)], dtype, rank, "AVG").reshape(-1))
    own = dict(zip(keys, parts[d.index].tolist(), strict=True))
    shuffled = {key: own[key] for key in d.own.sample(keys, len(keys))}
    result = cc.all_reduce_dict(shuffled, d.group(), getattr(cc.ReduceOp, name), dtype)
    right = dict(sorted(zip(keys, reduced(parts, name).tolist(), strict=True)))
    return Started(lambda: iter([difference(result, right)]))


def rebalance_nd_tensor(d: Drawn) -> Started:
    dtype = d.rng.choice(DTYPES)
    rest = d.shape(d.elements(dtype, 4 * d.size))
    even = d.rng.random() < 0.3
    rows = [d.rng.choice([0, 1, 2, 3, 7]) for _ in range(d.size)]
    rows = [rows[0]] * d.size if even else rows
    parts = [d.bits([n, *rest], dtype, rank) for n, rank in zip(rows, d.members, strict=True)]
    source = d.read(parts[d.index])
    result = cc.rebalance_nd_tensor(source.argument, d.group())
    return Started(lambda: iter([source.unchanged(), difference(result, torch.cat(parts))]))


def all_to_all_uneven(d: Drawn) -> Started:
    dtype, differentiate = floating_point_or_any(d)
    rest = d.shape(d.elements(dtype, 4 * d.size))
    rows = [[d.rng.choice([0, 0, 1, 2, 5]) for _ in range(d.size)] for _ in range(d.size)]  # [from][to]
    here = d.index
    sending, receiving = rows[here], [row[here] for row in rows]

    def exchanged(parts: list[Tensor], counts: list[list[int]]) -> Tensor:
        return torch.cat([part.split(row)[here] for part, row in zip(parts, counts, strict=True)])

    parts = [d.bits([sum(row), *rest], dtype, rank) for rank, row in zip(d.members, rows, strict=True)]
    back = [list(column) for column in zip(*rows, strict=True)]
    gradients = [d.bits([sum(row), *rest], dtype, rank, 1) for rank, row in zip(d.members, back, strict=True)]
    return differentiated(
        d, parts, gradients, lambda x: cc.all_to_all_uneven(x, sending, receiving, d.group()), differentiate,
        exchanged(parts, rows), exchanged(gradients, back),
    )  # fmt: skip


def all_to_all(d: Drawn) -> Started:
    dtype, differentiate = floating_point_or_any(d)
    shape = d.shape(d.elements(dtype, 2), least=2)
    gather_dim, scatter_dim = d.rng.sample(range(len(shape)), 2)
    shape[scatter_dim] = -(-shape[scatter_dim] // d.size) * d.size
    after = list(shape)
    after[scatter_dim] //= d.size
    after[gather_dim] *= d.size

    def exchanged(parts: list[Tensor], scattered: int, gathered: int) -> Tensor:
        return torch.cat([part_of(part, scattered, d.index, d.size) for part in parts], gathered)

    parts = d.each(lambda rank: d.bits(shape, dtype, rank))
    gradients = d.each(lambda rank: d.bits(after, dtype, rank, 1))
    negative = d.own.random() < 0.5
    dims = [dim - len(shape) * negative for dim in (gather_dim, scatter_dim)]
    return differentiated(
        d, parts, gradients, lambda x: cc.all_to_all(x, *dims, d.group()), differentiate,
        exchanged(parts, scatter_dim, gather_dim), exchanged(gradients, gather_dim, scatter_dim),
    )  # fmt: skip


def scatter_to_sequence_parallel_region(d: Drawn) -> Started:
    dtype, differentiate = floating_point_or_any(d)
    shape = d.shape(d.elements(dtype, 2), least=2)
    shape[1] = -(-shape[1] // d.size) * d.size
    rank0_only = d.rng.random() < 0.5
    parts = d.each(lambda rank: d.bits(shape, dtype, rank))
    after = [shape[0], shape[1] // d.size, *shape[2:]]
    gradients = d.each(lambda rank: d.numbers(after, dtype, rank, salt=1))
    right = part_of(parts[0 if rank0_only else d.index], 1, d.index, d.size)
    gradient = torch.cat(gradients, 1) / d.size if differentiate else None
    return differentiated(
        d, parts, gradients, lambda x: cc.scatter_to_sequence_parallel_region(x, rank0_only), differentiate,
        right, gradient,
    )  # fmt: skip


def gather_from_sequence_parallel_region(d: Drawn) -> Started:
    dtype, differentiate = floating_point_or_any(d)
    shape = d.shape(d.elements(dtype, d.size), least=2)
    rank0_only = d.rng.random() < 0.5
    parts = d.each(lambda rank: d.bits(shape, dtype, rank))
    after = [shape[0], shape[1] * d.size, *shape[2:]]
    gradients = d.each(lambda rank: d.numbers(after, dtype, rank, salt=1))
    counted = part_of(gradients[0 if rank0_only else d.index], 1, d.index, d.size)
    gradient = counted * d.size if differentiate else None
    return differentiated(
        d, parts, gradients, lambda x: cc.gather_from_sequence_parallel_region(x, rank0_only), differentiate,
        torch.cat(parts, 1), gradient,
    )  # fmt: skip


def differentiated(
    d: Drawn,
    parts: list[Tensor],
    gradients: list[Tensor],
    function: Callable[[Any], Tensor | None],
    differentiate: bool,
    right: Tensor,
    right_gradient: Tensor | None,
) -> Started:
    """Call a function of this rank's part; if asked, also its backward with this rank's gradient."""
    source = d.read(parts[d.index])
    if not differentiate:
        result = function(source.argument)
        return Started(lambda: iter([source.unchanged(), difference(result, right)]))
    leaf = source.view.detach().requires_grad_()
    result = function(leaf)
    assert result is not None
    (gradient,) = torch.autograd.grad(result, leaf, d.read(gradients[d.index]).view)
    return Started(lambda: iter([source.unchanged(), difference(result, right), difference(gradient, right_gradient)]))


OPERATIONS: dict[str, Callable[[Drawn], Started]] = {
    function.__name__: function
    for function in (
        all_reduce, reduce, reduce_scatter, broadcast, all_gather, gather, scatter, send, barrier,
        broadcast_object_list, gather_jagged_object_lists, all_reduce_dict, rebalance_nd_tensor, all_to_all_uneven,
        all_to_all, scatter_to_sequence_parallel_region, gather_from_sequence_parallel_region,
    )
}  # fmt: skip


def outside(d: Drawn) -> Started:
    """On a rank that is not in the group an operation gives None at once."""
    x = torch.ones(1)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: cc.all_gather(x, x, d.mode),
        "reduce_scatter": lambda: cc.reduce_scatter(x, x, d.mode),
        "barrier": lambda: cc.barrier(d.mode),
        "broadcast_object_list": lambda: cc.broadcast_object_list([], d.mode),
        "gather_jagged_object_lists": lambda: cc.gather_jagged_object_lists([], d.mode),
        "all_reduce_dict": lambda: cc.all_reduce_dict({}, d.mode),
        "rebalance_nd_tensor": lambda: cc.rebalance_nd_tensor(x, d.mode),
        "all_to_all_uneven": lambda: cc.all_to_all_uneven(x, [1], [1], d.mode),
        "all_to_all": lambda: cc.all_to_all(x, 0, 1, d.mode),
        "scatter_to_sequence_parallel_region": lambda: cc.scatter_to_sequence_parallel_region(x),
        "gather_from_sequence_parallel_region": lambda: cc.gather_from_sequence_parallel_region(x),
        "send": lambda: cc.send(x, 0, d.mode, async_op=d.is_async),
    }
    simple = getattr(cc, d.name)
    result = calls.get(d.name, lambda: simple(x, d.mode, async_op=d.is_async))()
    return Started(lambda: iter([difference(result, None)]))
