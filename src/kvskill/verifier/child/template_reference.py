"""Attention by its definition, in float64 numpy: no layouts, no blocks, no operators, no torch arithmetic.

Shares no code with what it checks, nor with the reference kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["attention", "interleaved_to_half", "rms_norm", "turn_half"]


def wide(tensor: Any) -> Any:
    """float64 numpy of a CPU tensor."""
    return tensor.detach().double().numpy()


def attention(
    query: Any, key: Any, value: Any, first: int, scale: float, window: int | None = None, sinks: Any = None
) -> Any:
    """[S, N, D] queries at positions first, first + 1, ... over keys [L, Nkv, D] at positions 0..L-1: [S, N, Dv].

    A query sees keys at or before its position, with a window of W the last W of them (itself included). A sink is
    one more score per head that has no value.
    """
    q, k, v = wide(query), wide(key), wide(value)
    groups = q.shape[1] // k.shape[1]
    rows, columns = np.arange(first, first + q.shape[0])[:, None], np.arange(k.shape[0])[None, :]
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for head in range(q.shape[1]):
        scores = np.where(visible, q[:, head] @ k[:, head // groups].T * scale, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        sink = None if sinks is None else float(sinks[head])
        if sink is not None:
            top = np.maximum(top, sink)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - top)
        out[:, head] = (weights / total) @ v[:, head // groups]
    return torch.from_numpy(out)


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """x / rms(x) * weight over the last dim."""
    values = wide(x)
    size = np.sqrt((values * values).mean(axis=-1, keepdims=True) + epsilon)
    return torch.from_numpy(values / size * wide(weight))


def turn_half(x: Any, angle: Any) -> Any:
    """Rotary in half order: (a, b) halves become (a cos - b sin, b cos + a sin). `angle` [T, D / 2]."""
    values = wide(x)
    size = values.shape[-1] // 2
    first, second = values[..., :size], values[..., size:]
    shape = (angle.shape[0], *(1,) * (values.ndim - 2), size)
    cos, sin = np.cos(wide(angle)).reshape(shape), np.sin(wide(angle)).reshape(shape)
    return torch.from_numpy(np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1))


def interleaved_to_half(x: Any) -> Any:
    """Pairs (2i, 2i + 1) regrouped into halves."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
