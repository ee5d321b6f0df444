"""Random weights with fixed seeds: large enough that every part of the model shows in the logits.

The default initialisation of most models (std 0.02) makes attention nearly uniform, and then a wrong mask or a
wrong scale hardly moves a logit. Here every projection keeps unit variance, norm weights differ from one, biases
and sinks are not zero. A tensor depends only on the seed, its name and its shape.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

__all__ = ["fill", "fill_named", "random_tensor"]


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Any:
    """float32 tensor of `shape`; what it looks like follows from `name`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    leaf = name.lower()
    if "embed" in leaf:
        return noise
    if "norm" in leaf and len(shape) == 1:
        base = 0.0 if leaf.endswith("bias") else 1.0
        return base + 0.2 * noise
    if "sink" in leaf:
        return noise
    if len(shape) == 1 or leaf.endswith("bias"):
        return 0.2 * noise
    fan_in = shape[-1] if len(shape) == 2 else math.sqrt(shape[-1] * shape[-2])
    return noise / math.sqrt(fan_in)


def fill(model: Any, seed: int) -> None:
    """Fill every parameter and floating persistent buffer of an HF model, by its own names."""
    named = {
        **dict(model.named_parameters()),
        **{n: b for n, b in model.named_buffers() if n in model.state_dict()},
    }
    with torch.no_grad():
        for name, tensor in named.items():
            if tensor.is_floating_point() and tensor.dim() > 0:  # a number without axes is a constant of the model
                tensor.copy_(random_tensor(name, tuple(tensor.shape), seed).to(tensor.dtype))


def fill_named(named: dict[str, Any], seed: int) -> None:
    """Fill the given target parameters, by their own names."""
    with torch.no_grad():
        for name, tensor in named.items():
            if tensor.is_floating_point() and tensor.dim() > 0:  # a number without axes is a constant of the model
                tensor.copy_(random_tensor(name, tuple(tensor.shape), seed).to(tensor.dtype))
