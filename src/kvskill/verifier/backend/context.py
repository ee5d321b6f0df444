"""The deployment that a run stands for. Imports no torch.

float32 tensors and small blocks are test devices: rules on dtype and block size are judged on the values here,
every other rule on the call itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

__all__ = ["DEFAULT_PROFILE", "OpContext", "current", "set_context", "using"]

DEFAULT_PROFILE = "cann-9.0"


@dataclass(frozen=True)
class OpContext:
    """What the kernels and rules assume.

    profile       rule profile, a file of `verifier/data/rules/`
    dtype         deployment dtype ("bfloat16"); stands for every float32 or float64 tensor of a call
    block_size    deployment block size; None means that the call's own value is the deployed one
    nan           "visible": only visible keys enter a product (the definition). "absorbing": as on a device
                  that loads whole pages and masks afterwards, a NaN value row in a loaded page reaches the output
    undefined     what undefined output rows hold: "nan" makes any use of them visible, "zero" hides it
    null_slots    slots 0 .. n-1 belong to the null block: several idle rows may write the same one
    enforce       check the rules; False computes what can be computed
    strict        a rule of level warning raises too
    waive         rule ids that are not checked (a report should name them)
    note          rule ids that are noted like warnings instead of raised: the device would go on, too
    """

    profile: str = DEFAULT_PROFILE
    dtype: str = "bfloat16"
    block_size: int | None = None
    nan: Literal["visible", "absorbing"] = "visible"
    undefined: Literal["nan", "zero"] = "nan"
    null_slots: int = 1
    enforce: bool = True
    strict: bool = False
    waive: frozenset[str] = frozenset()
    note: frozenset[str] = frozenset()


_current = OpContext()


def current() -> OpContext:
    """The context in force in this process."""
    return _current


def set_context(context: OpContext) -> None:
    """Replace the context in force."""
    global _current
    _current = context


@contextmanager
def using(context: OpContext) -> Iterator[OpContext]:
    """`with using(replace(current(), enforce=False)):` ..."""
    before = _current
    set_context(context)
    try:
        yield context
    finally:
        set_context(before)
