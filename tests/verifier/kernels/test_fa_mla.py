"""MLA at its real dims: absorbed (512 + 64) against un-absorbed (128 + 64), ND and NZ pages."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from kvskill.verifier.backend.context import OpContext  # noqa: E402

HEADS, NOPE, ROPE, LATENT = 4, 128, 64, 512
SCALE = (NOPE + ROPE) ** -0.5


def problem(lengths, new):
    """Latents, rope keys, queries and the up-projections of `len(lengths)` sequences; the last `new` are queries."""
    g = torch.Generator().manual_seed(7)

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    up_k, up_v = rand(HEADS, NOPE, LATENT) / LATENT**0.5, rand(HEADS, LATENT, NOPE) / LATENT**0.5
    c = [rand(n, LATENT) for n in lengths]
    kr = [rand(n, ROPE) for n in lengths]
    qn = [rand(m, HEADS, NOPE) for m in new]
    qr = [rand(m, HEADS, ROPE) for m in new]
    return up_k, up_v, c, kr, qn, qr


def unabsorbed(up_k, up_v, c, kr, qn, qr):
    """Dense causal attention in float64 with expanded keys and values."""
    outs = []
    for b in range(len(c)):
        k = torch.einsum("nl,hdl->hnd", c[b].double(), up_k.double())
        v = torch.einsum("nl,hld->hnd", c[b].double(), up_v.double())
        q = qn[b].double().transpose(0, 1)
        s = q @ k.transpose(1, 2) + qr[b].double().transpose(0, 1) @ kr[b].double().T
        n, m = len(c[b]), len(qn[b])
        hidden = torch.ones(m, n).triu(1 + n - m).bool()
        outs.append((torch.softmax((s * SCALE).masked_fill(hidden, -math.inf), -1) @ v).transpose(0, 1))
    return torch.cat(outs)


def pages(rows, table, block, blocks, nz):
    cache = torch.full((blocks, block, rows[0].shape[1]), float("nan"))
    if nz:
        cache = torch.full((blocks, 1, rows[0].shape[1] // 16, block, 16), float("nan"))
    for b, part in enumerate(rows):
        for p, row in enumerate(part):
            if nz:
                cache[table[b, p // block], 0, :, p % block] = row.reshape(-1, 16)
            else:
                cache[table[b, p // block], p % block] = row
    return cache


@pytest.mark.parametrize("nz", [False, True])
@pytest.mark.parametrize(("new", "mode"), [((1, 1, 1), 0), ((1, 1, 1), 3), ((2, 3, 1), 3)])
def test_absorbed_decode_equals_unabsorbed(call, fa, nz, new, mode):
    lengths = (19, 16, 33)
    up_k, up_v, c, kr, qn, qr = problem(lengths, new)
    table = torch.tensor([[5, 2, 0], [7, 0, 0], [1, 3, 6]], dtype=torch.int32)
    c_cache, kr_cache = (pages(rows, table, 16, 8, nz) for rows in (c, kr))
    q = torch.einsum("thd,hdl->thl", torch.cat(qn), up_k).contiguous()
    out, _ = call(
        "npu_fused_infer_attention_score_v2", q, c_cache, c_cache, query_rope=torch.cat(qr), key_rope=kr_cache,
        actual_seq_qlen=torch.tensor(new).cumsum(0).tolist(), actual_seq_kvlen=list(lengths), block_table=table,
        block_size=16, num_query_heads=HEADS, num_key_value_heads=1, softmax_scale=SCALE, input_layout="TND_NTD",
        sparse_mode=mode, atten_mask=fa.triangle() if mode else None, rules=True,
        context=OpContext(profile="cann-9.0", block_size=128),
    )  # fmt: skip
    assert out.shape == (HEADS, sum(new), LATENT)
    got = call("npu_transpose_batchmatmul", out, up_v, perm_x1=[0, 1, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    wanted = unabsorbed(up_k, up_v, c, kr, qn, qr)
    assert (got.double() - wanted).abs().max() / wanted.abs().max() < 1e-5


def test_expanded_prefill_equals_the_same(call, fa):
    lengths = (5, 9)
    up_k, up_v, c, kr, qn, qr = problem(lengths, lengths)
    k = torch.einsum("nl,hdl->hnd", torch.cat(c), up_k).contiguous()
    v = torch.einsum("nl,hld->hnd", torch.cat(c), up_v).contiguous()
    rope = torch.cat(kr)[None].repeat(HEADS, 1, 1)
    out, _ = call(
        "npu_fused_infer_attention_score", torch.cat(qn).transpose(0, 1).contiguous(), k, v,
        query_rope=torch.cat(qr).transpose(0, 1).contiguous(), key_rope=rope, num_heads=HEADS,
        num_key_value_heads=HEADS, input_layout="NTD_TND", atten_mask=fa.triangle(), sparse_mode=3,
        actual_seq_lengths=[5, 14], actual_seq_lengths_kv=[5, 14], scale=SCALE, next_tokens=0, rules=True,
        context=OpContext(profile="cann-8.5-snapshot"),
    )  # fmt: skip
    wanted = unabsorbed(up_k, up_v, c, kr, qn, qr)
    assert out.shape == (14, HEADS, NOPE)
    assert (out.double() - wanted).abs().max() / wanted.abs().max() < 1e-5
