"""The table of conditions. Each takes (view or arguments, params, context) and returns facts when broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvskill.verifier.kernels.rules import fa_cache, fa_lengths, fa_mask, fa_shape, writes
from kvskill.verifier.kernels.rules import other as others

__all__ = ["CHECKS"]

CHECKS: dict[str, Callable[..., dict[str, Any] | None]] = {
    **fa_cache.CHECKS,
    **fa_lengths.CHECKS,
    **fa_mask.CHECKS,
    **fa_shape.CHECKS,
    **others.CHECKS,
    **writes.CHECKS,
}
