"""npu_kv_rmsnorm_rope_cache in all cache modes and npu_mla_prolog_v3, against token loops."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

LATENT, ROPE = 512, 64


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rope_pairs(x, cos, sin):
    """One vector: pairs rotated as complex numbers, real parts first."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        a, b = x[2 * i], x[2 * i + 1]
        out[i] = a * cos[i] - b * sin[i]
        out[i + half] = b * cos[i + half] + a * sin[i + half]
    return out


def token(kv, gamma, cos, sin, eps):
    c = kv[:LATENT]
    return c / (c.pow(2).mean() + eps).sqrt() * gamma, rope_pairs(kv[LATENT:], cos, sin)


def problem(batch=2, length=5, dtype=torch.float64):
    theta = rand(batch, 1, length, ROPE // 2, seed=1)
    theta = torch.cat((theta, theta), -1)
    kv, gamma = rand(batch, 1, length, LATENT + ROPE, dtype=dtype), rand(LATENT, seed=2, dtype=dtype)
    return kv, gamma, theta.cos(), theta.sin()


SLOTS = [9, 1, -1, 14, 3, 5, 12, 8, 0, 7]


@pytest.mark.parametrize("version", ["", "_v2", "_v2_functional"])
@pytest.mark.parametrize("mode", ["PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ", "Norm"])
def test_cache_modes(call, mode, version):
    kv, gamma, cos, sin = problem()
    block = 4
    if mode == "Norm":
        k_cache, c_cache = torch.zeros(2, 1, 9, ROPE).double(), torch.zeros(2, 1, 9, LATENT).double()
        index = torch.tensor([[4, 0, 8, 3, 1], [5, 6, 2, 0, 7]])
    else:
        k_cache, c_cache = torch.zeros(5, block, 1, ROPE).double(), torch.zeros(5, block, 1, LATENT).double()
        index = torch.tensor([8, -1, 16, 4] if "BLK" in mode else SLOTS)
    before = k_cache.clone(), c_cache.clone()
    out = call("npu_kv_rmsnorm_rope_cache" + version, kv, gamma, cos, sin, index, k_cache, c_cache, epsilon=1e-3,
               cache_mode=mode, is_output_kv=True)  # fmt: skip
    if version == "_v2_functional":
        assert torch.equal(k_cache, before[0]) and torch.equal(c_cache, before[1])
        k_out, y_out, k_cache, c_cache = out
    elif version == "_v2":
        k_out, y_out = out
    else:
        k_same, c_same, k_out, y_out = out
        assert k_same.data_ptr() == k_cache.data_ptr() and c_same.data_ptr() == c_cache.data_ptr()
    k_wanted, c_wanted = torch.zeros_like(k_cache), torch.zeros_like(c_cache)
    for b in range(2):
        for s in range(5):
            y, k = token(kv[b, 0, s], gamma, cos[b, 0, s], sin[b, 0, s], 1e-3)
            assert (y_out[b, 0, s] - y).abs().max() < 1e-10 and (k_out[b, 0, s] - k).abs().max() < 1e-10
            if mode == "Norm":
                k_wanted[b, 0, index[b, s]], c_wanted[b, 0, index[b, s]] = k, y
                continue
            if "BLK" in mode:
                start = int(index[2 * b + s // block])
                slot = -1 if start < 0 else start + s % block
            else:
                slot = SLOTS[5 * b + s]
            if slot < 0:
                continue
            for cache, row in ((k_wanted, k), (c_wanted, y)):
                if mode.endswith("NZ"):
                    flat = cache[slot // block].view(-1)  # one page, in memory order
                    for e in range(len(row)):
                        flat[(e // 16) * block * 16 + (slot % block) * 16 + e % 16] = row[e]
                else:
                    cache[slot // block, slot % block, 0] = row
    assert (k_cache - k_wanted).abs().max() < 1e-10 and (c_cache - c_wanted).abs().max() < 1e-10


def test_outputs_without_is_output_kv_are_undefined(call):
    kv, gamma, cos, sin = problem()
    caches = torch.zeros(5, 4, 1, ROPE).double(), torch.zeros(5, 4, 1, LATENT).double()
    k, y = call("npu_kv_rmsnorm_rope_cache_v2", kv, gamma, cos, sin, torch.tensor(SLOTS), *caches, cache_mode="PA_NZ")
    assert torch.isnan(k).all() and torch.isnan(y).all()
    assert k.shape == (2, 1, 5, ROPE) and y.shape == (2, 1, 5, LATENT)


def test_second_mode_with_v(call):
    kv, v = rand(1, 1, 3, 192), rand(1, 1, 3, 128, seed=3)
    gamma = rand(192, seed=4)
    theta = torch.cat((rand(1, 1, 3, 32, seed=5),) * 2, -1)
    k_cache, v_cache = torch.zeros(2, 4, 1, 192).double(), torch.zeros(2, 4, 1, 128).double()
    call("npu_kv_rmsnorm_rope_cache_v2", kv, gamma, theta.cos(), theta.sin(), torch.tensor([0, 5, 2]), k_cache, v_cache,
         v=v, epsilon=1e-6, cache_mode="PA")  # fmt: skip
    for s, slot in enumerate([0, 5, 2]):
        x = kv[0, 0, s] / (kv[0, 0, s].pow(2).mean() + 1e-6).sqrt() * gamma
        row = torch.cat((rope_pairs(x[:64], theta.cos()[0, 0, s], theta.sin()[0, 0, s]), x[64:]))
        assert (k_cache.view(-1, 192)[slot] - row).abs().max() < 1e-10
        assert torch.equal(v_cache.view(-1, 128)[slot], v[0, 0, s])


def test_int8_caches(call):
    kv, gamma, cos, sin = problem(1, 2)
    kv, gamma = kv.float(), gamma.float()
    k_cache, c_cache = (torch.zeros(2, 4, 1, d, dtype=torch.int8) for d in (ROPE, LATENT))
    scale = torch.full((LATENT,), 20.0)
    call("npu_kv_rmsnorm_rope_cache_v2", kv, gamma, cos.float(), sin.float(), torch.tensor([1, 6]), k_cache, c_cache,
         k_rope_scale=torch.full((ROPE,), 10.0), c_kv_scale=scale, cache_mode="PA_NZ", epsilon=1e-6)  # fmt: skip
    y, k = token(kv[0, 0, 1].double(), gamma.double(), cos[0, 0, 1], sin[0, 0, 1], 1e-6)
    page = c_cache[1].view(-1)  # slot 6 of block size 4: block 1, row 2
    for e in (0, 31, 32, 511):
        assert abs(int(page[(e // 32) * 4 * 32 + 2 * 32 + e % 32]) - max(-128, min(127, float(y[e]) * 20))) <= 0.51
    page = k_cache[1].view(-1)
    for e in (0, 33, 63):
        assert abs(int(page[(e // 32) * 4 * 32 + 2 * 32 + e % 32]) - max(-128, min(127, float(k[e]) * 10))) <= 0.51


def test_default_epsilon_differs_from_1e_6(call):
    kv, gamma, cos, sin = problem(1, 1)
    kv = kv * 1e-3
    results = []
    for args in ({}, {"epsilon": 1e-5}, {"epsilon": 1e-6}):
        caches = torch.zeros(2, 4, 1, ROPE).double(), torch.zeros(2, 4, 1, LATENT).double()
        call("npu_kv_rmsnorm_rope_cache_v2", kv, gamma, cos, sin, torch.tensor([1]), *caches, cache_mode="PA", **args)
        results.append(caches[1])
    assert torch.equal(results[0], results[1]) and (results[0] - results[2]).abs().max() > 0.1


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ"])
def test_mla_prolog_v3(call, mode, batched):
    tokens, he, hcq, heads, dim, block = 6, 16, 12, 2, 128, 4
    lead = (2, 3) if batched else (6,)
    x, wdq = rand(tokens, he), rand(he, hcq, seed=1)
    wuq, wuk = rand(hcq, heads * (dim + ROPE), seed=2), rand(heads, dim, LATENT, seed=3)
    wdkv = rand(he, LATENT + ROPE, seed=4)
    gq, gc = rand(hcq, seed=5), rand(LATENT, seed=6)
    theta = torch.cat((rand(tokens, 32, seed=7),) * 2, -1)
    cos, sin = theta.cos(), theta.sin()
    kv_cache, kr_cache = torch.zeros(5, block, 1, LATENT).double(), torch.zeros(5, block, 1, ROPE).double()
    if "BLK" in mode:
        index = torch.tensor([[3], [1]]) if batched else torch.tensor([[3, 1]])
        slots = [12, 13, 14, 4, 5, 6] if batched else [12, 13, 14, 15, 4, 5]
    else:
        slots = [3, 17, 5, 8, 0, 11]
        index = torch.tensor(slots).reshape(lead)
    q, qr, _, norm, _ = call(
        "npu_mla_prolog_v3", x.reshape(*lead, he), wdq, wuq, wuk, wdkv, gq, gc, sin.reshape(*lead, ROPE),
        cos.reshape(*lead, ROPE), kv_cache, kr_cache, cache_index=index, rmsnorm_epsilon_cq=1e-3,
        rmsnorm_epsilon_ckv=1e-4, cache_mode=mode, query_norm_flag=True, qc_qr_scale=1.5, kc_scale=0.5,
    )  # fmt: skip
    q, qr, norm = q.reshape(tokens, heads, LATENT), qr.reshape(tokens, heads, ROPE), norm.reshape(tokens, hcq)
    for t in range(tokens):
        cq = x[t] @ wdq
        cq = cq / (cq.pow(2).mean() + 1e-3).sqrt() * gq * 1.5
        assert (norm[t] - cq).abs().max() < 1e-9
        both = (cq @ wuq).reshape(heads, dim + ROPE)
        for h in range(heads):
            assert (q[t, h] - both[h, :dim] @ wuk[h]).abs().max() < 1e-8
            assert (qr[t, h] - rope_pairs(both[h, dim:], cos[t], sin[t])).abs().max() < 1e-8
        c, kr = token(x[t] @ wdkv, gc, cos[t], sin[t], 1e-4)
        for cache, row in ((kv_cache, c * 0.5), (kr_cache, kr)):
            page, at = cache[slots[t] // block].reshape(-1), slots[t] % block
            if mode.endswith("NZ"):
                got = torch.stack([page[(e // 16) * block * 16 + at * 16 + e % 16] for e in range(len(row))])
            else:
                got = cache[slots[t] // block, at, 0]
            assert (got - row).abs().max() < 1e-9
    assert int((kr_cache != 0).sum()) == tokens * ROPE
    # sin comes before cos
    other = call("npu_mla_prolog_v3", x, wdq, wuq, wuk, wdkv, gq, gc, cos, sin, kv_cache, kr_cache,
                 cache_index=torch.arange(tokens))[1]  # fmt: skip
    assert (other.reshape(qr.shape) - qr).abs().max() > 0.1


def test_prolog_and_fused_write_agree(call):
    """Both operators put the same rows into the cache for the same latent."""
    x, eye = rand(3, LATENT + ROPE), torch.eye(LATENT + ROPE).double()
    gamma = rand(LATENT, seed=2)
    theta = torch.cat((rand(3, 32, seed=7),) * 2, -1)
    caches = [(torch.zeros(2, 4, 1, LATENT).double(), torch.zeros(2, 4, 1, ROPE).double()) for _ in range(2)]
    slots = torch.tensor([1, 6, 4])
    cos, sin = theta.cos(), theta.sin()
    weights = rand(LATENT + ROPE, 8), rand(8, 192), rand(1, 128, LATENT), eye, rand(8), gamma
    call("npu_mla_prolog_v3", x, *weights, sin, cos, *caches[0], cache_index=slots, rmsnorm_epsilon_ckv=1e-6,
         cache_mode="PA_NZ")  # fmt: skip
    call("npu_kv_rmsnorm_rope_cache_v2", x[:, None, None], gamma, cos[:, None, None], sin[:, None, None], slots,
         caches[1][1], caches[1][0], epsilon=1e-6, cache_mode="PA_NZ")  # fmt: skip
    for a, b in zip(*caches, strict=True):
        assert (a - b).abs().max() < 1e-10 and (a != 0).any()
