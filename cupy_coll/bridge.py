"""Zero-copy bridges between torch, CuPy and NumPy arrays."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cupy_coll.device import mark_as_cupy
from cupy_coll.dtypes import name_of
from cupy_coll.errors import ArgumentError, DTypeError, ShapeError

if TYPE_CHECKING:
    import cupy

__all__ = ["as_tensor", "to_cupy", "to_numpy", "to_torch"]

# Types that NumPy has by the package ml_dtypes alone, and the integers through which their memory is handed over.
_ML_DTYPES = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}
_BY_NAME = {name_of(dtype): dtype for dtype in _ML_DTYPES}


def to_torch(array: Any) -> torch.Tensor:
    """A torch tensor over the same memory.

    Args:
        array: a torch tensor (returned as it is), a NumPy array (a CPU tensor; of the dtypes of ml_dtypes too) or a
            CuPy array (a CUDA tensor; torch's current stream waits for what CuPy's has to do).

    Raises:
        ArgumentError: it is none of these, or a read-only NumPy array (torch tensors are writable).
        DTypeError: torch has no such dtype.
        ShapeError: torch has no such memory layout (a negative stride).
    """
    if _is_cupy(array):  # handed over to torch: from now on it is on torch's stream
        return _from_cupy("to_torch", "array", array)
    return as_tensor("to_torch", "array", array, writable=True)


def to_numpy(array: Any) -> np.ndarray:
    """A NumPy array over the same memory.

    Args:
        array: a NumPy array (returned as it is) or a CPU tensor; the array of a tensor that requires grad is outside
            autograd. bfloat16 and float8 need ml_dtypes, imported by the program.

    Raises:
        ArgumentError: it is neither, or in another memory.
        DTypeError: NumPy has no such dtype.
    """
    if isinstance(array, np.ndarray):
        return array
    if not isinstance(array, torch.Tensor):
        raise ArgumentError(f"to_numpy: array must be a NumPy array or a CPU tensor, got {_kind(array)}")
    if array.device.type != "cpu":
        raise ArgumentError(f"to_numpy: array must be in host memory, got a tensor on {array.device}; copy by .cpu()")
    if array.is_conj() or array.is_neg():
        raise ArgumentError("to_numpy: array is a lazily conjugated or negated tensor; resolve_conj() it first")
    tensor = array.detach()
    try:
        bits = _ML_DTYPES.get(tensor.dtype)
        if bits is not None and (ml_dtypes := sys.modules.get("ml_dtypes")) is not None:
            return tensor.view(bits).numpy().view(getattr(ml_dtypes, name_of(tensor.dtype)))
        return tensor.numpy()
    except (TypeError, AttributeError) as error:
        raise DTypeError(f"to_numpy: NumPy has no dtype for {name_of(array.dtype)}") from error


def to_cupy(array: Any) -> cupy.ndarray:
    """A CuPy array over the same memory.

    Args:
        array: a CuPy array (returned as it is) or a CUDA tensor (CuPy's current stream waits for what torch's has to
            do); the array of a tensor that requires grad is outside autograd.

    Raises:
        ArgumentError: it is neither, or in another memory, or CuPy is not installed.
        DTypeError: CuPy has no such dtype.
    """
    if _is_cupy(array):
        return array
    if not isinstance(array, torch.Tensor):
        raise ArgumentError(f"to_cupy: array must be a CuPy array or a CUDA tensor, got {_kind(array)}")
    if array.device.type != "cuda":
        raise ArgumentError(f"to_cupy: array must be on a CUDA device, got a tensor on {array.device}")
    if array.is_conj() or array.is_neg():
        raise ArgumentError("to_cupy: array is a lazily conjugated or negated tensor; resolve_conj() it first")
    try:
        import cupy
    except ImportError as error:
        raise ArgumentError("to_cupy: CuPy is not installed (pip install 'cupy_coll[cuda13]')") from error
    try:
        return cupy.from_dlpack(array.detach())
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise DTypeError(f"to_cupy: CuPy cannot take a {name_of(array.dtype)} tensor: {error}") from error


def as_tensor(function: str, name: str, array: Any, writable: bool) -> torch.Tensor:
    """``to_torch`` for the argument ``name`` of ``function``; a read-only array will do where nothing is written."""
    if isinstance(array, torch.Tensor):
        return array
    if _is_cupy(array):
        return mark_as_cupy(_from_cupy(function, name, array))
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"{function}: {name} must be a torch tensor, CuPy or NumPy array, got {_kind(array)}")
    if writable and not array.flags.writeable:
        raise ArgumentError(f"{function}: {name} is a read-only NumPy array, expected a writable one")
    _check_strides(function, name, array, "numpy")
    try:
        dtype = _BY_NAME.get(array.dtype.name)
        if dtype is not None:  # ml_dtypes': torch takes their bits
            array = array.view(f"u{array.itemsize}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(array)
        return tensor if dtype is None else tensor.view(dtype)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{function}: {name} has dtype {array.dtype}, which torch does not know: {error}") from error


def _from_cupy(function: str, name: str, array: Any) -> torch.Tensor:
    _check_strides(function, name, array, "cupy")
    try:
        return torch.from_dlpack(array)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise DTypeError(
            f"{function}: {name} is a CuPy array that torch cannot take ({array.dtype}): {error}"
        ) from error


def _check_strides(function: str, name: str, array: Any, library: str) -> None:
    if any(stride < 0 or stride % max(1, array.itemsize) for stride in array.strides):
        raise ShapeError(
            f"{function}: {name} has strides {array.strides} bytes, expected multiples of its item size that are not "
            f"negative; {library}.ascontiguousarray copies it"
        )


def _is_cupy(array: Any) -> bool:
    cupy = sys.modules.get("cupy")  # who has a CuPy array has imported it
    return cupy is not None and isinstance(array, cupy.ndarray)


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
