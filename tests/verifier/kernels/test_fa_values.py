"""Attention kernels against a scalar loop: layouts, pages, modes, heads, versions, sinks, LSE."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

DENSE = ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "BSH_BNSD", "BSND_BNSD"]
PACKED = ["TND", "TND_NTD", "NTD_TND", "NTD"]


def close(got, wanted, tol=1e-12):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert not torch.isnan(a).any()
        assert a.numel() == 0 or (a.double() - b).abs().max() <= tol


@pytest.mark.parametrize("mode", [0, 2, 3, 4])
@pytest.mark.parametrize("layout", DENSE + PACKED)
def test_every_layout_and_mode(fa, layout, mode):
    case = fa.Case((3, 5), (6, 5), layout=layout, mode=mode, pre=2, nxt=1 if mode == 4 else 2147483647)
    if mode != 4:
        case = fa.replace(case, pre=2147483647)
    d = fa.data(case)
    got, _ = fa.attend(case, d)
    close(got, fa.expected(case, d)[0])


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("layout", ["TND", "NTD_TND", "TND_NTD", "BNSD", "BSH", "BSND", "BSH_NBSD"])
def test_pages_of_every_rank(fa, layout, rank):
    case = fa.Case((2, 3, 2), (9, 3, 4), layout=layout, mode=3, pages=rank)
    d = fa.data(case)
    got, _ = fa.attend(case, d)
    close(got, fa.expected(case, d)[0])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize("version", [1, 2])
def test_mha_mqa_gqa_in_both_versions(fa, version, heads, kv_heads):
    case = fa.Case((3, 1), (3, 7), heads=heads, kv_heads=kv_heads, mode=3, pages=3)
    d = fa.data(case)
    got, _ = fa.attend(case, d, version=version)
    close(got, fa.expected(case, d)[0])


@pytest.mark.parametrize(("layout", "pages"), [("TND", 0), ("TND", 3), ("BSH", 0), ("BSND", 3)])
def test_left_out_kv_heads_mean_as_many_as_query_heads(fa, layout, pages):
    case = fa.Case((3,), (3,), heads=3, kv_heads=3, mode=3, layout=layout, pages=pages)
    d = fa.data(case)
    got, _ = fa.attend(case, d, num_key_value_heads=0)
    close(got, fa.expected(case, d)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_compute_in_float32(fa, dtype):
    case = fa.Case((4, 2), (4, 6), mode=3, dtype=dtype)
    d = fa.data(case)
    got, _ = fa.attend(case, d)
    assert all(o.dtype == dtype for o in got)
    close(got, fa.expected(case, d)[0], {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype])


@pytest.mark.parametrize(("layout", "pages", "kv_heads", "dim", "value_dim"), [
    ("TND_NTD", 3, 1, 16, 16), ("TND_NTD", 5, 1, 16, 16), ("TND", 4, 1, 16, 16), ("BSND", 3, 1, 16, 16),
    ("BSH", 5, 1, 16, 16), ("NTD_TND", 0, 4, 8, 8), ("TND", 0, 4, 8, 8), ("BNSD", 0, 4, 8, 8),
])  # fmt: skip
def test_rope_parts_add_to_the_scores(fa, layout, pages, kv_heads, dim, value_dim):
    case = fa.Case(
        (2, 3), (7, 3), layout=layout, pages=pages, kv_heads=kv_heads, dim=dim, value_dim=value_dim, rope=4, mode=3
    )
    d = fa.data(case)
    got, _ = fa.attend(case, d)
    close(got, fa.expected(case, d)[0])


@pytest.mark.parametrize("mode", [0, 3, 4])
@pytest.mark.parametrize("layout", ["TND", "NTD_TND"])
def test_sink_is_an_extra_logit_without_a_value(fa, layout, mode):
    case = fa.Case((3, 2), (3, 6), layout=layout, mode=mode, pre=1 if mode == 4 else 2147483647, nxt=0)
    sink = torch.tensor([0.5, -1.0, 40.0, -40.0], dtype=torch.float64)
    d = fa.data(case)
    got, lse = fa.attend(case, d, learnable_sink=sink, return_softmax_lse=True)
    outs, lses = fa.expected(case, d, sink=sink)
    close(got, outs)
    close([lse[..., 0].double()], [torch.cat(lses)], 1e-5)  # the LSE leaves the sink out


@pytest.mark.parametrize("layout", DENSE + PACKED + ["NSD"])
def test_lse_shape_and_value(fa, layout):
    lengths = ((5,), (5,)) if layout == "NSD" else ((4, 4), (6, 4))
    case = fa.Case(*lengths, layout=layout, mode=3)
    d = fa.data(case)
    if layout == "NSD":
        args = {**fa.arguments(fa.replace(case, layout="NTD"), d), "input_layout": "NSD"}
        from kvskill.verifier.kernels.fa.call import FaCall
        from kvskill.verifier.kernels.fa.ops import fused_attention

        out, lse = fused_attention(FaCall(
            "x", 2, args["query"], args["key"], args["value"], mask=args["atten_mask"], heads=4, kv_heads=2,
            scale=case.scale, layout="NSD", sparse_mode=3, lse=True,
        ))  # fmt: skip
        assert out.shape == (4, 5, 8) and lse.shape == (1, 4, 5, 1)
        close([out.transpose(0, 1)], fa.expected(case, d)[0])
        return
    _, lse = fa.attend(case, d, return_softmax_lse=True)
    wanted = fa.expected(case, d)[1]
    assert lse.dtype == torch.float32
    if layout in PACKED:
        assert lse.shape == (8, 4, 1)
        close([lse[..., 0]], [torch.cat(wanted)], 1e-5)
    else:
        assert lse.shape == (2, 4, 4, 1)
        close([lse[b, :, :, 0].T for b in range(2)], wanted, 1e-5)


def test_partial_results_merge_by_lse(fa):
    """Attention over keys 0..8 equals the merge of 0..4 and 5..8 by their LSEs."""
    case = fa.Case((2,), (9,), mode=0)
    d = fa.data(case)
    whole = fa.attend(case, d)[0][0]
    parts = []
    for lo, hi in ((0, 5), (5, 9)):
        part = fa.data(case)
        part.k, part.v = [d.k[0][lo:hi]], [d.v[0][lo:hi]]
        part.q = d.q
        out, lse = fa.attend(fa.replace(case, kv_len=(hi - lo,)), part, return_softmax_lse=True)
        parts.append((out[0], lse.double()))
    weight = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)
    close([sum(w * o for w, (o, _) in zip(weight, parts, strict=True))], [whole], 1e-6)


def test_lse_off_gives_an_empty_tensor(fa):
    _, lse = fa.attend(fa.Case((2,), (2,)))
    assert lse.shape == (0,) and lse.dtype == torch.float32


def test_no_keys_give_zeros_and_infinite_lse(fa):
    case = fa.Case((2, 2), (0, 3), mode=0)
    got, lse = fa.attend(case, return_softmax_lse=True)
    assert (got[0] == 0).all() and torch.isinf(lse[:2]).all() and torch.isfinite(lse[2:]).all()


def test_more_queries_than_keys_leave_zero_rows(fa):
    case = fa.Case((5,), (3,), layout="BSND", mode=3)
    got, lse = fa.attend(case, return_softmax_lse=True)
    assert (got[0][:2] == 0).all() and (got[0][2:] != 0).any()
    assert torch.isinf(lse[0, :, :2]).all()


def test_a_sequence_without_queries_is_legal(fa):
    case = fa.Case((2, 0, 3), (2, 4, 3), mode=3)
    d = fa.data(case)
    close(fa.attend(case, d)[0], fa.expected(case, d)[0])


def test_position_bias_is_added_after_scaling(fa):
    case = fa.Case((3, 3), (3, 3), layout="BNSD", mode=3)
    d = fa.data(case)
    pse = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    got, _ = fa.attend(case, d, pse_shift=pse)
    for b in range(2):
        q, k, v = (t[b].transpose(0, 1) for t in (d.q, d.k, d.v))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        s = q @ k.transpose(1, 2) * case.scale + pse[0]
        s = s.masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
        close([got[b]], [(torch.softmax(s, -1) @ v).transpose(0, 1)])


@pytest.mark.parametrize("mode", [0, 1])
def test_full_mask(fa, mode):
    case = fa.Case((4, 4), (6, 6), layout="BSND", mode=mode)
    d = fa.data(case)
    mask = torch.rand(2, 1, 5, 8, generator=torch.Generator().manual_seed(3)) < 0.4  # may be larger than needed
    mask[..., 0] = False
    got, _ = fa.attend(case, d, atten_mask=mask)
    for b in range(2):
        one = fa.replace(case, q_len=(4,), kv_len=(6,))
        part = fa.data(case)
        part.q, part.k, part.v = [d.q[b]], [d.k[b]], [d.v[b]]
        outs, _ = fa.expected(one, part, visible=lambda i, j, q, kv, b=b: not mask[b, 0, i, j])
        close([got[b]], outs)


def test_a_row_masked_as_a_whole_is_undefined_unless_repaired(fa):
    case = fa.Case((2,), (3,), layout="BSND", mode=1)
    mask = torch.zeros(1, 2, 3, dtype=torch.bool)
    mask[0, 1] = True
    got, _ = fa.attend(case, atten_mask=mask)
    assert torch.isfinite(got[0][0]).all() and torch.isnan(got[0][1]).all()
    repaired, _ = fa.attend(case, atten_mask=mask, inner_precise=2)
    assert (repaired[0][1] == 0).all()


def test_torch_sdpa_agrees(fa):
    """A third formulation, for causal attention."""
    case = fa.Case((6,), (6,), layout="BNSD", mode=3)
    d = fa.data(case)
    q, k, v = (t[0].transpose(0, 1)[None] for t in (d.q, d.k, d.v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True, scale=case.scale
    )
    close(fa.attend(case, d)[0], [wanted[0].transpose(0, 1)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_random_cases(fa, drawn):
    layout = drawn.draw(st.sampled_from(["TND", "NTD_TND", "BSND", "BNSD", "BSH"]))
    batch = drawn.draw(st.integers(1, 3))
    kv = tuple(drawn.draw(st.integers(2, 11)) for _ in range(batch))
    q = tuple(drawn.draw(st.integers(2, max(2, min(s, 5)))) for s in kv)
    mode = drawn.draw(st.sampled_from([0, 2, 3, 4]))
    heads, kv_heads = drawn.draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    case = fa.Case(
        q, kv, heads=heads, kv_heads=kv_heads, layout=layout, mode=mode, dim=4, value_dim=4,
        pages=drawn.draw(st.sampled_from([0, 3, 4, 5])), block=drawn.draw(st.sampled_from([1, 2, 4])),
        pre=drawn.draw(st.integers(0, 12)) if mode == 4 else 2147483647,
        nxt=drawn.draw(st.integers(0, 3)) if mode == 4 else 2147483647, seed=drawn.draw(st.integers(0, 999)),
    )  # fmt: skip
    d = fa.data(case)
    close(fa.attend(case, d)[0], fa.expected(case, d)[0])


def test_older_operators_and_out_overloads(fa, call):
    """npu_prompt_flash_attention, npu_incre_flash_attention and .out are the same arithmetic."""
    case = fa.Case((3, 3), (3, 3), layout="BNSD", mode=3)
    d = fa.data(case)
    wanted = fa.expected(case, d)[0]
    args = fa.arguments(case, d, 1)
    q, k, v = (args[n] for n in ("query", "key", "value"))
    out = call("npu_prompt_flash_attention", q, k, v, num_heads=4, num_key_value_heads=2, scale_value=case.scale,
               input_layout="BNSD", sparse_mode=3, atten_mask=fa.triangle())  # fmt: skip
    close(fa.unpack(out, case), wanted)
    for version in (1, 2):
        args = fa.arguments(case, d, version)
        q, k, v = (args.pop(n) for n in ("query", "key", "value"))
        outs = [torch.zeros(2, 4, 3, 8, dtype=torch.float64), torch.zeros(1)]
        op = "npu_fused_infer_attention_score" + ("_v2" if version == 2 else "")
        call(op + ".out", q, k, v, out=outs, **args)
        close(fa.unpack(outs[0], case), wanted)
    one = fa.Case((1, 1), (4, 7), layout="BSH", mode=0, pages=3)
    d = fa.data(one)
    args = fa.arguments(one, d, 1)
    out = call("npu_incre_flash_attention", args["query"], args["key"], args["value"], num_heads=4,
               num_key_value_heads=2, scale_value=one.scale, actual_seq_lengths=[4, 7], block_size=4,
               block_table=args["block_table"])  # fmt: skip
    close(fa.unpack(out, one), fa.expected(one, d)[0])


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD", "TND"])
@pytest.mark.parametrize(("mode", "pre"), [(0, 2147483647), (2, 2147483647), (3, 2147483647), (4, 2)])
def test_fusion_attention(fa, call, layout, mode, pre):
    case = fa.Case((4, 4), (6, 6), mode=mode, pre=pre, nxt=1)
    d = fa.data(case)

    def pack(parts):
        rows = torch.stack(parts)
        return {
            "BSH": rows.flatten(2), "SBH": rows.flatten(2).transpose(0, 1), "BSND": rows,
            "BNSD": rows.transpose(1, 2), "TND": rows.flatten(0, 1),
        }[layout]  # fmt: skip

    lengths = {"actual_seq_qlen": [4, 8], "actual_seq_kvlen": [6, 12]} if layout == "TND" else {}
    out = call(
        "npu_fusion_attention", pack(d.q), pack(d.k), pack(d.v), 4, layout, scale=case.scale, sparse_mode=mode,
        pre_tockens=pre, next_tockens=1 if mode == 4 else 2147483647, atten_mask=fa.triangle() if mode else None,
        **lengths,
    )  # fmt: skip
    assert len(out) == 7 and torch.equal(out[0], pack(fa.unpack_bsnd(out[0], layout)))
    close(fa.unpack_bsnd(out[0], layout), fa.expected(case, d)[0])


def test_fusion_attention_has_no_one_token_special_case(fa, call):
    q, k, v = torch.ones(1, 1, 1, 4), torch.ones(1, 6, 1, 4), torch.eye(6)[None, :, None]
    out = call("npu_fusion_attention", q, k, v, 1, "BSND", sparse_mode=4, pre_tockens=1, next_tockens=0,
               atten_mask=fa.triangle())[0]  # fmt: skip
    assert out[0, 0, 0].nonzero()[:, 0].tolist() == [4, 5]
