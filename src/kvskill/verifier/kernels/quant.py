"""int8 quantisation that migrated models call around matrix products. Rounding is to nearest even."""

from __future__ import annotations

from typing import Any

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["per_token_int8"]

_INT8 = (None, 1, torch.int8)


def per_token_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (int8 of x's shape, float32 scale of x's shape without the last axis): scale = max|row| / 127."""
    wide = up(x)
    scale = wide.abs().amax(dim=-1, keepdim=True) / 127
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / safe).round().clamp(-128, 127).to(torch.int8), scale[..., 0].float()


@kernel("npu_dynamic_quant", neutral=("quant_mode",))
def dynamic_quant(
    input: torch.Tensor,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per token; with `group_index` (running sums) row g of smooth_scales serves group g."""
    if dst_type not in _INT8:
        raise UnmodelledCall("npu_dynamic_quant", f"dst_type {dst_type}")
    wide = up(input)
    if smooth_scales is not None:
        smooth = up(smooth_scales, wide.dtype)
        if group_index is not None:
            rows = torch.arange(wide.reshape(-1, wide.shape[-1]).shape[0])
            group = (rows[:, None] >= group_index[None]).sum(dim=1)
            smooth = smooth[group].reshape(wide.shape)
        wide = wide * smooth
    return per_token_int8(wide)


@kernel("npu_quant_matmul", neutral=("group_sizes",))
def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: Any = None,
) -> torch.Tensor:
    """int8 x int8 -> int32 (+ int32 bias) * scale [* pertoken_scale] (+ float bias) in `output_dtype`."""
    op = "npu_quant_matmul"
    if x1.dtype != torch.int8 or x2.dtype != torch.int8 or scale.dtype == torch.int64:
        raise UnmodelledCall(op, f"{x1.dtype} x {x2.dtype} with scale {scale.dtype}")
    total = x1.to(torch.int64) @ x2.to(torch.int64)
    if bias is not None and not bias.is_floating_point():
        total = total + bias
    kind = {None: torch.int8, 1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
    target = output_dtype if isinstance(output_dtype, torch.dtype) else kind.get(output_dtype)
    if target == torch.int32:
        return total.to(torch.int32)
    if target not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnmodelledCall(op, f"output_dtype {output_dtype}")
    out = total.float() * scale.float()
    if pertoken_scale is not None:
        out = out * pertoken_scale.float()[:, None]
    if bias is not None and bias.is_floating_point():
        out = out + bias.float()
    return out.to(target)


@kernel("npu_dequant_swiglu_quant")
def dequant_swiglu_quant(
    x: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantise, swiglu (the left half is the gate if `activate_left`), dynamic int8 -> (int8, scale)."""
    if quant_mode != 1 or swiglu_mode != 0:
        raise UnmodelledCall("npu_dequant_swiglu_quant", f"quant_mode {quant_mode}, swiglu_mode {swiglu_mode}")
    wide = x.float()
    if weight_scale is not None:
        wide = wide * weight_scale.float()
    if activation_scale is not None:
        wide = wide * activation_scale.float().reshape(-1, 1)
    left, right = wide.chunk(2, dim=-1)
    gate, value = (left, right) if activate_left else (right, left)
    out = gate * torch.sigmoid(gate) * value
    if quant_scale is not None:
        out = out * quant_scale.float()
    return per_token_int8(out)
