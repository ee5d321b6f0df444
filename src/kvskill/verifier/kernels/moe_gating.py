"""Choice of experts. Ties go to the lower expert index."""

from __future__ import annotations

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["top"]

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of the last axis, largest first, ties by lower index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _rows(shape: torch.Size, k: int) -> torch.Tensor:
    """row_idx of a choice: expert j of row i has the number i + j * rows (column order)."""
    rows = shape[:-1].numel()
    return torch.arange(rows * k, dtype=torch.int32).reshape(k, rows).T.reshape(*shape[:-1], k).contiguous()


@kernel("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1) -> _Three:
    """softmax, then top k -> (y, expert_idx int32, row_idx int32); a finished row chooses expert E (none)."""
    scores = torch.softmax(up(x), dim=-1)
    chosen = top(scores, k)
    y = scores.gather(-1, chosen)
    if finished is not None:
        chosen = chosen.masked_fill(finished[..., None], x.shape[-1])
    return y.to(x.dtype), chosen.to(torch.int32), _rows(x.shape, k)


@kernel("npu_moe_gating_top_k_softmax_v2")
def gating_top_k_softmax_v2(
    x: torch.Tensor,
    k: int = 1,
    finished: torch.Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> _Three:
    """renorm 0: softmax then top k; 1: top k then softmax over the chosen -> (y, expert_idx, softmax)."""
    wide = up(x)
    scores = torch.softmax(wide, dim=-1)
    chosen = top(wide if renorm else scores, k)
    y = torch.softmax(wide.gather(-1, chosen), dim=-1) if renorm else scores.gather(-1, chosen)
    if finished is not None:
        chosen = chosen.masked_fill(finished[..., None], x.shape[-1])
    full = scores.float() if output_softmax and not renorm else torch.empty(0, dtype=torch.float32)
    return y.to(x.dtype), chosen.to(torch.int32), full


@kernel("npu_moe_gating_top_k")
def gating_top_k(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> _Three:
    """Grouped choice -> (y, expert_idx int32, norm float32).

    Scores are softmax (norm_type 0) or sigmoid (1) of x. Groups and experts are chosen by score + bias: a group
    counts with its best expert (mode 0) or the sum of its best two (1). y are the scores without the bias,
    divided by their sum + eps for sigmoid, times routed_scaling_factor.
    """
    if renorm:
        raise UnmodelledCall("npu_moe_gating_top_k", f"renorm {renorm}")
    wide = up(x)
    scores = torch.sigmoid(wide) if norm_type == 1 else torch.softmax(wide, dim=-1)
    choice = scores if bias is None else scores + up(bias, wide.dtype)
    if group_count > 1:
        grouped = choice.unflatten(-1, (group_count, -1))
        best = grouped.sort(dim=-1, descending=True).values
        worth = best[..., 0] if group_select_mode == 0 else best[..., :2].sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, top(worth, k_group), True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    chosen = top(choice, k)
    y = scores.gather(-1, chosen)
    if norm_type == 1:
        y = y / (y.sum(dim=-1, keepdim=True) + eps)
    norm = scores.float() if out_flag else torch.zeros_like(scores, dtype=torch.float32)
    return (y * routed_scaling_factor).to(x.dtype), chosen.to(torch.int32), norm
