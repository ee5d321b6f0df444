"""An invisible key enters no product; a visible NaN reaches the output; absorbing mode as on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from kvskill.verifier.backend.context import OpContext  # noqa: E402

NAN = float("nan")
FREE = OpContext(enforce=False)


def poisoned(fa, pages, poison, mode=4, pre=2, layout="TND", hit=(), context=FREE):
    """Output of sequence 1 (2 queries, 11 keys), keys and values at positions `hit` poisoned."""
    case = fa.Case((3, 2), (5, 11), layout=layout, pages=pages, mode=mode, pre=pre, nxt=0)
    d = fa.data(case)
    for j in hit:
        d.k[1][j] = poison
        d.v[1][j] = poison
    return fa.attend(case, d, context=context)[0][1]


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("pages", [0, 3, 4, 5])
@pytest.mark.parametrize("layout", ["TND", "NTD_TND", "BNSD", "BSH"])
def test_poison_outside_the_visible_set_changes_nothing(fa, layout, pages, poison):
    clean = poisoned(fa, pages, 0.0, layout=layout)
    dirty = poisoned(fa, pages, poison, layout=layout, hit=range(7))  # query 0 sees 7..9, query 1 sees 8..10
    assert torch.allclose(clean, dirty, rtol=0, atol=1e-13) and torch.isfinite(dirty).all()


@pytest.mark.parametrize("pages", [0, 3])
def test_only_queries_that_see_a_nan_become_nan(fa, pages):
    dirty = poisoned(fa, pages, NAN, hit=[7])
    assert torch.isnan(dirty[0]).all()
    assert torch.isfinite(dirty[1]).all()
    clean = poisoned(fa, pages, 0.0)
    assert torch.allclose(clean[1], dirty[1], rtol=0, atol=1e-13)


def test_nan_in_the_key_alone_and_in_the_value_alone(fa):
    case = fa.Case((2,), (4,), mode=3)
    for name in ("k", "v"):
        d = fa.data(case)
        getattr(d, name)[0][3] = NAN
        out = fa.attend(case, d)[0][0]
        assert torch.isfinite(out[0]).all() and torch.isnan(out[1]).all()


def test_nan_in_a_hidden_future_key_of_a_causal_prompt(fa):
    case = fa.Case((4,), (4,), mode=3)
    d = fa.data(case)
    clean = fa.attend(case, d)[0][0]
    d.k[0][3], d.v[0][3] = NAN, NAN
    dirty = fa.attend(case, d)[0][0]
    assert torch.allclose(clean[:3], dirty[:3], rtol=0, atol=1e-13) and torch.isnan(dirty[3]).all()


def test_both_ways_of_computing_agree(fa):
    """The masked product (all finite) and the gathering form give the same numbers."""
    from kvskill.verifier.kernels.fa.attend import attend
    from kvskill.verifier.kernels.fa.visible import Visible

    g = torch.Generator().manual_seed(1)
    q = torch.randn(3, 4, 8, generator=g, dtype=torch.float64)
    k, v = (torch.randn(6, 2, 8, generator=g, dtype=torch.float64) for _ in range(2))
    sink = torch.randn(4, generator=g, dtype=torch.float64)
    pse = torch.randn(4, 3, 9, generator=g, dtype=torch.float64)
    see = Visible(((3, 5), (4, 8), (6, 6)))
    one = attend(q, k, v, see, first=3, scale=0.5, sink=sink, pse=pse)
    two = attend(q, k, v, see, first=3, scale=0.5, sink=sink, pse=pse, per_query=True)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(torch.isinf(a), torch.isinf(b))
        finite = torch.isfinite(a)
        assert (a[finite] - b[finite]).abs().max() < 1e-14


def test_masked_full_mask_key_is_not_used(fa):
    case = fa.Case((2,), (4,), layout="BSND", mode=1)
    mask = torch.tensor([[[0, 1, 0, 0], [0, 1, 1, 0]]], dtype=torch.bool)
    d = fa.data(case)
    clean = fa.attend(case, d, atten_mask=mask)[0][0]
    d.k[0][1], d.v[0][1] = NAN, NAN
    dirty = fa.attend(case, d, atten_mask=mask)[0][0]
    assert torch.allclose(clean, dirty, rtol=0, atol=1e-13)


def test_idle_row_attends_the_null_block_and_is_nan_alone(fa):
    """A padded batch row (1 query, 1 key in block 0 full of NaN) is NaN, its neighbours are not."""
    case = fa.Case((1, 1), (6, 1), pages=3, mode=3)
    d = fa.data(case)
    table, _ = fa.block_table(case)
    args = {"block_table": table.clone()}
    args["block_table"][1] = 0
    out = fa.attend(case, d, **args)[0]
    assert torch.isfinite(out[0]).all() and torch.isnan(out[1]).all()


def test_absorbing_mode_lets_a_loaded_nan_value_through(fa):
    """A device loads whole pages and masks afterwards: weight 0 times NaN is NaN."""
    absorbing = replace(FREE, nan="absorbing")
    inside = poisoned(fa, 3, NAN, hit=[5], context=absorbing)  # visible 7.., its page is 4..7
    assert torch.isnan(inside).all()
    outside = poisoned(fa, 3, NAN, hit=[3], context=absorbing)  # page 0..3 is not loaded
    assert torch.isfinite(outside).all()
    assert torch.isfinite(poisoned(fa, 3, NAN, hit=[5])).all()  # the definition does not see it


def test_rows_beyond_the_query_length_are_undefined(fa):
    case = fa.Case((2, 4), (4, 4), layout="BSND", mode=3)
    args = fa.arguments(case, fa.data(case))
    positional = [args.pop(n) for n in ("query", "key", "value")]
    positional[0] = torch.nan_to_num(positional[0])
    from kvskill.verifier.backend.binder import implementation
    from kvskill.verifier.backend.context import using
    from kvskill.verifier.backend.schemas import load_table
    from kvskill.verifier.kernels.registry import load_kernels

    op = "npu_fused_infer_attention_score_v2"
    run = implementation(torch._C.parse_schema("npu::" + load_table().schemas("2.13.0")[op]), load_kernels()[op])
    with using(FREE):
        out, _ = run(*positional, **args)
    assert torch.isnan(out[0, 2:]).all() and torch.isfinite(out[0, :2]).all() and torch.isfinite(out[1]).all()
    with using(replace(FREE, undefined="zero")):
        out, _ = run(*positional, **args)
    assert (out[0, 2:] == 0).all()
