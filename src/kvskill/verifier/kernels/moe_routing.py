"""Sorting tokens by expert and back. Sorts are stable."""

from __future__ import annotations

import torch

from kvskill.verifier.backend.context import current
from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["undefined_rows"]


def undefined_rows(like: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, H] of the value that undefined output holds in this run."""
    value = float("nan") if current().undefined == "nan" and like.is_floating_point() else 0
    return like.new_full((rows, *like.shape[1:]), value)


@kernel("npu_moe_init_routing")
def init_routing(
    x: torch.Tensor, row_idx: torch.Tensor, expert_idx: torch.Tensor, active_num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (expanded_x, expanded_row_idx, expanded_expert_idx).

    (expert, row) pairs sorted by expert; expanded_x[i] = x[sorted_row[i] % rows], the first
    min(rows, active_num) * k of them; expanded_row_idx[sorted_row[i]] = i.
    """
    rows, k = expert_idx.shape
    order = expert_idx.flatten().sort(stable=True).indices
    experts, source = expert_idx.flatten()[order], row_idx.flatten()[order].long()
    back = torch.empty(rows * k, dtype=torch.int32)
    back[source] = torch.arange(rows * k, dtype=torch.int32)
    kept = min(rows, active_num) * k
    return x[source[:kept] % rows], back, experts.to(torch.int32)


@kernel("npu_moe_compute_expert_tokens")
def compute_expert_tokens(sorted_expert_for_source_row: torch.Tensor, num_expert: int) -> torch.Tensor:
    """Running count: entry e is the number of rows with an expert <= e."""
    experts = torch.arange(num_expert)
    ends = (sorted_expert_for_source_row[None].long() <= experts[:, None]).sum(dim=1)
    return ends.to(sorted_expert_for_source_row.dtype)


@kernel("npu_moe_init_routing_v2")
def init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    scale: torch.Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    expert_capacity: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (expanded_x [rows*k, H], expanded_row_idx int32 [rows*k], expert counts int64, expanded_scale).

    Choices are flattened row by row and sorted by expert; those outside `active_expert_range` come last and
    their rows are undefined. row_idx_type 0: entry r is the place of choice r (-1 if outside); 1: entry i is the
    choice at place i. Counts: type 0 running sums, 1 counts, 2 (expert, count) pairs closed by zeros.
    """
    op = "npu_moe_init_routing_v2"
    rows, k = expert_idx.shape
    total = rows * k
    if drop_pad_mode or quant_mode != -1 or 0 < active_num < total:
        raise UnmodelledCall(op, f"drop_pad_mode {drop_pad_mode}, quant_mode {quant_mode}, active_num {active_num}")
    first, last = active_expert_range or (0, expert_num)
    experts = expert_idx.flatten().long()
    inside = (experts >= first) & (experts < last)
    order = torch.where(inside, experts, last).sort(stable=True).indices
    kept = int(inside.sum())
    expanded = torch.cat((x[order[:kept] // k], undefined_rows(x, total - kept)))
    if row_idx_type == 1:
        index = order.to(torch.int32)
    else:
        index = torch.full((total,), -1, dtype=torch.int32)
        index[order[:kept]] = torch.arange(kept, dtype=torch.int32)
    counts = torch.bincount(experts[inside] - first, minlength=last - first)
    if not expert_tokens_num_flag:
        tokens = torch.tensor(0, dtype=torch.int64)  # undefined, of shape () in the Meta kernel
    elif expert_tokens_num_type == 0:
        tokens = counts.cumsum(0)
    elif expert_tokens_num_type == 1:
        tokens = counts
    else:
        tokens = torch.zeros(expert_num, 2, dtype=torch.int64)
        used = counts.nonzero()[:, 0]
        tokens[: len(used)] = torch.stack((used + first, counts[used]), dim=1)
    scales = undefined_rows(torch.empty(0, dtype=torch.float32), total)
    if scale is not None:
        scales[:kept] = scale.flatten()[order[:kept] // k]
    return expanded, index, tokens, scales


@kernel("npu_moe_finalize_routing")
def finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """out[i] = skip1[i] + skip2[i] + sum_j scales[i, j] * (rows[place(i, j)] + bias[expert(i, j)]).

    place(i, j) is entry i + j * rows of `expanded_src_to_dst_row` in modes 0 and 1, entry i * k + j in modes
    2 and 3; in modes 1 and 3 a place of -1 was dropped and counts nothing.
    """
    op = "npu_moe_finalize_routing"
    if drop_pad_mode not in (0, 1, 2, 3):
        raise UnmodelledCall(op, f"drop_pad_mode {drop_pad_mode}")
    k = scales.shape[1] if scales is not None else int(k or 1)
    rows = expanded_src_to_dst_row.numel() // k
    place = expanded_src_to_dst_row.long()
    place = place.reshape(k, rows).T if drop_pad_mode in (0, 1) else place.reshape(rows, k)
    tokens = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.shape[-1])
    wide = up(tokens)
    out = torch.zeros(rows, wide.shape[1], dtype=wide.dtype)
    for i in range(rows):
        for j in range(k):
            at = int(place[i, j])
            if at < 0 and drop_pad_mode in (1, 3):
                continue
            if not 0 <= at < len(wide):
                raise IndexError(f"{op}: row {at} of {len(wide)}")
            term = wide[at]
            if bias is not None and export_for_source_row is not None:
                term = term + up(bias, wide.dtype)[int(export_for_source_row[i, j])]
            out[i] += term if scales is None else term * up(scales, wide.dtype)[i, j]
    for skip in (skip1, skip2):
        if skip is not None:
            out = out + up(skip, wide.dtype)
    return out.to(expanded_permuted_rows.dtype)


@kernel("npu_moe_re_routing")
def re_routing(
    tokens: torch.Tensor,
    expert_token_num_per_rank: torch.Tensor,
    per_token_scales: torch.Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens in order (rank, expert) to order (expert, rank) -> (tokens, scales, index int32, counts per expert).

    index (idx_type 0) holds the old place of each new row; 1 holds the new place of each old row.
    """
    counts = expert_token_num_per_rank
    ranks, experts = counts.shape
    if expert_token_num_type != 1:
        raise UnmodelledCall("npu_moe_re_routing", f"expert_token_num_type {expert_token_num_type}")
    number = torch.arange(experts).repeat(ranks)
    order = number.repeat_interleave(counts.flatten().long()).sort(stable=True).indices
    index = order if idx_type == 0 else order.argsort()
    scales = undefined_rows(torch.empty(0, dtype=torch.float32), len(tokens))
    if per_token_scales is not None:
        scales = per_token_scales[order]
    return tokens[order], scales, index.to(torch.int32), counts.sum(dim=0)


@kernel("npu_moe_token_permute")
def token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (rows sorted by expert, place int32): rows[place[i]] = tokens[i // k]; the first num_out_tokens rows."""
    k = indices.shape[1] if indices.dim() == 2 else 1
    order = indices.flatten().sort(stable=True).indices
    rows = tokens[order // k]
    return rows[: num_out_tokens or None], order.argsort().to(torch.int32)


@kernel("npu_moe_token_unpermute")
def token_unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """out[t] = sum_j probs[t, j] * permuted_tokens[sorted_indices[t * k + j]]; k = 1 without probs."""
    rows = up(permuted_tokens)[sorted_indices.long()]
    if probs is not None:
        rows = (rows * up(probs, rows.dtype).reshape(-1, 1)).unflatten(0, tuple(probs.shape)).sum(dim=1)
    return rows.to(permuted_tokens.dtype)
