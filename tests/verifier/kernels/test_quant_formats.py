"""int8 helpers, casts, format casts and prefetch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_dynamic_quant_is_undone_within_half_a_step(call):
    x, smooth = rand(5, 16), rand(16, seed=1).abs() + 0.1
    y, scale = call("npu_dynamic_quant", x)
    assert y.dtype == torch.int8 and scale.shape == (5,)
    assert ((y * scale[:, None] - x).abs() <= scale[:, None] * 0.51).all()
    assert (y.abs().amax(-1) == 127).all()
    y, scale = call("npu_dynamic_quant", x, smooth_scales=smooth)
    assert ((y * scale[:, None] - x * smooth).abs() <= scale[:, None] * 0.51).all()
    two = torch.stack((smooth, smooth * 3))
    y, scale = call("npu_dynamic_quant", x, smooth_scales=two, group_index=torch.tensor([2, 5], dtype=torch.int32))
    rows = torch.stack([smooth if i < 2 else smooth * 3 for i in range(5)])
    assert ((y * scale[:, None] - x * rows).abs() <= scale[:, None] * 0.51).all()


def test_quant_matmul_approximates_the_float_product(call):
    x, w = rand(4, 32), rand(32, 8, seed=1)
    xq, xs = call("npu_dynamic_quant", x)
    wq, ws = call("npu_dynamic_quant", w.T.contiguous())
    out = call("npu_quant_matmul", xq, wq.T, ws, pertoken_scale=xs, output_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16 and (out.float() - x @ w).abs().max() < 0.2
    raw = call("npu_quant_matmul", xq, wq.T, ws, output_dtype=torch.int32)
    assert raw.tolist() == [[sum(int(a) * int(b) for a, b in zip(r, c, strict=True)) for c in wq] for r in xq]
    with pytest.raises(NotImplementedError, match="output_dtype"):
        call("npu_quant_matmul", xq, wq.T, ws)


def test_dequant_swiglu_quant(call):
    x = (rand(3, 8) * 1000).to(torch.int32)
    ws, act = rand(1, 8, seed=1).abs() * 1e-3, rand(3, seed=2).abs()
    y, scale = call("npu_dequant_swiglu_quant", x, weight_scale=ws, activation_scale=act, activate_left=True,
                    quant_mode=1)  # fmt: skip
    wide = x * ws * act[:, None]
    wanted = torch.nn.functional.silu(wide[:, :4]) * wide[:, 4:]
    assert ((y * scale[:, None] - wanted).abs() <= scale[:, None] * 0.51).all()


def test_format_casts_keep_the_contents(call):
    x = rand(4, 4)
    out = call("npu_format_cast", x, 29)
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
    assert call("npu_format_cast_.acl_format", x, 29) is x
    assert torch.equal(call("npu_format_cast.Tensor", x, rand(2)), x)
    assert call("npu_format_cast_", x, x) is x
    assert call("get_npu_format", x) == 2


def test_casts(call):
    assert call("npu_dtype_cast", rand(2), 15).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="290"):
        call("npu_dtype_cast", rand(2), 290)
    with pytest.raises(NotImplementedError, match="in-place"):
        call("npu_dtype_cast_", rand(2), rand(2).to(torch.bfloat16))


def test_prefetch_does_nothing(call):
    assert call("npu_prefetch", rand(2), None, 10) is None
