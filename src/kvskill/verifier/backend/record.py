"""Records of operator calls, for diagnosis: names, plain arguments, shapes and strides; never tensor contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CallRecord", "TensorFact", "active", "note_call", "record_calls"]


@dataclass(frozen=True)
class TensorFact:
    """Shape, stride, dtype, storage address and, when floating, whether a NaN is inside."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    data_ptr: int
    has_nan: bool


@dataclass
class CallRecord:
    """One call. `arguments` maps each schema argument to its value, tensors to a TensorFact (lists to lists).

    `error` is the message when the call raised; `results` are then empty.
    """

    op: str
    arguments: dict[str, Any]
    results: list[Any] = field(default_factory=list)
    error: str | None = None


_recorders: list[list[CallRecord]] = []


def active() -> bool:
    """True while somebody records."""
    return bool(_recorders)


@contextmanager
def record_calls() -> Iterator[list[CallRecord]]:
    """Collect every operator call made inside the block, in order. May be nested; each block gets its own list."""
    calls: list[CallRecord] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        _recorders[:] = [r for r in _recorders if r is not calls]  # by identity: equal lists are not the same


def note_call(record: CallRecord) -> None:
    """Append a record to every open recorder."""
    for calls in _recorders:
        calls.append(record)


def fact_of(value: Any) -> Any:
    """A tensor's facts; lists elementwise; any other value as it is."""
    if hasattr(value, "data_ptr") and hasattr(value, "stride"):
        floating = value.is_floating_point() and value.dtype.itemsize > 1
        return TensorFact(
            tuple(value.shape),
            tuple(value.stride()),
            str(value.dtype).removeprefix("torch."),
            value.data_ptr(),
            bool(floating and value.isnan().any()),
        )
    if isinstance(value, (list, tuple)):
        return [fact_of(v) for v in value]
    return value
