"""The bridges at their edges: CuPy arrays as far as a machine without a GPU can make them, ml_dtypes, odd layouts."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

import cupy_coll as cc
from cupy_coll import bridge, device

cupy = pytest.importorskip("cupy")


def on_the_host(array: np.ndarray) -> cupy.ndarray:
    """A CuPy array over host memory: it has shape, strides and dtype, and that is all that works without a GPU."""
    memory = cupy.cuda.UnownedMemory(array.ctypes.data, max(array.nbytes, 1), array, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, memptr=pointer, strides=array.strides)


class Exported:
    """A CuPy array whose export torch can take."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype, self.strides, self.itemsize = array.dtype, array.strides, array.itemsize

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@pytest.fixture
def cupy_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cupy.ndarray`` is :class:`Exported`."""
    stand_in = types.ModuleType("cupy")
    stand_in.ndarray = Exported  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", stand_in)


@pytest.mark.usefixtures("cupy_of_the_host")
def test_cupy_to_torch() -> None:
    """The same memory; as an argument of an operation it stays CuPy's, from to_torch it is torch's."""
    for array in (np.arange(6.0).reshape(2, 3).T, np.zeros((0, 3), np.int16), np.array(True)):
        given = Exported(array)
        converted, argument = cc.to_torch(given), bridge.as_tensor("all_reduce", "tensor", given, writable=True)
        for tensor in (converted, argument):
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.data_ptr() == array.ctypes.data or not array.size
        assert device.is_cupy([argument])
        assert not device.is_cupy([converted])


@pytest.mark.usefixtures("cupy_of_the_host")
def test_cupy_layouts_that_torch_lacks() -> None:
    with pytest.raises(cc.ShapeError, match=r"to_torch: array has strides \(-8,\).*cupy\.ascontiguousarray"):
        cc.to_torch(Exported(np.zeros(4)[::-1]))


@pytest.mark.usefixtures("cupy_of_the_host")
def test_what_torch_refuses_of_cupy() -> None:
    given = Exported(np.zeros(2))
    given.__class__ = type("Odd", (Exported,), {"__dlpack__": lambda self, **options: refuse()})
    with pytest.raises(cc.DTypeError, match=r"all_reduce: tensor is a CuPy array that torch cannot take.*no such type"):
        bridge.as_tensor("all_reduce", "tensor", given, writable=True)


def refuse() -> None:
    raise BufferError("no such type")


def test_real_cupy_arrays_are_recognised() -> None:
    array = on_the_host(np.zeros((2, 3), np.float32))
    assert cc.to_cupy(array) is array
    with pytest.raises(cc.ShapeError, match="strides"):
        cc.to_torch(on_the_host(np.zeros(4))[::-1])
    with pytest.raises(cc.ArgumentError, match=r"to_numpy.*cupy.*ndarray"):
        cc.to_numpy(array)
    with pytest.raises(cc.DTypeError, match=r"to_torch: array is a CuPy array.*driver"):
        cc.to_torch(array)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_dtypes_of_ml_dtypes(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([[1, 2, 3], [4, 5, 6]]).astype(getattr(ml_dtypes, name))
    for one in (array, array.T, array[:, ::2], array[:0], array[1, 1:2].reshape(())):
        tensor = cc.to_torch(one)
        assert str(tensor.dtype) == f"torch.{name}"
        assert tensor.float().tolist() == one.astype(np.float32).tolist()
        assert tensor.data_ptr() == one.ctypes.data or not one.size
        back = cc.to_numpy(tensor)
        assert back.dtype == one.dtype
        assert np.array_equal(back, one)


def test_negated_and_read_only() -> None:
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    with pytest.raises(cc.ArgumentError, match=r"to_numpy.*resolve"):
        cc.to_numpy(negative)
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    tensor = bridge.as_tensor("all_gather", "input_tensor", frozen, writable=False)
    assert tensor.tolist() == [0, 1, 2]
    assert tensor.data_ptr() == frozen.ctypes.data
