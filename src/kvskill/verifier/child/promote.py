"""Matrix products of bfloat16 with float32, which the device takes and a CPU refuses: the wider dtype wins."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["PromoteProducts"]

_PRODUCTS = frozenset(
    {torch.nn.functional.linear, torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__}
)


class PromoteProducts(TorchFunctionMode):  # type: ignore[misc]
    """For --dtype bf16 only: some models keep a router in float32 and feed it bfloat16 states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            floats = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
            if len({a.dtype for a in floats}) > 1:
                widest = max((a.dtype for a in floats), key=lambda d: d.itemsize)
                args = tuple(a.to(widest) if any(a is f for f in floats) else a for a in args)
        return func(*args, **(kwargs or {}))
