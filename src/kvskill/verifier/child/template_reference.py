"""Attention by its definition, in float64: no layouts, no blocks, no operators. Shares no code with what it checks."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["attention", "interleaved_to_half", "rms_norm", "turn_half"]


def attention(
    query: Any, key: Any, value: Any, first: int, scale: float, window: int | None = None, sinks: Any = None
) -> Any:
    """[S, N, D] queries at positions first, first + 1, ... over keys [L, Nkv, D] at positions 0..L-1: [S, N, Dv].

    A query sees keys at or before its position, with a window of W the last W of them (itself included). A sink is
    one more score per head that has no value.
    """
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    out = torch.zeros(query.shape[0], heads, value.shape[2], dtype=torch.float64)
    for row in range(query.shape[0]):
        position = first + row
        start = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            keys = key[start : position + 1, head // groups].double()
            values = value[start : position + 1, head // groups].double()
            scores = keys @ query[row, head].double() * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].double().view(1)))
            weights = torch.softmax(scores, dim=0)[: keys.shape[0]]
            out[row, head] = weights @ values
    return out


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """x / rms(x) * weight over the last dim."""
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + epsilon) * weight.double()


def turn_half(x: Any, angle: Any) -> Any:
    """Rotary in half order: (a, b) halves become (a cos - b sin, b cos + a sin). `angle` [T, D / 2]."""
    wide = x.double()
    size = wide.shape[-1] // 2
    first, second = wide[..., :size], wide[..., size:]
    shape = (angle.shape[0], *(1,) * (wide.dim() - 2), size)
    cos, sin = angle.cos().double().view(shape), angle.sin().double().view(shape)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def interleaved_to_half(x: Any) -> Any:
    """Pairs (2i, 2i + 1) regrouped into halves."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
