"""The DLPack bridges: the same memory, or an error that says what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cupy_coll as cc

NUMPY_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_to_torch_and_back(dtype: str) -> None:
    """Same memory, dtype, shape and strides, there and back."""
    base = np.arange(24).reshape(4, 6).astype(dtype)
    for array in (base, base.T, base[::2, 1:], base[1], base[:0], np.array(3, dtype)):
        tensor = cc.to_torch(array)
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert tuple(tensor.shape) == array.shape
        back = cc.to_numpy(tensor)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
        if array.size:
            assert np.shares_memory(back, array)
            assert back.strides == array.strides


def test_writing_shows_on_both_sides() -> None:
    array = np.zeros((2, 3))
    cc.to_torch(array)[1, 2] = 7
    assert array[1, 2] == 7
    tensor = torch.zeros(2, 3)
    cc.to_numpy(tensor.t())[2, 1] = 7
    assert tensor[1, 2] == 7


def test_what_is_there_already_is_returned_as_it_is() -> None:
    tensor, array = torch.zeros(2), np.zeros(2)
    assert cc.to_torch(tensor) is tensor
    assert cc.to_numpy(array) is array


def test_leaf_that_requires_grad() -> None:
    leaf = torch.ones(2, requires_grad=True)
    array = cc.to_numpy(leaf)
    assert array.tolist() == [1.0, 1.0]
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert cc.to_torch(leaf) is leaf


def test_keeps_the_memory_alive() -> None:
    tensor = cc.to_torch(np.full(100_000, 5.0))
    junk = [np.full(100_000, 1.0) for _ in range(10)]
    assert tensor.eq(5).all()
    del junk


def test_read_only_arrays_are_refused() -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with pytest.raises(cc.ArgumentError, match=r"to_torch.*read-only"):
        cc.to_torch(frozen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_numpy_lacks(dtype: torch.dtype) -> None:
    with pytest.raises(cc.DTypeError, match=f"to_numpy.*{str(dtype).removeprefix('torch.')}"):
        cc.to_numpy(torch.zeros(2).to(dtype))


@pytest.mark.parametrize(
    "array",
    [np.zeros(3, ">f4"), np.array(["a"]), np.array([None]), np.zeros(3, "M8[s]"), np.zeros(3, np.longdouble)],
    ids=lambda array: str(array.dtype),
)
def test_dtypes_that_torch_lacks(array: np.ndarray) -> None:
    with pytest.raises(cc.DTypeError, match=r"to_torch.*dtype"):
        cc.to_torch(array)


def test_layouts_that_torch_lacks() -> None:
    unaligned = np.zeros(3, [("a", "i1"), ("b", "f4")])["b"]
    for array in (np.zeros(4)[::-1], np.zeros((2, 3))[:, ::-1], unaligned):
        with pytest.raises(cc.ShapeError, match=r"to_torch.*stride"):
            cc.to_torch(array)


def test_lazy_conjugates_are_refused() -> None:
    """NumPy would see the memory of the original."""
    with pytest.raises(cc.ArgumentError, match=r"to_numpy.*conj"):
        cc.to_numpy(torch.tensor([1j]).conj())


@pytest.mark.parametrize(
    "bad", [1.0, [1.0], None, "text", b"bytes", memoryview(b"x")], ids=lambda bad: type(bad).__name__
)
def test_what_is_no_array(bad: object) -> None:
    for bridge in (cc.to_torch, cc.to_numpy, cc.to_cupy):
        with pytest.raises(cc.ArgumentError, match=rf"{bridge.__name__}.*array.*{type(bad).__name__}"):
            bridge(bad)


def test_other_memory_is_refused() -> None:
    with pytest.raises(cc.ArgumentError, match=r"to_cupy.*cpu"):
        cc.to_cupy(torch.zeros(2))
    with pytest.raises(cc.ArgumentError, match=r"to_cupy.*numpy"):
        cc.to_cupy(np.zeros(2))
    with pytest.raises(cc.ArgumentError, match=r"to_numpy.*meta"):
        cc.to_numpy(torch.zeros(2, device="meta"))
