"""Rotary embeddings (operator sheet, section 13)."""

from __future__ import annotations

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["rope_of_pairs"]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """concat(-second half, first half) of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    """(-x[2i+1], x[2i]) in place of every pair (x[2i], x[2i+1]) of the last axis."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((-odd, even), dim=-1).flatten(-2)


def interleaved_to_half(x: torch.Tensor) -> torch.Tensor:
    """Regroup pairs to halves: concat(x[0::2], x[1::2]) of the last axis."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def rope_of_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary of interleaved pairs: regrouped to halves, then half rotary; the output stays in half order."""
    halves = interleaved_to_half(x)
    return halves * cos + rotate_half(halves) * sin


@kernel("npu_rotary_mul")
def rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half"
) -> torch.Tensor:
    """x * r1 + rotate(x) * r2, r1 = cos, r2 = sin, broadcast."""
    rotate = {"half": rotate_half, "interleave": rotate_pairs}.get(rotary_mode)
    if rotate is None:
        raise UnmodelledCall("npu_rotary_mul", f"rotary_mode {rotary_mode!r}")
    x = up(input)
    return (x * up(r1, x.dtype) + rotate(x) * up(r2, x.dtype)).to(input.dtype)


# layouts as [.., N, D] with cos/sin [.., 1, D]; "BSH" is what one public caller passes and no page documents
_LAYOUTS = frozenset({"BSND", "TND", "BSH", "BNSD", "SBND"})


@kernel("npu_apply_rotary_pos_emb", undeclared=("query", "key"))
def apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str,
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half rotary on both, in place: the schema declares no mutation, the op page documents one.

    Both inputs are overwritten and returned, so a caller that goes on with the old q or k sees the rotated one.
    """
    if layout not in _LAYOUTS or rotary_mode != "half":
        raise UnmodelledCall("npu_apply_rotary_pos_emb", f"layout {layout!r}, rotary_mode {rotary_mode!r}")
    for x in (query, key):
        wide = up(x)
        x.copy_(wide * up(cos, wide.dtype) + rotate_half(wide) * up(sin, wide.dtype))
    return query, key


@kernel("npu_interleave_rope")
def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs regrouped to halves, then half rotary; the output stays in half order."""
    wide = up(x)
    return rope_of_pairs(wide, up(cos, wide.dtype), up(sin, wide.dtype)).to(x.dtype)
