"""The arithmetic of one sequence (operator sheet, section 10, steps 3 to 6).

    s = (q . k) * scale [+ pse],  m = max s,  l = sum exp(s - m),  out = sum round(exp(s - m)) v / (l [+ exp(sink - m)])

Only visible keys take part. Where all keys at hand are finite a masked matrix product gives the same value
faster, since 0 * finite is 0; as soon as one is not, each query gathers its own keys, because 0 * NaN is NaN.
"""

from __future__ import annotations

import torch

from kvskill.verifier.kernels.fa.visible import Visible
from kvskill.verifier.kernels.numeric import up, working_dtype

__all__ = ["attend"]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: Visible,
    *,
    first: int,
    scale: float,
    pse: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    per_query: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence.

    query [Sq, Nq, D]; keys [n, Nkv, D] and values [n, Nkv, Dv] hold positions first .. first + n - 1, which
    must cover the visible set; pse [Nq, Sq, Skv]; sink [Nq]. Returns out [Sq, Nq, Dv] and lse [Sq, Nq] in the
    working dtype. A query without a visible key gets 0 and +inf. `per_query` forces the gathering form.
    """
    s_q, heads, _ = query.shape
    kind = working_dtype(query, keys, values)
    out = torch.zeros(s_q, heads, values.shape[-1], dtype=kind)
    lse = torch.full((s_q, heads), float("inf"), dtype=kind)
    if s_q == 0 or keys.shape[0] == 0:
        return out, lse
    finite = bool(torch.isfinite(keys).all()) and bool(torch.isfinite(values).all())
    if finite and not per_query:
        see = _matrix(visible, s_q, first, keys.shape[0])
        some = see.any(dim=1)
        o, e = _softmax_v(query, keys, values, see, scale, _columns(pse, first, keys.shape[0]), sink)
        out[some], lse[some] = o[some], e[some]
        return out, lse
    for i in range(s_q):
        index = visible.keys(i) - first
        if len(index) == 0:
            continue
        bias = None if pse is None else pse[:, i : i + 1, index + first]
        see = torch.ones(1, len(index), dtype=torch.bool)
        o, e = _softmax_v(query[i : i + 1], keys[index], values[index], see, scale, bias, sink)
        out[i], lse[i] = o[0], e[0]
    return out, lse


def _matrix(visible: Visible, s_q: int, first: int, n: int) -> torch.Tensor:
    if visible.picked is not None:
        return visible.picked[:, first : first + n]
    bounds = torch.tensor(visible.ranges)
    j = torch.arange(first, first + n)
    return (j >= bounds[:, :1]) & (j < bounds[:, 1:])


def _columns(pse: torch.Tensor | None, first: int, n: int) -> torch.Tensor | None:
    return None if pse is None else pse[:, :, first : first + n]


def _softmax_v(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    see: torch.Tensor,
    scale: float,
    pse: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = working_dtype(query, keys, values)
    s_q, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads  # query head h uses key head h // group
    q = up(query, kind).reshape(s_q, kv_heads, group, dim).permute(1, 2, 0, 3)
    k = up(keys, kind).permute(1, 2, 0)[:, None]
    score = (q @ k) * scale  # [Nkv, group, Sq, n]
    if pse is not None:
        score = score + up(pse, kind).reshape(kv_heads, group, s_q, -1)
    score = score.masked_fill(~see, float("-inf"))
    top = score.amax(dim=-1, keepdim=True)
    weight = torch.exp(score - top)
    total = weight.sum(dim=-1, keepdim=True)
    lse = torch.log(total) + top
    if sink is not None:  # an extra logit without a value row, not scaled, not in the maximum
        total = total + torch.exp(up(sink, kind).reshape(kv_heads, group, 1, 1) - top)
    v = up(values, kind).permute(1, 0, 2)[:, None]
    out = up(weight.to(query.dtype), kind) @ v / total
    return (
        out.permute(2, 0, 1, 3).reshape(s_q, heads, -1),
        lse[..., 0].permute(2, 0, 1).reshape(s_q, heads),
    )
