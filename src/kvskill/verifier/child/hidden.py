"""Forward hooks on decoder layers and their attention modules: what each layer gives out, by token.

A framework layer may return (residual, hidden) whose sum is the hidden state, another only one of them. Every
[tokens, width] tensor and the sum of the first two are kept as candidates; the comparison takes the best one.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["LayerTap"]

_LAYER = re.compile(r"(?:^|\.)layers?\.(\d+)$")
_ATTENTION = re.compile(r"(?:^|\.)layers?\.(\d+)\.(?:self_attn|attn|attention|self_attention)$")


class LayerTap:
    """Context manager; `rows()` maps "layer.kind" to candidates [tokens, width] of the last forward pass."""

    def __init__(self, model: Any) -> None:
        self._handles: list[Any] = []
        self._out: dict[str, list[Any]] = {}
        self.current: int | None = None
        self.on_enter: Any = None
        for name, module in model.named_modules():
            layer, attention = _LAYER.search(name), _ATTENTION.search(name)
            if layer:
                self._handles.append(module.register_forward_pre_hook(self._enter(int(layer.group(1)))))
                self._handles.append(module.register_forward_hook(self._keep(f"{layer.group(1)}.layer")))
            elif attention:
                self._handles.append(module.register_forward_hook(self._keep(f"{attention.group(1)}.attention")))

    def _enter(self, index: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            self.current = index
            if self.on_enter is not None:
                self.on_enter(index)

        return hook

    def _keep(self, key: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            found = [t.detach() for t in _tensors(output) if t.dim() >= 2 and t.is_floating_point()]
            rows = [t.reshape(-1, t.shape[-1]).clone() for t in found[:3]]
            rows = [r for r in rows if r.shape == rows[0].shape]
            if key.endswith("layer") and len(rows) >= 2:
                rows.append(rows[0] + rows[1])
            if key.endswith("attention"):
                rows = rows[:1]
            self._out[key] = rows

        return hook

    def rows(self) -> dict[str, list[Any]]:
        """What the last forward pass left."""
        return {k: v for k, v in self._out.items() if v}

    def clear(self) -> None:
        """Forget the last pass."""
        self._out.clear()

    def __enter__(self) -> LayerTap:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()


def _tensors(value: Any) -> list[Any]:
    if hasattr(value, "detach"):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensors(v)]
    return []
