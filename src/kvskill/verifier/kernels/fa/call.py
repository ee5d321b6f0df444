"""One form for the argument lists of v1 and v2 (operator sheet, section 1.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["INT_MAX", "FaCall", "fa_call"]

INT_MAX = 2147483647

# our name -> (v1 name, v2 name); a name missing on one side is absent from that operator
_NAMES: dict[str, tuple[str | None, str | None]] = {
    "query": ("query", "query"),
    "key": ("key", "key"),
    "value": ("value", "value"),
    "query_rope": ("query_rope", "query_rope"),
    "key_rope": ("key_rope", "key_rope"),
    "pse_shift": ("pse_shift", "pse_shift"),
    "mask": ("atten_mask", "atten_mask"),
    "q_lengths": ("actual_seq_lengths", "actual_seq_qlen"),
    "kv_lengths": ("actual_seq_lengths_kv", "actual_seq_kvlen"),
    "block_table": ("block_table", "block_table"),
    "sink": (None, "learnable_sink"),
    "heads": ("num_heads", "num_query_heads"),
    "kv_heads": ("num_key_value_heads", "num_key_value_heads"),
    "scale": ("scale", "softmax_scale"),
    "pre_tokens": ("pre_tokens", "pre_tokens"),
    "next_tokens": ("next_tokens", "next_tokens"),
    "layout": ("input_layout", "input_layout"),
    "sparse_mode": ("sparse_mode", "sparse_mode"),
    "inner_precise": ("inner_precise", "inner_precise"),
    "block_size": ("block_size", "block_size"),
    "lse": ("softmax_lse_flag", "return_softmax_lse"),
}
_LENGTHS = ("q_lengths", "kv_lengths")


@dataclass(frozen=True)
class FaCall:
    """One attention call. Lengths are as given (cumulative or not); `kv_heads` is resolved (0 = `heads`)."""

    op: str
    version: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_rope: torch.Tensor | None = None
    key_rope: torch.Tensor | None = None
    pse_shift: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    block_table: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    heads: int = 1
    kv_heads: int = 0
    scale: float = 1.0
    pre_tokens: int = INT_MAX
    next_tokens: int = INT_MAX
    layout: str = "BSH"
    sparse_mode: int = 0
    inner_precise: int = 0
    block_size: int = 0
    lse: bool = False

    @property
    def paged(self) -> bool:
        """True when a block table is given."""
        return self.block_table is not None


def fa_call(op: str, arguments: dict[str, Any]) -> FaCall:
    """The call in our names. `arguments` are bound schema arguments; those not named here are left out."""
    version = 2 if "_v2" in op else 1
    given: dict[str, Any] = {}
    for ours, theirs in _NAMES.items():
        name = theirs[version - 1]
        if name is not None and name in arguments:
            given[ours] = arguments[name]
    for key in _LENGTHS:
        if given.get(key) is not None:
            given[key] = _ints(given[key])
    given["kv_heads"] = given.get("kv_heads") or given.get("heads", 1)
    return FaCall(op=op, version=version, **given)


def _ints(lengths: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(x) for x in lengths)
