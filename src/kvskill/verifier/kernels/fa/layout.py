"""Layouts, lengths and the per-sequence view of a call (operator sheet, sections 2.1, 5, 6.1).

Every layout is brought to one form: per sequence a query [Sq, Nq, D] and the keys of any range of positions as
[n, Nkv, D]. Only the positions asked for are read from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.fa.call import FaCall

__all__ = ["OUTPUT_OF", "PACKED", "QUERY_OF", "Sequences", "batch_lengths", "pack_output", "query_form"]

# layout -> layout of query (and of unpaged key/value), layout of the output. The part after "_" is the output.
QUERY_OF = {
    "TND": "TND", "TND_NTD": "TND", "NTD_TND": "NTD", "NTD": "NTD",
    "BSH": "BSH", "BSND": "BSND", "BNSD": "BNSD", "BNSD_BSND": "BNSD", "NSD": "NSD",
    "BSH_NBSD": "BSH", "BSND_NBSD": "BSND", "BNSD_NBSD": "BNSD", "BSH_BNSD": "BSH", "BSND_BNSD": "BSND",
}  # fmt: skip
OUTPUT_OF = {name: name.split("_")[-1] for name in QUERY_OF}
PACKED = frozenset({"TND", "NTD"})  # query layouts without a batch axis: lengths are needed


def query_form(call: FaCall) -> str:
    """The query layout of the call; an unknown layout string is an error at torch level too."""
    if call.layout not in QUERY_OF:
        raise RuntimeError(f"{call.op}: input_layout {call.layout!r} is not supported")
    return QUERY_OF[call.layout]


def as_bsnd(tensor: torch.Tensor, form: str, heads: int) -> torch.Tensor:
    """A dense tensor as [B, S, N, D], a packed one as [1, T, N, D]."""
    if form == "BSH":
        return tensor.reshape(*tensor.shape[:2], heads, tensor.shape[2] // heads)
    if form == "BSND":
        return tensor
    if form == "BNSD":
        return tensor.transpose(1, 2)
    if form == "TND":
        return tensor[None]
    return tensor.transpose(0, 1)[None]  # NTD, NSD


def batch_lengths(call: FaCall) -> tuple[list[int], list[int]]:
    """Query and key lengths per sequence, plain counts, whatever convention the call uses."""
    form = query_form(call)
    if form in PACKED:
        if call.q_lengths is None or call.kv_lengths is None:
            raise RuntimeError(f"{call.op}: layout {call.layout} needs query and key lengths")
        q = _differences(call.q_lengths)
        kv = list(call.kv_lengths) if call.paged else _differences(call.kv_lengths)
        return q, kv
    batch, s_q = as_bsnd(call.query, form, call.heads).shape[:2]
    if call.paged:
        if call.kv_lengths is None:
            raise RuntimeError(f"{call.op}: a block table needs key lengths")
        kv = _spread(call.kv_lengths, batch)
    else:
        s_kv = as_bsnd(call.key, form, call.kv_heads).shape[1]
        kv = [s_kv] * batch if call.kv_lengths is None else _spread(call.kv_lengths, batch)
    # one query token without rope: the incremental path ignores the query lengths
    ignored = s_q == 1 and call.query_rope is None
    q = [s_q] * batch if call.q_lengths is None or ignored else _spread(call.q_lengths, batch)
    return q, kv


def _differences(cumulative: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in zip((0, *cumulative), cumulative, strict=False)]


def _spread(lengths: tuple[int, ...], batch: int) -> list[int]:
    return [lengths[0]] * batch if len(lengths) == 1 else list(lengths[:batch])


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call: `q_len[b]` query rows, `kv_len[b]` keys, and readers for both."""

    call: FaCall
    q_len: list[int]
    kv_len: list[int]

    @classmethod
    def of(cls, call: FaCall) -> Sequences:
        """Split the call. Raises RuntimeError when the layout or its lengths are missing or unknown."""
        return cls(call, *batch_lengths(call))

    def query(self, b: int) -> torch.Tensor:
        """[q_len, Nq, D + D_rope]: rope parts are appended, q.k is then one dot product."""
        parts = [self._query_part(self.call.query, b)]
        if self.call.query_rope is not None:
            parts.append(self._query_part(self.call.query_rope, b))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def keys(self, b: int, lo: int, hi: int) -> torch.Tensor:
        """Keys of positions [lo, hi) of sequence b: [hi - lo, Nkv, D + D_rope]."""
        parts = [self._rows(self.call.key, b, lo, hi)]
        if self.call.key_rope is not None:
            parts.append(self._rows(self.call.key_rope, b, lo, hi))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def values(self, b: int, lo: int, hi: int) -> torch.Tensor:
        """Values of positions [lo, hi) of sequence b: [hi - lo, Nkv, Dv]."""
        return self._rows(self.call.value, b, lo, hi)

    def _query_part(self, tensor: torch.Tensor, b: int) -> torch.Tensor:
        form = query_form(self.call)
        rows = as_bsnd(tensor, form, self.call.heads)
        if form in PACKED:
            start = sum(self.q_len[:b])
            return rows[0, start : start + self.q_len[b]]
        return rows[b, : self.q_len[b]]

    def _rows(self, tensor: torch.Tensor, b: int, lo: int, hi: int) -> torch.Tensor:
        if self.call.block_table is not None:
            return read_pages(self.call, tensor, b, lo, hi)
        form = query_form(self.call)
        rows = as_bsnd(tensor, form, self.call.kv_heads)
        if form in PACKED:
            start = sum(self.kv_len[:b])
            return rows[0, start + lo : start + hi]
        return rows[b, lo:hi]


def read_pages(call: FaCall, cache: torch.Tensor, b: int, lo: int, hi: int) -> torch.Tensor:
    """Positions [lo, hi) of sequence b out of a paged cache, as [hi - lo, Nkv, D].

    3-D [num_blocks, block_size, Nkv*D]; 4-D [num_blocks, Nkv, block_size, D]; 5-D (NZ)
    [num_blocks, Nkv, D/x, block_size, x]. Position p lies in block `block_table[b, p // block_size]`.
    """
    assert call.block_table is not None
    size = cache.shape[{3: 1, 4: 2, 5: 3}.get(cache.dim(), 0)]
    if cache.dim() not in (3, 4, 5) or size != call.block_size:
        raise UnmodelledCall(call.op, f"a cache of shape {tuple(cache.shape)} with block_size {call.block_size}")
    position = torch.arange(lo, hi)
    block = call.block_table[b].long()[position // call.block_size]
    row = position % call.block_size
    if cache.dim() == 3:
        return cache[block, row].reshape(hi - lo, call.kv_heads, -1)
    if cache.dim() == 4:
        return cache[block, :, row]
    return cache[block, :, :, row].reshape(hi - lo, cache.shape[1], -1)


def pack_output(call: FaCall, rows: torch.Tensor) -> torch.Tensor:
    """[B, S, N, Dv] (packed: [1, T, N, Dv]) in the output layout of the call, contiguous."""
    form = OUTPUT_OF[call.layout]
    if form == "BSH":
        out = rows.flatten(2)
    elif form == "BSND":
        out = rows
    elif form == "BNSD":
        out = rows.transpose(1, 2)
    elif form == "NBSD":
        out = rows.permute(2, 0, 1, 3)
    elif form == "TND":
        out = rows[0]
    else:  # NTD, NSD
        out = rows[0].transpose(0, 1)
    return out.contiguous()
