"""The table of reference kernels: operator name -> function, and which arguments the function models.

A kernel takes its operator's arguments by their schema names, as keywords. It names only the arguments that it
models; the binder (`backend.binder`) refuses a call that gives any other argument a value other than the
schema's default, except those listed as `neutral`: they change speed or placement, never the result.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["KERNELS", "Kernel", "kernel", "load_kernels"]

_MODULES = (
    "activation", "cache_write", "fa.fusion", "fa.ops",
    "formats", "kv_norm_rope", "matmul", "mla_prolog", "moe_dispatch",
    "moe_gating", "moe_routing", "norms", "quant", "rotary", "softmax",
)  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One reference kernel. `undeclared` names tensors it writes although the schema does not say so."""

    op: str
    fn: Callable[..., Any]
    models: frozenset[str]
    neutral: frozenset[str] = frozenset()
    undeclared: tuple[str, ...] = ()


KERNELS: dict[str, Kernel] = {}
_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(*ops: str, neutral: tuple[str, ...] = (), undeclared: tuple[str, ...] = ()) -> Callable[[_F], _F]:
    """Register the decorated function for `ops` (overloads as `name.overload`)."""

    def register(fn: _F) -> _F:
        names = frozenset(inspect.signature(fn).parameters)
        for op in ops:
            if op in KERNELS:
                raise ValueError(f"two kernels for {op}")
            KERNELS[op] = Kernel(op, fn, names, frozenset(neutral), undeclared)
        return fn

    return register


def load_kernels() -> dict[str, Kernel]:
    """Import every kernel module (this imports torch) and return the table."""
    for name in _MODULES:
        importlib.import_module(f"kvskill.verifier.kernels.{name}")
    return KERNELS
