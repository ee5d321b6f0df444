"""What the rules look at: a fused attention call with its derived facts. Nothing here raises on a bad call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvskill.verifier.backend.context import OpContext
from kvskill.verifier.kernels.fa.call import FaCall, fa_call
from kvskill.verifier.kernels.fa.layout import PACKED, QUERY_OF

__all__ = ["FaView", "deployed_dtype"]

_CACHE_AXIS = {3: 1, 4: 2, 5: 3}  # axis of block_size by cache rank


def deployed_dtype(tensor: torch.Tensor, context: OpContext) -> str:
    """The dtype that stands for this tensor on the device: float32 and float64 are test devices."""
    if tensor.dtype in (torch.float32, torch.float64):
        return context.dtype
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class FaView:
    """A call and what follows from its shapes. A fact that cannot be derived is None."""

    call: FaCall
    given: dict[str, Any]

    @classmethod
    def of(cls, op: str, arguments: dict[str, Any]) -> FaView:
        """View of bound arguments."""
        return cls(fa_call(op, arguments), arguments)

    @cached_property
    def form(self) -> str | None:
        """Query layout, None for an unknown layout string."""
        return QUERY_OF.get(self.call.layout)

    @cached_property
    def packed(self) -> bool:
        """TND or NTD: no batch axis."""
        return self.form in PACKED

    @cached_property
    def tokens(self) -> int:
        """Rows of the query: T, or S of one sequence."""
        axis = {"TND": 0, "NTD": 1, "BSH": 1, "BSND": 1, "BNSD": 2, "NSD": 1}[self.form or "TND"]
        return int(self.call.query.shape[axis])

    @cached_property
    def batch(self) -> int | None:
        """Sequences: entries of the query lengths when packed."""
        if self.packed:
            return None if self.call.q_lengths is None else len(self.call.q_lengths)
        return 1 if self.form == "NSD" else int(self.call.query.shape[0])

    @cached_property
    def query_heads(self) -> int | None:
        """Heads that the query's shape shows; BSH shows none."""
        axis = {"TND": 1, "NTD": 0, "BSND": 2, "BNSD": 1, "NSD": 0}.get(self.form or "")
        return None if axis is None else int(self.call.query.shape[axis])

    def dim(self, tensor: torch.Tensor, heads: int) -> int:
        """Head dim of a query or of unpaged keys."""
        last = int(tensor.shape[-1])
        return last // max(heads, 1) if self.form == "BSH" else last

    @cached_property
    def d(self) -> int:
        """Head dim of the query."""
        return self.dim(self.call.query, self.call.heads)

    def kv_dim(self, tensor: torch.Tensor) -> int:
        """Head dim of key, value or key_rope, paged or not."""
        if not self.call.paged:
            return self.dim(tensor, self.call.kv_heads)
        if tensor.dim() == 3:
            return int(tensor.shape[-1]) // self.call.kv_heads
        return int(tensor.shape[-1]) if tensor.dim() == 4 else int(tensor.shape[2] * tensor.shape[4])

    def kv_width(self, tensor: torch.Tensor) -> tuple[int | None, int | None]:
        """(heads shown, heads * dim shown) of key or value; one of the two is None."""
        if self.call.paged:
            return (None, int(tensor.shape[-1])) if tensor.dim() == 3 else (int(tensor.shape[1]), None)
        if self.form == "BSH":
            return None, int(tensor.shape[-1])
        axis = {"TND": 1, "NTD": 0, "BSND": 2, "BNSD": 1, "NSD": 0}[self.form or "TND"]
        return int(tensor.shape[axis]), None

    @cached_property
    def rope(self) -> bool:
        """Rope parts are given."""
        return self.call.query_rope is not None

    @cached_property
    def one_token(self) -> bool:
        """Dense layout with one query token."""
        return not self.packed and self.form != "NSD" and self.tokens == 1

    @cached_property
    def path(self) -> str:
        """Implementation that gets the call (section 2.2): tnd, pfa, ifa, mla, mla-sliding."""
        if self.d == 512 and self.rope and self.call.layout != "NTD_TND":
            if self.packed:
                return "mla"
            if self.call.sparse_mode == 4:
                return "mla-sliding"
            if self.tokens <= 16:
                return "mla"
        if self.packed:
            return "tnd"
        return "ifa" if self.one_token else "pfa"

    @cached_property
    def nz(self) -> bool:
        """The cache is 5-D (NZ)."""
        return self.call.paged and self.call.key.dim() == 5

    @cached_property
    def page_rows(self) -> int | None:
        """block_size that the cache's shape shows."""
        axis = _CACHE_AXIS.get(self.call.key.dim())
        return None if axis is None else int(self.call.key.shape[axis])

    @cached_property
    def q_len(self) -> list[int] | None:
        """Query tokens per sequence."""
        lengths = self.call.q_lengths
        if self.packed:
            return None if lengths is None else _steps(lengths)
        if lengths is None:
            return [self.tokens] * (self.batch or 0)
        return _spread(lengths, self.batch or 0)

    @cached_property
    def kv_len(self) -> list[int] | None:
        """Keys per sequence."""
        lengths = self.call.kv_lengths
        if lengths is None:
            if self.packed or self.call.paged:
                return None
            axis = {"BSH": 1, "BSND": 1, "BNSD": 2, "NSD": 1}[self.form or "BSH"]
            return [int(self.call.key.shape[axis])] * (self.batch or 0)
        if self.packed:
            return list(lengths) if self.call.paged else _steps(lengths)
        return _spread(lengths, self.batch or 0)


def _steps(cumulative: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in zip((0, *cumulative), cumulative, strict=False)]


def _spread(lengths: tuple[int, ...], batch: int) -> list[int]:
    return [lengths[0]] * batch if len(lengths) == 1 else list(lengths[:batch])
