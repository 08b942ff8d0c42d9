"""Which memory a tensor lives in."""

from __future__ import annotations

import torch

__all__ = ["is_host"]


def is_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory can be read by the processor."""
    return tensor.device.type == "cpu"
