"""In which dtype the kernels compute."""

from __future__ import annotations

import torch

__all__ = ["up", "working_dtype"]


def working_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 when a float64 tensor is present (test mode), else float32, as the device accumulates."""
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return torch.float64
    return torch.float32


def up(tensor: torch.Tensor, like: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` in its working dtype (or in `like`)."""
    return tensor.to(like or working_dtype(tensor))
