"""Gated and plain activations."""

from __future__ import annotations

import torch

from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["swiglu"]


@kernel("npu_swiglu")
def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half along `dim`."""
    gate, value = up(input).chunk(2, dim=dim)
    return (gate * torch.sigmoid(gate) * value).to(input.dtype)


@kernel("npu_geglu")
def geglu(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (value * gelu(gate), gelu(gate)); the gate is the second half unless `activate_left`."""
    first, second = up(input).chunk(2, dim=dim)
    gate, value = (first, second) if activate_left else (second, first)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none")
    return (value * gelu).to(input.dtype), gelu.to(input.dtype)


@kernel("npu_silu")
def silu(input: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    x = up(input)
    return (x * torch.sigmoid(x)).to(input.dtype)


@kernel("npu_silu_")
def silu_(input: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), in place."""
    input.copy_(silu(input))
    return input


@kernel("npu_gelu")
def gelu(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Gaussian error linear unit; `approximate` is "none" or "tanh"."""
    return torch.nn.functional.gelu(up(input), approximate=approximate).to(input.dtype)


@kernel("fast_gelu", "npu_fast_gelu")
def fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-1.702 |x|)) * exp(0.851 (x - |x|))."""
    x = up(input)
    size = x.abs()
    return (x / (1 + torch.exp(-1.702 * size)) * torch.exp(0.851 * (x - size))).to(input.dtype)


@kernel("npu_gelu_mul")
def gelu_mul(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(first half) * second half of the last axis."""
    first, second = up(input).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(first, approximate=approximate) * second).to(input.dtype)


@kernel("npu_clipped_swiglu")
def clipped_swiglu(
    x: torch.Tensor,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """a = min(A, limit), b = clamp(B, -limit, limit); a * sigmoid(alpha * a) * (b + bias).

    A and B are the even and odd elements along `dim`, or its halves when not `interleaved`.
    """
    wide = up(x).movedim(dim, -1)
    if interleaved:
        left, right = wide[..., 0::2], wide[..., 1::2]
    else:
        left, right = wide.chunk(2, dim=-1)
    left, right = left.clamp(max=limit), right.clamp(-limit, limit)
    out = left * torch.sigmoid(alpha * left) * (right + bias)
    return out.movedim(-1, dim).contiguous().to(x.dtype)
