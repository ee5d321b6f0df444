"""Masked softmax operators of eager attention code."""

from __future__ import annotations

from typing import Any

import torch

from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["scaled_masked_softmax"]


@kernel("npu_scaled_masked_softmax")
def scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: Any = 1, fixed_triu_mask: bool = False
) -> torch.Tensor:
    """softmax over the last axis of x * scale, True in `mask` (or above the diagonal) hidden.

    A hidden score is a large negative number, not minus infinity: a row that is hidden as a whole is uniform.
    """
    hidden = mask.bool()
    if fixed_triu_mask:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    score = (up(x) * scale).masked_fill(hidden, -10000.0)
    return torch.softmax(score, dim=-1).to(x.dtype)


@kernel("npu_attn_softmax_")
def attn_softmax_(input: torch.Tensor) -> torch.Tensor:
    """softmax over the last axis, in place."""
    input.copy_(torch.softmax(up(input), dim=-1))
    return input
