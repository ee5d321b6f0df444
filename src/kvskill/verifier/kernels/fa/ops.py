"""The registered attention operators: v1, v2 and their graph-capture helpers."""

from __future__ import annotations

from typing import Any

import torch

from kvskill.verifier.backend.context import current
from kvskill.verifier.kernels.fa.attend import attend
from kvskill.verifier.kernels.fa.call import FaCall, fa_call
from kvskill.verifier.kernels.fa.layout import PACKED, Sequences, as_bsnd, pack_output, query_form
from kvskill.verifier.kernels.fa.visible import Visible, visible_keys
from kvskill.verifier.kernels.registry import kernel

__all__ = ["fused_attention"]

_V1 = "npu_fused_infer_attention_score"
_V2 = "npu_fused_infer_attention_score_v2"
_Out = tuple[torch.Tensor, torch.Tensor]


def fused_attention(call: FaCall) -> _Out:
    """(attention_out, softmax_lse) of a call, in the layouts of section 2.1; lse is (0,) when not asked for."""
    seqs = Sequences.of(call)
    form = query_form(call)
    packed = form in PACKED
    rows = as_bsnd(call.query, form, call.heads)
    batch, s_q = (1, rows.shape[1]) if packed else rows.shape[:2]
    undefined = float("nan") if current().undefined == "nan" else 0.0
    parts = [_sequence(call, seqs, b) for b in range(len(seqs.q_len))]
    width = next((o.shape[-1] for o, _ in parts), call.value.shape[-1])
    out = torch.full((batch, s_q, call.heads, width), undefined, dtype=call.query.dtype)
    lse = torch.full((batch, s_q, call.heads), undefined, dtype=torch.float32)
    start = 0
    for b, (o, e) in enumerate(parts):
        target = (0, slice(start, start + len(o))) if packed else (b, slice(0, len(o)))
        out[target], lse[target] = o.to(out.dtype), e.to(lse.dtype)
        start += len(o)
    if not call.lse:
        return pack_output(call, out), torch.empty(0, dtype=torch.float32)
    return pack_output(call, out), (lse[0][..., None] if packed else lse.transpose(1, 2)[..., None].contiguous())


def _sequence(call: FaCall, seqs: Sequences, b: int) -> _Out:
    s_q, s_kv = seqs.q_len[b], seqs.kv_len[b]
    visible = visible_keys(call, b, s_q, s_kv)
    lo, hi = _loaded(call, visible, s_kv)
    query = seqs.query(b)
    keys, values = seqs.keys(b, lo, hi), seqs.values(b, lo, hi)
    pse = None
    if call.pse_shift is not None:
        shift = call.pse_shift[b if call.pse_shift.shape[0] > 1 else 0]
        pse = shift[:, :s_q, :s_kv]
    out, lse = attend(query, keys, values, visible, first=lo, scale=call.scale, pse=pse, sink=call.sink)
    if call.mask is not None and call.sparse_mode in (0, 1) and call.inner_precise < 2:
        # a user mask that hides a whole row: accuracy undefined unless inner_precise repairs it
        blind = torch.isinf(lse) & (lse > 0)
        if s_kv and current().undefined == "nan":
            out[blind] = float("nan")
    if current().nan == "absorbing":
        _absorb(out, keys, values, lo)
    return out, lse


def _loaded(call: FaCall, visible: Visible, s_kv: int) -> tuple[int, int]:
    """The keys that are read: the union of the visible ranges; in absorbing mode whole pages around it."""
    seen = [r for r in visible.ranges if r[0] < r[1]]
    if not seen:
        return 0, 0
    lo, hi = min(r[0] for r in seen), max(r[1] for r in seen)
    if current().nan == "absorbing":
        tile = call.block_size if call.paged else 1
        lo, hi = lo - lo % tile, min(s_kv, hi + (-hi) % tile)
    return lo, hi


def _absorb(out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
    """A masked key that is loaded has weight 0, and 0 * NaN is NaN: a NaN value row reaches every query."""
    bad = torch.isnan(values).any(dim=0)  # [Nkv, Dv]
    group = out.shape[1] // bad.shape[0]
    out.masked_fill_(bad.repeat_interleave(group, dim=0)[None], float("nan"))


@kernel(_V1)
def fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pse_shift: Any, atten_mask: Any,
    actual_seq_lengths: Any, actual_seq_lengths_kv: Any, block_table: Any, num_heads: int, scale: float,
    pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int, sparse_mode: int,
    inner_precise: int, block_size: int, softmax_lse_flag: bool, query_rope: Any = None, key_rope: Any = None,
) -> _Out:  # fmt: skip
    """Version 1. Argument list of every release from 6.0.rc3 on; rope arguments from 7.0.0 on."""
    return fused_attention(fa_call(_V1, locals()))


@kernel(_V2)
def fused_infer_attention_score_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_rope: Any, key_rope: Any, pse_shift: Any,
    atten_mask: Any, actual_seq_qlen: Any, actual_seq_kvlen: Any, block_table: Any, learnable_sink: Any,
    num_query_heads: int, num_key_value_heads: int, softmax_scale: float, pre_tokens: int, next_tokens: int,
    input_layout: str, sparse_mode: int, block_size: int, inner_precise: int, return_softmax_lse: bool,
) -> _Out:  # fmt: skip
    """Version 2 (from release train 7.2.0 on), with the learnable sink."""
    return fused_attention(fa_call(_V2, locals()))


def _fill(out: list[torch.Tensor], results: _Out) -> _Out:
    """Write results into the given outputs, as the `.out` overloads do."""
    for target, result in zip(out, results, strict=True):
        if target.shape == result.shape:
            target.copy_(result)
        elif result.numel():
            raise RuntimeError(f"out has shape {tuple(target.shape)}, the result {tuple(result.shape)}")
    return out[0], out[1]


@kernel(_V1 + ".out", neutral=("workspace",))
def fused_infer_attention_score_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pse_shift: Any, atten_mask: Any,
    actual_seq_lengths: Any, actual_seq_lengths_kv: Any, block_table: Any, num_heads: int, scale: float,
    pre_tokens: int, next_tokens: int, input_layout: str, num_key_value_heads: int, sparse_mode: int,
    inner_precise: int, block_size: int, softmax_lse_flag: bool, out: list[torch.Tensor],
    query_rope: Any = None, key_rope: Any = None,
) -> _Out:  # fmt: skip
    """Version 1 into given tensors [attention_out, softmax_lse]."""
    return _fill(out, fused_attention(fa_call(_V1, locals())))


@kernel(_V2 + ".out", neutral=("workspace",))
def fused_infer_attention_score_v2_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_rope: Any, key_rope: Any, pse_shift: Any,
    atten_mask: Any, actual_seq_qlen: Any, actual_seq_kvlen: Any, block_table: Any, learnable_sink: Any,
    num_query_heads: int, num_key_value_heads: int, softmax_scale: float, pre_tokens: int, next_tokens: int,
    input_layout: str, sparse_mode: int, block_size: int, inner_precise: int, return_softmax_lse: bool,
    out: list[torch.Tensor],
) -> _Out:  # fmt: skip
    """Version 2 into given tensors [attention_out, softmax_lse]."""
    return _fill(out, fused_attention(fa_call(_V2, locals())))


@kernel("npu_prompt_flash_attention")
def prompt_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, atten_mask: Any, pse_shift: Any,
    actual_seq_lengths: Any, num_heads: int, scale_value: float, pre_tokens: int, next_tokens: int,
    input_layout: str, num_key_value_heads: int, actual_seq_lengths_kv: Any, sparse_mode: int,
) -> torch.Tensor:  # fmt: skip
    """The older prefill operator: the same modes and masks, no pages, attention_out only."""
    given = {**locals(), "scale": scale_value}
    return fused_attention(fa_call("npu_prompt_flash_attention", given))[0]


@kernel("npu_incre_flash_attention", neutral=("inner_precise",))
def incre_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, atten_mask: Any, pse_shift: Any,
    actual_seq_lengths: Any, block_table: Any, num_heads: int, scale_value: float, input_layout: str,
    num_key_value_heads: int, block_size: int,
) -> torch.Tensor:  # fmt: skip
    """The older decode operator, one query token: `actual_seq_lengths` are the key lengths."""
    given = {**locals(), "scale": scale_value, "actual_seq_lengths_kv": actual_seq_lengths}
    given["actual_seq_lengths"] = None
    return fused_attention(fa_call("npu_incre_flash_attention", given))[0]
