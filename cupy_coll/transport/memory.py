"""Tensors of any memory layout as the contiguous memory that a transport reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Target", "apart", "flat_of"]


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order, in one dimension; the tensor's own memory where it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def apart(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """The source, or a copy where it shares memory with a target: it is read while they are written."""
    begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
    shared = any(target.data_ptr() < end and begin < target.data_ptr() + target.nbytes for target in targets)
    return source.clone() if shared else source


class Target:
    """A tensor that an operation writes: ``flat`` is its own memory, or a copy that :meth:`store` writes back."""

    def __init__(self, tensor: torch.Tensor, load: bool = False) -> None:
        self.tensor = tensor.detach()
        self.direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if self.direct or load:
            self.flat = flat_of(tensor)
        else:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)

    def store(self) -> None:
        if not self.direct:
            with torch.inference_mode():  # where alone a tensor made in it can be written; no gradient either
                self.tensor.copy_(self.flat.view(self.tensor.shape))
        elif not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)
