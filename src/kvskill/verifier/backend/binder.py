"""Puts a reference kernel behind an operator schema.

The dispatcher has already matched the call against the schema (unknown keyword, wrong arity, float tensor for a
length list: refused there, as in the field). What arrives are values; this module names them, fills defaults
in, checks the rules of the profile, and calls the kernel with the arguments it models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvskill.verifier.backend.context import current
from kvskill.verifier.backend.record import CallRecord, active, fact_of, note_call
from kvskill.verifier.kernels.errors import MissingKernel, UnmodelledCall
from kvskill.verifier.kernels.registry import Kernel
from kvskill.verifier.kernels.rules.engine import check_call

__all__ = ["bind", "implementation", "missing"]


def bind(names: tuple[str, ...], defaults: dict[str, Any], args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    """Every argument of a schema by name, defaults filled in. `names` are those that may be positional."""
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def implementation(schema: Any, kernel: Kernel) -> Callable[..., Any]:
    """The function to register for `schema`: rules, then the kernel, with a record of the call."""
    defaults = {a.name: a.default_value for a in schema.arguments}
    names = tuple(a.name for a in schema.arguments if not a.kwarg_only)
    op = kernel.op

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, args, kwargs)
        record = CallRecord(op, {k: fact_of(v) for k, v in bound.items()}) if active() else None
        if record is not None:
            note_call(record)
        try:
            # no modes inside: rules and kernels work on CPU tensors, mapped devices or not
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if current().enforce:
                    check_call(op, bound, current())
                for name, value in bound.items():
                    if name not in kernel.models and name not in kernel.neutral and not _same(value, defaults[name]):
                        raise UnmodelledCall(op, f"argument {name}={_short(value)}")
                result = kernel.fn(**{k: v for k, v in bound.items() if k in kernel.models})
        except Exception as error:
            if record is not None:
                record.error = f"{type(error).__name__}: {error}"
            raise
        if record is not None:
            outs = result if isinstance(result, (tuple, list)) else [result]
            record.results = [fact_of(r) for r in outs]
        return result

    return run


def missing(schema: Any) -> Callable[..., Any]:
    """For an operator without a kernel: every call raises MissingKernel with its name."""
    name = schema.name.split("::")[-1] + (f".{schema.overload_name}" if schema.overload_name else "")

    def run(*args: Any, **kwargs: Any) -> Any:
        raise MissingKernel(name)

    return run


def _same(value: Any, default: Any) -> bool:
    if value is None or default is None:
        return value is default
    if isinstance(value, torch.Tensor) or isinstance(default, torch.Tensor):
        return False
    return bool(value == default)


def _short(value: Any) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
