"""npu_fusion_attention, the training operator that older model code also calls at inference (forward only).

Layouts BSH, SBH, BSND, BNSD, TND; the mask polarity and modes 0 to 4 are those of the inference operators, but a
single query token is no special case. The maxima and sums that it returns for the backward pass are undefined here.
"""

from __future__ import annotations

from typing import Any

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.fa.call import FaCall
from kvskill.verifier.kernels.fa.ops import fused_attention
from kvskill.verifier.kernels.registry import kernel

__all__ = ["fusion_attention"]

_Seven = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]
_DENSE = ("BSH", "SBH", "BSND", "BNSD")


def _bsnd(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """[B, S, N, D] of a dense tensor."""
    if layout in ("BSH", "SBH"):
        x = x.transpose(0, 1) if layout == "SBH" else x
        return x.reshape(*x.shape[:2], heads, -1)
    return x.transpose(1, 2) if layout == "BNSD" else x


def _back(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BNSD":
        return x.transpose(1, 2).contiguous()
    if layout == "BSND":
        return x
    return (x.flatten(2).transpose(0, 1) if layout == "SBH" else x.flatten(2)).contiguous()


@kernel("npu_fusion_attention", neutral=("gen_mask_parallel", "sync", "seed", "offset", "softmax_layout"))
def fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str,
    atten_mask: torch.Tensor | None = None, scale: float = 1.0, pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647, inner_precise: int = 0, actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None, sparse_mode: int = 0,
) -> _Seven:  # fmt: skip
    """-> (attention_out in the query's layout, max, sum, reserved, 0, 0, 0).

    head_num counts query heads; the key heads follow from the key's shape. TND lengths are running sums.
    """
    op = "npu_fusion_attention"
    if input_layout not in (*_DENSE, "TND") or sparse_mode not in range(5):
        raise UnmodelledCall(op, f"input_layout {input_layout!r}, sparse_mode {sparse_mode}")
    if atten_mask is not None and atten_mask.dim() == 4 and atten_mask.shape[1] > 1:
        raise UnmodelledCall(op, "a mask for each head")
    if input_layout == "TND":
        q, k, v, kv_heads = query, key, value, key.shape[1]
        q_len, kv_len = list(actual_seq_qlen), list(actual_seq_kvlen)
    else:
        if input_layout in ("BSH", "SBH"):
            kv_heads = key.shape[-1] * head_num // query.shape[-1]
        else:
            kv_heads = key.shape[1 if input_layout == "BNSD" else 2]
        rows = [_bsnd(x, input_layout, n) for x, n in ((query, head_num), (key, kv_heads), (value, kv_heads))]
        batch, s_q, s_kv = rows[0].shape[0], rows[0].shape[1], rows[1].shape[1]
        q, k, v = (x.flatten(0, 1) for x in rows)
        q_len = [s_q * (b + 1) for b in range(batch)]
        kv_len = [s_kv * (b + 1) for b in range(batch)]
    out, _ = fused_attention(FaCall(
        op, 2, q, k, v, mask=atten_mask, q_lengths=tuple(q_len), kv_lengths=tuple(kv_len), heads=head_num,
        kv_heads=kv_heads, scale=scale, pre_tokens=pre_tockens, next_tokens=next_tockens, layout="TND",
        sparse_mode=sparse_mode, inner_precise=inner_precise,
    ))  # fmt: skip
    if input_layout == "TND":
        shape: tuple[int, ...] = (len(query), head_num, 8)
    else:
        out = _back(out.unflatten(0, (batch, s_q)), input_layout)
        shape = (batch, head_num, s_q, 8)
    unused = torch.full(shape, float("nan"), dtype=torch.float32)
    return out, unused, unused.clone(), torch.empty(0, dtype=query.dtype), 0, 0, 0
