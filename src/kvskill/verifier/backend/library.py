"""Registration of operators and kernels with the dispatcher. Libraries live as long as the process."""

from __future__ import annotations

from typing import Any

import torch

from kvskill.verifier.backend.binder import implementation, missing
from kvskill.verifier.backend.schemas import overload_name
from kvskill.verifier.kernels.registry import load_kernels

__all__ = ["define_operators", "implement_operators"]

_alive: list[Any] = []


def define_operators(schemas: dict[str, str]) -> None:
    """Define `npu::` operators from schema strings, each with its CPU kernel or with one that raises."""
    library = torch.library.Library("npu", "FRAGMENT")
    _alive.append(library)
    for text in schemas.values():
        library.define(text)
    _implement(library, {name: torch._C.parse_schema("npu::" + text) for name, text in schemas.items()})


def implement_operators() -> None:
    """Put the kernels on the operators that the loaded torch_npu wheel has registered."""
    library = torch.library.Library("npu", "IMPL")
    _alive.append(library)
    live = {
        overload_name(str(s).removeprefix("npu::")): s
        for s in torch._C._jit_get_all_schemas()
        if s.name.startswith("npu::")
    }
    _implement(library, live)


def _implement(library: Any, schemas: dict[str, Any]) -> None:
    kernels = load_kernels()
    for name, schema in schemas.items():
        kernel = kernels.get(name)
        if kernel is None and _runs_on_cpu(schema):
            continue
        library.impl(name, implementation(schema, kernel) if kernel else missing(schema), "CPU")


def _runs_on_cpu(schema: Any) -> bool:
    """True for operators of the wheel that are composed of others or have a CPU kernel of their own."""
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(has(name, key) for key in keys)
