"""Memory for a gradient: large pages where the system gives them on request."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

__all__ = ["empty_gradient"]

LARGE = 32 << 20
"""Bytes from which glibc gives memory of its own to every allocation (the most that M_MMAP_THRESHOLD can be), so that
advice about it ends with it."""


def empty_gradient(like: Tensor) -> Tensor:
    """``torch.empty_like(like)``; large ones on the host in large pages.

    The first write to each fresh page of 4 KiB costs more than computing what is written: see docs/logprob.md.
    """
    result = torch.empty_like(like)
    if sys.platform == "linux" and result.device.type == "cpu" and result.nbytes >= LARGE:
        first = -(-result.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (result.data_ptr() + result.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        # A hint: where the system refuses it the pages are small, and nothing else differs.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)
    return result
