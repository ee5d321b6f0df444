"""Batched and grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch

from kvskill.verifier.backend.context import current
from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["group_sizes"]


@kernel("npu_transpose_batchmatmul", neutral=("batch_split_factor",))
def transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
) -> torch.Tensor:
    """((input permuted) @ (weight permuted)) permuted, all 3-D; defaults [0,1,2], [0,1,2], [1,0,2]."""
    left = up(input).permute(*(perm_x1 or (0, 1, 2)))
    right = up(weight, left.dtype).permute(*(perm_x2 or (0, 1, 2)))
    return (left @ right).permute(*(perm_y or (1, 0, 2))).contiguous().to(input.dtype)


def group_sizes(group_list: Any, kind: int, groups: int, op: str) -> list[int]:
    """Rows of each group from a group list: kind 0 running sums, 1 counts, 2 (expert, count) pairs."""
    values = group_list.tolist() if isinstance(group_list, torch.Tensor) else list(group_list)
    if kind == 0:
        return [b - a for a, b in zip([0, *values], values, strict=False)]
    if kind == 1:
        return [int(v) for v in values]
    if kind == 2:
        counts = [0] * groups
        for expert, count in values:
            if count == 0:
                break
            counts[expert] = count
        return counts
    raise UnmodelledCall(op, f"group_list_type {kind}")


@kernel("npu_grouped_matmul", "npu_grouped_matmul.List", neutral=("tuning_config",))
def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor] | None = None,
    group_list: Any = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    output_dtype: Any = None,
) -> list[torch.Tensor]:
    """x @ weight group by group.

    One x [M, K] and one weight [E, K, N] (or E weights [K, N]): rows are split by `group_list` (group_type 0)
    and the result is one [M, N]; rows behind the last group are undefined. Several x without a group list:
    x[i] @ weight[i], joined when split_item is 2 or 3. Bias [E, N] or a list of [N].
    """
    op = "npu_grouped_matmul"
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    biases: list[Any] = [None] * len(weights)
    if bias:
        biases = list(bias[0]) if len(bias) == 1 and bias[0].dim() == 2 else list(bias)
    if group_list is not None and len(x) == 1 and group_type in (None, 0):
        sizes = group_sizes(group_list, group_list_type or 0, len(weights), op)
        if len(sizes) != len(weights) or sum(sizes) > x[0].shape[0]:
            raise RuntimeError(f"{op}: groups {sizes} do not fit {len(weights)} weights and {len(x[0])} rows")
        parts = list(x[0][: sum(sizes)].split(sizes))
    elif group_list is None and len(x) == len(weights):
        parts = list(x)
    else:
        raise UnmodelledCall(op, f"{len(x)} x, {len(weights)} weights, group_type {group_type}")
    outs = [_linear(a, w, b, output_dtype) for a, w, b in zip(parts, weights, biases, strict=True)]
    if split_item not in (2, 3):
        return outs
    joined = torch.cat(outs)
    rest = x[0].shape[0] - joined.shape[0] if len(x) == 1 else 0
    if rest:
        fill = float("nan") if current().undefined == "nan" else 0.0
        joined = torch.cat((joined, joined.new_full((rest, joined.shape[1]), fill)))
    return [joined]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: Any) -> torch.Tensor:
    if not x.is_floating_point() or not weight.is_floating_point():
        raise UnmodelledCall("npu_grouped_matmul", f"{x.dtype} x {weight.dtype} (quantised)")
    out = up(x) @ up(weight, up(x).dtype)
    if bias is not None:
        out = out + up(bias, out.dtype)
    return out.to(dtype or x.dtype)
