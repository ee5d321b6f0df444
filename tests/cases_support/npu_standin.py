"""Plain PyTorch forms of the few `torch_npu` operators that the case models call.

Written for legacy_check.py only, from the operators' documented semantics. It shares nothing with
the verifier's kernels. Unknown names raise AttributeError, unknown keywords TypeError.
"""

from __future__ import annotations

import sys
import types

import torch
import torch.nn.functional as F  # noqa: N812

__all__ = ["install"]

INT32_MAX = 2147483647


def scatter_update_(data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int) -> torch.Tensor:
    """Row b of `data` gets `updates[b]` from offset `indices[b]` along `axis`, in place."""
    axis = axis % data.dim()
    if data.dim() != updates.dim() or data.dtype != updates.dtype or axis == 0:
        raise RuntimeError(f"scatter_update_: {data.shape} {data.dtype} <- {updates.shape} {updates.dtype}")
    if indices.dim() != 1 or indices.shape[0] != updates.shape[0] or updates.shape[0] > data.shape[0]:
        raise RuntimeError(f"scatter_update_: indices {tuple(indices.shape)} for {tuple(updates.shape)}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"scatter_update_: indices are {indices.dtype}")
    length = updates.shape[axis]
    for row, start in enumerate(indices.tolist()):
        if start < 0 or start + length > data.shape[axis]:
            raise RuntimeError(f"scatter_update_: row {row} writes [{start}, {start + length}) of {data.shape}")
        data[row].narrow(axis - 1, start, length).copy_(updates[row])
    return data


def npu_scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Rows of `input` at `indices` [n, 1] get `updates`, in place."""
    if indices.dim() != 2 or indices.shape[1] != 1 or updates.shape != (len(indices), *input.shape[1:]):
        raise RuntimeError(f"npu_scatter_nd_update_: {input.shape} {indices.shape} {updates.shape}")
    input[indices[:, 0].long()] = updates
    return input


def npu_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x1 + x2
    out, rstd = npu_rms_norm(total, gamma, epsilon)
    return out, rstd, total


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.chunk(2, dim=dim)
    return F.silu(gate) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    else:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
) -> torch.Tensor:
    if input.dim() != 4:
        raise RuntimeError("npu_rotary_mul wants 4-D input")
    return _rotate(input, r1, r2, rotary_mode == "interleave")


def npu_apply_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str = "BSND"
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place, and returns its inputs, as the NPU operator does."""
    if layout not in ("BSND", "BSH") or query.dim() != 4:
        raise RuntimeError(f"npu_apply_rotary_pos_emb: layout {layout}, {query.dim()}-D")
    query.copy_(_rotate(query.clone(), cos, sin, False))
    key.copy_(_rotate(key.clone(), cos, sin, False))
    return query, key


def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight, index = torch.topk(torch.softmax(x.float(), -1), k, dim=-1)
    rows = x.shape[0]
    row_idx = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().contiguous()
    return weight.to(x.dtype), index.int(), row_idx


def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Expert-sorted copies of the rows; row map of type 0 (gather) or 1 (scatter); tokens per expert."""
    top_k = expert_idx.shape[1]
    flat = expert_idx.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    where = torch.empty_like(order)
    where[order] = torch.arange(order.numel())
    counts = torch.bincount(flat, minlength=expert_num)
    if expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    return x[order // top_k], (where if row_idx_type == 0 else order).int(), counts, None


def npu_grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    bias: list[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    split_item: int = 0,
    group_type: int = -1,
    group_list_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Only the form that MoE code uses: one x, one stacked weight [E, K, N], rows grouped by expert."""
    if group_list is None or group_type != 0 or split_item not in (2, 3):
        raise RuntimeError("npu_grouped_matmul: only grouped rows with split_item 2 or 3")
    ends = group_list if group_list_type == 0 else group_list.cumsum(0)
    parts, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        part = x[0][start:end] @ weight[0][expert]
        parts.append(part if bias is None else part + bias[0][expert])
        start = end
    return [torch.cat(parts)]


def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None = None,
    skip2: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    expanded_src_to_dst_row: torch.Tensor | None = None,
    export_for_source_row: torch.Tensor | None = None,
    drop_pad_mode: int = 0,
) -> torch.Tensor:
    """Weighted sum of a token's rows. drop_pad_mode 0 reads the map column-wise, 2 row-wise."""
    if scales is None or expanded_src_to_dst_row is None or bias is not None:
        raise RuntimeError("npu_moe_finalize_routing: scales and row map are needed, bias is not supported here")
    rows, top_k = scales.shape
    index = expanded_src_to_dst_row.long()
    index = index.view(rows, top_k) if drop_pad_mode in (2, 3) else index.view(top_k, rows).t()
    out = (expanded_permuted_rows[index] * scales.unsqueeze(-1)).sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + skip
    return out


def _fa_bsh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
    sparse_mode: int,
    mask: torch.Tensor | None,
    kv_lengths: list[int] | None,
    pre_tokens: int,
) -> torch.Tensor:
    batch, q_len, _ = query.shape
    out = torch.zeros_like(query)
    for b in range(batch):
        skv = key.shape[1] if kv_lengths is None else int(kv_lengths[b])
        q = query[b].view(q_len, heads, -1)
        k = key[b, :skv].reshape(skv, kv_heads, -1).repeat_interleave(heads // kv_heads, 1)
        v = value[b, :skv].reshape(skv, kv_heads, -1).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        if q_len > 1 and sparse_mode in (2, 3, 4):
            if mask is None or tuple(mask.shape) != (2048, 2048) or mask.dtype != torch.bool:
                raise RuntimeError("sparse modes 2 to 4 want the [2048, 2048] bool mask")
            shift = skv - q_len if sparse_mode in (3, 4) else 0
            qi = torch.arange(q_len).view(-1, 1) + shift
            ki = torch.arange(skv)
            hidden = ki > qi
            if sparse_mode == 4:
                hidden = hidden | (ki < qi - pre_tokens)
            scores = scores.masked_fill(hidden, float("-inf"))
        elif mask is not None:
            raise RuntimeError("a decode call over a contiguous cache takes no mask")
        out[b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).reshape(q_len, -1).to(query.dtype)
    return out


def _fa_tnd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_ends: list[int] | None,
    kv_ends: list[int] | None,
    scale: float,
    sparse_mode: int,
    mask: torch.Tensor | None,
    pre_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed sequences, both length lists cumulative. Every causal or band call goes by the diagonal."""
    if q_ends is None or kv_ends is None or q_ends[-1] != query.shape[0] or kv_ends[-1] > key.shape[0]:
        raise RuntimeError(f"TND lengths {q_ends} {kv_ends} for {tuple(query.shape)} {tuple(key.shape)}")
    if sparse_mode not in (3, 4) or mask is None or tuple(mask.shape) != (2048, 2048):
        raise RuntimeError("TND here: sparse mode 3 or 4 with the [2048, 2048] mask")
    parts = []
    for n, (q_end, kv_end) in enumerate(zip(q_ends, kv_ends, strict=True)):
        q = query[q_ends[n - 1] if n else 0 : q_end]
        k, v = (t[kv_ends[n - 1] if n else 0 : kv_end] for t in (key, value))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        qi = torch.arange(q.shape[0]).view(-1, 1) + k.shape[0] - q.shape[0]
        ki = torch.arange(k.shape[0])
        hidden = (ki > qi) | (ki < qi - pre_tokens if sparse_mode == 4 else torch.zeros(1, dtype=torch.bool))
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", probs, v.float()).to(query.dtype))
    return torch.cat(parts), torch.zeros(0)


def _lengths(lengths: torch.Tensor | list[int] | None) -> list[int] | None:
    if isinstance(lengths, torch.Tensor):
        if lengths.is_floating_point() or lengths.dim() == 0:
            raise RuntimeError("lengths are a 1-D int tensor or a list")
        return [int(n) for n in lengths.tolist()]
    return lengths


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: torch.Tensor | list[int] | None = None,
    actual_seq_lengths_kv: torch.Tensor | list[int] | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = INT32_MAX,
    next_tokens: int = INT32_MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    if input_layout == "TND":
        return _fa_tnd(
            query,
            key,
            value,
            _lengths(actual_seq_lengths),
            _lengths(actual_seq_lengths_kv),
            scale,
            sparse_mode,
            atten_mask,
            pre_tokens,
        )
    if input_layout != "BSH":
        raise RuntimeError("only BSH, and TND without a block table, here")
    out = _fa_bsh(
        query,
        key,
        value,
        num_heads,
        num_key_value_heads or num_heads,
        scale,
        sparse_mode,
        atten_mask,
        _lengths(actual_seq_lengths_kv),
        pre_tokens,
    )
    return out, torch.zeros(0)


def npu_prompt_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = INT32_MAX,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
) -> torch.Tensor:
    if input_layout != "BSH":
        raise RuntimeError("only BSH here")
    kv_heads = num_key_value_heads or num_heads
    return _fa_bsh(query, key, value, num_heads, kv_heads, scale_value, sparse_mode, atten_mask, None, pre_tokens)


def npu_incre_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: torch.Tensor | list[int] | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
) -> torch.Tensor:
    if input_layout != "BSH" or query.shape[1] != 1:
        raise RuntimeError("only BSH and one token here")
    kv_heads = num_key_value_heads or num_heads
    lengths = _lengths(actual_seq_lengths)
    return _fa_bsh(query, key, value, num_heads, kv_heads, scale_value, 0, None, lengths, INT32_MAX)


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: torch.Tensor | list[int] | None = None,
    actual_seq_kvlen: torch.Tensor | list[int] | None = None,
    num_query_heads: int = 1,
    softmax_scale: float = 1.0,
    pre_tokens: int = INT32_MAX,
    next_tokens: int = INT32_MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return npu_fused_infer_attention_score(
        query,
        key,
        value,
        atten_mask=atten_mask,
        actual_seq_lengths=actual_seq_qlen,
        actual_seq_lengths_kv=actual_seq_kvlen,
        num_heads=num_query_heads,
        scale=softmax_scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
    )


OPERATORS = (
    scatter_update_,
    npu_scatter_nd_update_,
    npu_rms_norm,
    npu_add_rms_norm,
    npu_swiglu,
    npu_rotary_mul,
    npu_apply_rotary_pos_emb,
    npu_moe_gating_top_k_softmax,
    npu_moe_init_routing_v2,
    npu_grouped_matmul,
    npu_moe_finalize_routing,
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
    npu_prompt_flash_attention,
    npu_incre_flash_attention,
)


def install() -> None:
    """`import torch_npu` gives these; `torch.ops.npu.<name>` too, for files that call through it."""
    if "torch_npu" in sys.modules:
        return
    module = types.ModuleType("torch_npu")
    for function in OPERATORS:
        setattr(module, function.__name__, function)
    sys.modules["torch_npu"] = module
    namespace = types.SimpleNamespace(**{function.__name__: function for function in OPERATORS})
    torch.ops.npu = namespace
