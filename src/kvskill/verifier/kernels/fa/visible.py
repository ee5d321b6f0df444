"""Which keys a query sees (operator sheet, sections 3, 4 and 7).

`i` counts queries and `j` keys within one sequence; both ends of the band are inclusive. A plain mode gives
every query one range of keys; a user mask (modes 0 and 1) gives a boolean matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.fa.call import FaCall
from kvskill.verifier.kernels.fa.layout import PACKED, as_bsnd, query_form

__all__ = ["Visible", "incremental", "visible_keys", "window_of_pages"]


@dataclass(frozen=True)
class Visible:
    """Per query the keys [lo, hi); `picked` [Sq, Skv], if given, is True for the visible keys instead."""

    ranges: tuple[tuple[int, int], ...]
    picked: torch.Tensor | None = None

    def keys(self, i: int) -> torch.Tensor:
        """Indices of the keys that query i sees, ascending."""
        if self.picked is not None:
            return self.picked[i].nonzero()[:, 0]
        lo, hi = self.ranges[i]
        return torch.arange(lo, hi)


def incremental(call: FaCall) -> bool:
    """True on the one-token path of the dense layouts, where modes and bands have no effect."""
    form = query_form(call)
    if form in PACKED or form == "NSD":
        return False
    s_q = as_bsnd(call.query, form, call.heads).shape[1]
    return s_q == 1 and not (call.query_rope is not None and call.sparse_mode == 4)


def window_of_pages(call: FaCall) -> int | None:
    """Number of keys kept on the BSH + paged 3-D + one-token path (section 7), else None.

    There `pre_tokens` > 0 is a hard window in every sparse mode, on v1 and v2.
    """
    if call.layout == "BSH" and call.paged and call.key.dim() == 3 and call.query_rope is None:
        if incremental(call) and call.pre_tokens > 0:
            return call.pre_tokens
    return None


def visible_keys(call: FaCall, b: int, s_q: int, s_kv: int) -> Visible:
    """The visible set of sequence `b` with `s_q` queries and `s_kv` keys."""
    if incremental(call):
        return _one_token(call, b, s_q, s_kv)
    if call.sparse_mode in (0, 1) and call.mask is not None:
        return _from_mask(_mask_of(call.mask, b, s_q, s_kv))
    return Visible(tuple(_range(call, i, s_q, s_kv) for i in range(s_q)))


def _range(call: FaCall, i: int, s_q: int, s_kv: int) -> tuple[int, int]:
    mode, shift = call.sparse_mode, s_kv - s_q
    if mode == 0:
        lo, last = 0, s_kv - 1
    elif mode == 2:
        lo, last = 0, i
    elif mode == 3:
        lo, last = 0, i + shift
    elif mode == 4:
        lo, last = i + shift - call.pre_tokens, i + shift + call.next_tokens
    else:
        raise UnmodelledCall(call.op, f"sparse_mode {mode} without a full mask")
    lo, hi = max(lo, 0), min(last + 1, s_kv)
    return lo, max(lo, hi)


def _one_token(call: FaCall, b: int, s_q: int, s_kv: int) -> Visible:
    if call.mask is None:
        window = window_of_pages(call)
        lo = 0 if window is None else max(0, s_kv - window)
        return Visible(((lo, s_kv),) * s_q)
    if call.sparse_mode in (0, 1):
        # [B, Skv], [B, 1, Skv], [B, 1, 1, Skv]
        row = call.mask.reshape(call.mask.shape[0], -1)[b if call.mask.shape[0] > 1 else 0, :s_kv]
        return _from_mask(row[None].expand(s_q, s_kv))
    # Modes 2, 3, 4: the kernel takes row 0 of the compressed triangle as a key mask, which leaves key 0 only
    # (the trap of section 4). The rules refuse the call; this is what a device is expected to do with it.
    return _from_mask(call.mask.reshape(-1, call.mask.shape[-1])[:1, :s_kv].expand(s_q, s_kv))


def _mask_of(mask: torch.Tensor, b: int, s_q: int, s_kv: int) -> torch.Tensor:
    """[Sq, Skv] out of [Sq, Skv], [1|B, Sq, Skv] or [1|B, 1, Sq, Skv]; each axis may be longer."""
    if mask.dim() > 2:
        mask = mask.reshape(mask.shape[0], *mask.shape[-2:])[b if mask.shape[0] > 1 else 0]
    return mask[:s_q, :s_kv]


def _from_mask(hidden: torch.Tensor) -> Visible:
    picked = hidden == 0  # nonzero means masked out
    return Visible(tuple((0, picked.shape[1]) for _ in range(picked.shape[0])), picked)
