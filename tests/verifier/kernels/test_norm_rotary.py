"""Norms, rotary operators, activations, softmax: formulas written a second time."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def near(a, b, tol=1e-12):
    assert a.shape == b.shape
    assert (a.double() - b.double()).abs().max() <= tol


@pytest.mark.parametrize("gamma_dims", [1, 2])
def test_rms_norm(call, gamma_dims):
    x, gamma = rand(2, 3, 4, 8), rand(*(4, 8)[2 - gamma_dims :], seed=1)
    y, rstd = call("npu_rms_norm", x, gamma, 1e-3)
    dims = (4, 8)[2 - gamma_dims :]
    near(y, F.rms_norm(x, dims, gamma, 1e-3))
    assert rstd.shape == (2, 3, 4, 1) if gamma_dims == 1 else (2, 3, 1, 1)
    near(rstd, 1 / (x.pow(2).mean(tuple(range(-gamma_dims, 0)), keepdim=True) + 1e-3).sqrt())


def test_rms_norm_default_epsilon_is_1e_6_and_narrow_types_round_once(call):
    x, gamma = rand(3, 8, dtype=torch.bfloat16) * 1e-3, torch.ones(8, dtype=torch.bfloat16)
    y, rstd = call("npu_rms_norm", x, gamma)
    wanted = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert y.dtype == torch.bfloat16 and rstd.dtype == torch.float32
    assert torch.equal(y, wanted.to(torch.bfloat16))


def test_gemma_rms_norm_adds_one(call):
    x, gamma = rand(3, 8), rand(8, seed=1)
    near(call("npu_gemma_rms_norm", x, gamma)[0], F.rms_norm(x, (8,), 1 + gamma, 1e-6))


def test_add_rms_norm_residual_is_the_third_result(call):
    x1, x2, gamma = rand(3, 8), rand(3, 8, seed=1), rand(8, seed=2)
    y, _, total = call("npu_add_rms_norm", x1, x2, gamma, 1e-5)
    near(total, x1 + x2)
    near(y, F.rms_norm(x1 + x2, (8,), gamma, 1e-5))
    y32, same, _, again = call("npu_add_rms_norm_cast", x1, x2, gamma, 1e-5)
    near(y32, y)
    near(same, y)
    near(again, total)
    rstd, a, b = call("npu_add_rms_norm_v2_functional", x1, x2, gamma, 1e-5)
    near(a, y)
    near(b, total)
    assert torch.equal(call("npu_add_rms_norm_v2", x1, x2, gamma, 1e-5), rstd)
    near(x1, y)
    near(x2, total)


def angles(t, d):
    return torch.arange(t, dtype=torch.float64)[:, None] * 10.0 ** -torch.arange(d // 2, dtype=torch.float64)


def complex_rotate(x, theta, pairs):
    """Rotation as a product with exp(i theta): halves (re, im) or neighbouring pairs."""
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) if pairs else torch.complex(*x.chunk(2, -1))
    z = z * torch.polar(torch.ones_like(theta), theta)
    return torch.view_as_real(z).flatten(-2) if pairs else torch.cat((z.real, z.imag), -1)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(call, mode):
    x, theta = rand(5, 3, 8), angles(5, 8)
    wide = theta.repeat_interleave(2, -1) if mode == "interleave" else torch.cat((theta, theta), -1)
    out = call("npu_rotary_mul", x, wide.cos()[:, None], wide.sin()[:, None], rotary_mode=mode)
    near(out, complex_rotate(x, theta[:, None], mode == "interleave"))


def test_apply_rotary_pos_emb_works_in_place(call):
    q, k, theta = rand(5, 4, 8), rand(5, 2, 8, seed=1), angles(5, 8)
    cos, sin = (f(torch.cat((theta, theta), -1))[:, None] for f in (torch.cos, torch.sin))
    wanted = [complex_rotate(t, theta[:, None], False) for t in (q, k)]
    q2, k2 = call("npu_apply_rotary_pos_emb", q, k, cos, sin, "TND")
    near(q2, wanted[0])
    near(k2, wanted[1])
    assert q2.data_ptr() == q.data_ptr() and k2.data_ptr() == k.data_ptr()
    near(q, wanted[0])  # the inputs hold the rotated values


def test_interleave_rope_gives_half_order(call):
    x, theta = rand(2, 3, 5, 64), angles(5, 64)
    cos, sin = (f(torch.cat((theta, theta), -1))[None, None].repeat(2, 1, 1, 1) for f in (torch.cos, torch.sin))
    out = call("npu_interleave_rope", x, cos, sin)
    pairs = complex_rotate(x, theta, True)
    near(out, torch.cat((pairs[..., 0::2], pairs[..., 1::2]), -1))
    k = rand(2, 1, 5, 64, seed=4)
    # scores between two interleave_rope results equal those of plainly rotated pairs
    k_out = call("npu_interleave_rope", k, cos, sin)
    near(out @ k_out.transpose(2, 3), pairs @ complex_rotate(k, theta, True).transpose(2, 3), 1e-10)


def test_unknown_rotary_modes_are_refused(call):
    with pytest.raises(NotImplementedError, match="quarter"):
        call("npu_rotary_mul", rand(2, 8), rand(1, 8), rand(1, 8), rotary_mode="quarter")
    with pytest.raises(NotImplementedError, match="interleave"):
        call("npu_apply_rotary_pos_emb", *(rand(2, 1, 8) for _ in range(4)), "TND", "interleave")


@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu(call, dim):
    x = rand(4, 6)
    a, b = x.chunk(2, dim)
    near(call("npu_swiglu", x, dim), F.silu(a) * b)


def test_swiglu_default_axis_is_the_last(call):
    x = rand(4, 6)
    near(call("npu_swiglu", x), F.silu(x[:, :3]) * x[:, 3:])


@pytest.mark.parametrize(("approximate", "left"), [(1, False), (0, True), (1, True), (0, False)])
def test_geglu(call, approximate, left):
    x = rand(4, 6)
    a, b = x.chunk(2, -1)
    gate, value = (a, b) if left else (b, a)
    gelu = F.gelu(gate, approximate="tanh" if approximate else "none")
    out, inner = call("npu_geglu", x, -1, approximate, left)
    near(out, value * gelu)
    near(inner, gelu)


def test_other_activations(call):
    x = rand(4, 6)
    near(call("npu_silu", x), F.silu(x))
    near(call("npu_gelu", x, approximate="tanh"), F.gelu(x, approximate="tanh"))
    for op in ("fast_gelu", "npu_fast_gelu"):
        near(call(op, x), x / (1 + torch.exp(-1.702 * x)))  # the same function for both signs
    near(call("npu_gelu_mul", x), F.gelu(x[:, :3]) * x[:, 3:])
    y = x.clone()
    assert call("npu_silu_", y) is not None
    near(y, F.silu(x))


@pytest.mark.parametrize("interleaved", [True, False])
def test_clipped_swiglu(call, interleaved):
    x = rand(4, 8) * 6
    out = call("npu_clipped_swiglu", x, alpha=1.5, limit=2.0, bias=1.0, interleaved=interleaved)
    for i in range(4):
        for j in range(4):
            a, b = (x[i, 2 * j], x[i, 2 * j + 1]) if interleaved else (x[i, j], x[i, j + 4])
            a, b = min(float(a), 2.0), max(-2.0, min(float(b), 2.0))
            assert abs(float(out[i, j]) - a / (1 + math.exp(-1.5 * a)) * (b + 1)) < 1e-12


def test_scaled_masked_softmax(call):
    x = rand(1, 2, 4, 4)
    mask = torch.ones(4, 4).triu(1).bool()
    wanted = torch.softmax((x * 0.5).masked_fill(mask, -math.inf), -1)
    near(call("npu_scaled_masked_softmax", x, mask[None, None], 0.5), wanted)
    near(call("npu_scaled_masked_softmax", x, torch.zeros(1, 1, 4, 4).bool(), 0.5, True), wanted)
    y = x.clone()
    call("npu_attn_softmax_", y)
    near(y, torch.softmax(x, -1))
