"""RMS norms (operator sheet, section 13). Plain gamma: y = x * rsqrt(mean(x^2) + eps) * gamma, fp32 inside."""

from __future__ import annotations

import torch

from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["rms"]


def rms(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd) over the trailing dims that gamma has; y in x's dtype, rstd in the working dtype, dims kept as 1."""
    wide = up(x)
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(wide.pow(2).mean(dim=dims, keepdim=True) + epsilon)
    return (wide * rstd * up(gamma, wide.dtype)).to(x.dtype), rstd


@kernel("npu_rms_norm")
def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (y, rstd)."""
    return rms(input, gamma, epsilon)


@kernel("npu_gemma_rms_norm")
def gemma_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (y, rstd) with the factor 1 + gamma."""
    return rms(input, 1.0 + up(gamma, up(input).dtype), epsilon)


@kernel("npu_add_rms_norm")
def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (y, rstd, x) with x = x1 + x2: the residual is the third output."""
    total = x1 + x2
    y, rstd = rms(total, gamma, epsilon)
    return y, rstd, total




@kernel("npu_add_rms_norm_cast")
def add_rms_norm_cast(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (y as float32, y, rstd, x)."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    return up(y), y, rstd, total


@kernel("npu_add_rms_norm_v2")
def add_rms_norm_v2(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """-> rstd; in place x1 becomes y and x2 becomes x1 + x2."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


@kernel("npu_add_rms_norm_v2_functional")
def add_rms_norm_v2_functional(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (rstd, y, x1 + x2)."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, y, total
