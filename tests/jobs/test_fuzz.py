"""The fuzz program: a short run of it, and that it would see what is wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from starting import ROOT, Finished

PROGRAM = ROOT / "benchmarks" / "fuzz.py"


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that compares."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import fuzz_values

    return fuzz_values


@pytest.mark.slow
def test_a_short_run(job: Callable[..., Finished]) -> None:
    """The same seed draws the same operations, whatever the number of ranks is."""
    result = job(PROGRAM, 3, ["--seed", "1", "--ops", "300"], limit=90)
    assert result.status == 0, result.output
    table = [line.split() for line in result.output.splitlines()]
    assert table[0] == ["3", "ranks,", "seed", "1"]
    assert table[1] == ["operation", "number", "wrong", "seconds"]
    names, numbers, wrong, _ = zip(*table[2:], strict=True)
    assert names[-1] == "all"
    assert set(names) > {"all_reduce", "send", "all_to_all_uneven", "gather_jagged_object_lists"}
    assert numbers[-1] == "300"
    assert all(int(number) > 0 for number in numbers), "an operation that was not drawn"
    assert set(wrong) == {"0"}


@pytest.mark.slow
def test_a_wrong_value(job: Callable[..., Finished]) -> None:
    """In one element of what rank 1 gets by a broadcast: named, with how to run that operation again, and status 1."""
    result = job(
        f"""
import runpy, sys
from cupy_coll.transport.host import HostTransport

right = HostTransport._broadcast

def _broadcast(self, tensor, src):
    yield from right(self, tensor, src)
    if self.channel.ranks[self.rank] == 1 and self.rank != src and tensor.numel():
        tensor.detach()[(0,) * tensor.dim()] = 0

HostTransport._broadcast = _broadcast
sys.path.insert(0, {str(PROGRAM.parent)!r})
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
""",
        2,
        ["--seed", "1", "--ops", "300"],
        limit=90,
    )
    assert result.status == 1, result.output
    found = re.findall(r"rank (\d): operation (\d+), (\w+) in \w+ \[[\d, ]+\]: (.*)", result.output)
    assert found, result.output
    assert {(rank, name) for rank, _, name, _ in found} == {("1", "broadcast")}
    assert all("1 of " in text and "the first at 0: got " in text for *_, text in found)
    first = min(int(number) for _, number, _, _ in found)
    command = "./mpi_launch.sh -n 2 benchmarks/fuzz.py --seed 1"
    assert f"again: {command} --only {first}; with what was in flight before it: {command} --ops {first + 1}" in (
        result.output
    )


def test_differences(values: ModuleType) -> None:
    ones = torch.ones(3)
    equal = [
        (ones, torch.ones(6)[::2]),
        (torch.tensor(float("nan")), -torch.tensor(float("nan"))),
        (torch.empty(0, 2), torch.empty(0, 2)),
        ({"a": [1, "x", None, np.arange(3)]}, {"a": [1, "x", None, np.arange(3)]}),
        (float("nan"), float("nan")),
    ]
    for actual, expected in equal:
        assert values.difference(actual, expected) == ""
    different = [
        (ones, ones.double(), "[3] torch.float32, expected [3] torch.float64"),
        (ones, torch.ones(3, 1), "[3] torch.float32, expected [3, 1]"),
        (torch.empty(0, 2), torch.empty(2, 0), "[0, 2]"),
        (torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, -0.0, 4.0]), "2 of 3 elements are wrong, the first at 1"),
        (torch.tensor([1, 2**53 + 1]), torch.tensor([1, 2**53]), "1 of 2 elements are wrong, the first at 1"),
        (torch.tensor([float("nan")]), ones[:1], "got nan, expected 1.0"),
        (None, ones, "got NoneType"),
        (1, 1.0, "got 1, expected 1.0"),
        ([1, 2], [1, 3], "got 2, expected 3"),
        ([1], [1, 2], "expected [1, 2]"),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, "expected {'a': 2"),
        (np.arange(2), np.arange(3), "expected [3]"),
        ([1], np.arange(1), "expected an array"),
    ]  # fmt: skip
    for actual, expected, words in different:
        assert words in values.difference(actual, expected)


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset", "contiguous"])
def test_memory_beside_a_tensor(layout: str, values: ModuleType) -> None:
    """What an operation writes where it should not is seen."""
    content = torch.arange(12).view(3, 4)
    buffer = next(
        one
        for seed in range(100)
        if (one := values.Buffer(content, random.Random(seed), written=True)).layout == layout
    )
    assert buffer.holds(content) == ""
    if layout in ("strided", "offset"):
        buffer.base[0] += 1
        assert "memory beside the tensor" in buffer.holds(content)
        buffer.base[0] -= 1
    assert buffer.unchanged() == ""
    buffer.view[2, 3] += 1
    assert "1 of 12 elements are wrong, the first at 11" in buffer.unchanged()


def test_right_answers(values: ModuleType) -> None:
    """Of reductions, in closed form."""

    def reduced(name: str, *numbers: float | complex, dtype: torch.dtype = torch.float32) -> float | complex | bool:
        return values.reduced([torch.tensor([number]).to(dtype) for number in numbers], name).item()

    assert reduced("SUM", 1e8, -1e8, 1.0) == 1.0, "in rank order"
    assert reduced("SUM", 1.0, 1e8, -1e8) == 0.0
    assert reduced("SUM", 256.0, 1.0, 1.0, dtype=torch.bfloat16) == 258.0, "rounded once"
    assert reduced("AVG", -3, -4, dtype=torch.int8) == -3
    assert reduced("AVG", 100, 120, dtype=torch.int8) == 110
    assert reduced("SUM", 100, 120, dtype=torch.int8) == -36
    assert reduced("AVG", 2**62, 2, dtype=torch.uint64) == 2**61 + 1
    assert reduced("AVG", 1 + 2j, 3 + 4j, dtype=torch.complex64) == 2 + 3j
    assert np.isnan(reduced("MAX", float("nan"), 1.0))
    assert np.isnan(reduced("MIN", 1.0, float("nan")))
    assert reduced("SUM", 0, 1, dtype=torch.bool) is True
    assert reduced("PRODUCT", 0, 1, dtype=torch.bool) is False
    assert reduced("BXOR", 1, 1, dtype=torch.bool) is False
