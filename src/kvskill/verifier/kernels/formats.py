"""Formats, casts and prefetches: on a CPU every tensor is in ND format, so format casts are the identity."""

from __future__ import annotations

from typing import Any

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.registry import kernel

__all__ = ["ND"]

ND = 2  # ACL_FORMAT_ND


@kernel("npu_format_cast", neutral=("acl_format", "customize_dtype", "input_dtype"))
def format_cast(input: torch.Tensor) -> torch.Tensor:
    """A copy: the contents of a tensor do not depend on its format."""
    return input.clone()


@kernel("npu_format_cast.Tensor", neutral=("dst", "customize_dtype", "input_dtype"))
def format_cast_like(input: torch.Tensor) -> torch.Tensor:
    """A copy."""
    return input.clone()


@kernel("npu_format_cast_", neutral=("src", "customize_dtype", "input_dtype"))
def format_cast_(input: torch.Tensor) -> torch.Tensor:
    """In place: nothing to do."""
    return input


@kernel("npu_format_cast_.acl_format", neutral=("acl_format", "customize_dtype", "input_dtype"))
def format_cast_acl_(input: torch.Tensor) -> torch.Tensor:
    """In place: nothing to do."""
    return input


@kernel("get_npu_format")
def get_format(input: torch.Tensor) -> int:
    """Always ND."""
    return ND


@kernel("npu_dtype_cast")
def dtype_cast(input: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Conversion; a number (torch's ScalarType or torch_npu's own) other than torch's dtypes is not modelled."""
    return input.to(_dtype(dtype))


@kernel("npu_dtype_cast_")
def dtype_cast_(input: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """Not a change of dtype of `input` (a tensor cannot change it here), unless it has the dtype already."""
    if input.dtype != src.dtype:
        raise UnmodelledCall("npu_dtype_cast_", f"an in-place change from {input.dtype} to {src.dtype}")
    return input


@kernel("npu_prefetch", neutral=("input", "dependency", "max_size", "offset"))
def prefetch() -> None:
    """Nothing: it moves weights into a cache ahead of use."""


# c10::ScalarType numbers
_SCALAR_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16,
    6: torch.float32, 7: torch.float64, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip


def _dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return value
    if value in _SCALAR_TYPES:
        return _SCALAR_TYPES[value]
    raise UnmodelledCall("npu_dtype_cast", f"dtype number {value}")
