"""Zero-copy bridges between torch, CuPy and NumPy arrays."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cupy_coll.dtypes import name_of
from cupy_coll.errors import ArgumentError, DTypeError, ShapeError

if TYPE_CHECKING:
    import cupy

__all__ = ["as_tensor", "to_cupy", "to_numpy", "to_torch"]


def to_torch(array: Any) -> torch.Tensor:
    """A torch tensor over the same memory.

    Args:
        array: a torch tensor (returned as it is), a NumPy array (a CPU tensor) or a CuPy array (a CUDA tensor).

    Raises:
        ArgumentError: it is none of these, or a read-only NumPy array (torch tensors are writable).
        DTypeError: torch has no such dtype.
        ShapeError: torch has no such memory layout (a negative stride).
    """
    return as_tensor("to_torch", "array", array, writable=True)


def to_numpy(array: Any) -> np.ndarray:
    """A NumPy array over the same memory.

    Args:
        array: a NumPy array (returned as it is) or a CPU tensor; the array of a tensor that requires grad is outside
            autograd.

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
    try:
        return array.detach().numpy()
    except TypeError as error:
        raise DTypeError(f"to_numpy: NumPy has no dtype for {name_of(array.dtype)}") from error


def to_cupy(array: Any) -> cupy.ndarray:
    """A CuPy array over the same memory.

    Args:
        array: a CuPy array (returned as it is) or a CUDA tensor; the array of a tensor that requires grad is outside
            autograd.

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
        return torch.from_dlpack(array)
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"{function}: {name} must be a torch tensor, CuPy or NumPy array, got {_kind(array)}")
    if writable and not array.flags.writeable:
        raise ArgumentError(f"{function}: {name} is a read-only NumPy array, expected a writable one")
    if any(stride < 0 or stride % max(1, array.itemsize) for stride in array.strides):
        raise ShapeError(
            f"{function}: {name} has strides {array.strides} bytes, expected multiples of its item size that are not "
            "negative; numpy.ascontiguousarray copies it"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{function}: {name} has dtype {array.dtype}, which torch does not know: {error}") from error


def _is_cupy(array: Any) -> bool:
    cupy = sys.modules.get("cupy")  # who has a CuPy array has imported it
    return cupy is not None and isinstance(array, cupy.ndarray)


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
