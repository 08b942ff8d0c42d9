"""Pure index maps: which token a position of the logits predicts. No communication."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["next_token_index"]


def next_token_index(tokens: int, positions: int) -> Tensor:
    """For each of ``positions`` of a sequence, the index among its ``tokens`` of the token that it predicts.

    Position i predicts token i + 1; the last token's position, and the padding after it, predict none.

    Returns:
        int64 [positions]; -1 where there is none.
    """
    index = torch.arange(1, positions + 1)
    return torch.where(index < tokens, index, -1)
