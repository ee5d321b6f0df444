"""The exact set of visible keys, read off the output: value row j is the unit vector j, so output entry j is the
weight of key j and differs from 0 exactly where key j is visible."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

MAX = 2147483647


def seen(fa, q, kv, layout="TND", pages=0, block=4, version=2, context=None, **kwargs):
    """Sets of visible keys, one per query of the last sequence; `q`, `kv` are the lengths of all."""
    mode = kwargs.pop("mode", 0)
    pre, nxt = kwargs.pop("pre", MAX), kwargs.pop("nxt", MAX)
    width = max(kv)
    case = fa.Case(
        q, kv, heads=1, kv_heads=1, dim=4, value_dim=width, layout=layout, pages=pages, block=block, mode=mode,
        pre=pre, nxt=nxt,
    )  # fmt: skip
    if pages == 5:
        width = case.value_dim + (-case.value_dim) % 4
        case = fa.replace(case, value_dim=width)
    d = fa.data(case)
    d.v = [torch.eye(width, dtype=torch.float64)[:n, None] for n in kv]
    got, _ = fa.attend(case, d, version=version, context=context, **kwargs)
    return [set(row.nonzero()[:, 0].tolist()) for row in got[-1][:, 0]]


@pytest.mark.parametrize("layout", ["TND", "NTD_TND", "BSND", "BNSD", "BSH"])
@pytest.mark.parametrize(("q", "kv"), [(4, 4), (2, 6), (3, 5)])
def test_modes_two_three_four(fa, layout, q, kv):
    o = kv - q
    assert seen(fa, (2, q), (3, kv), layout, mode=2) == [set(range(min(kv, i + 1))) for i in range(q)]
    assert seen(fa, (2, q), (3, kv), layout, mode=3) == [set(range(i + o + 1)) for i in range(q)]
    for pre, nxt in ((0, 0), (1, 0), (2, 1), (0, 2), (100, 0), (100, 100)):
        wanted = [{j for j in range(kv) if i + o - pre <= j <= i + o + nxt} for i in range(q)]
        assert seen(fa, (2, q), (3, kv), layout, mode=4, pre=pre, nxt=nxt) == wanted
    assert seen(fa, (2, q), (3, kv), layout, mode=0, pre=1, nxt=0) == [set(range(kv))] * q  # no mask: band ignored
    assert seen(fa, (2, q), (3, kv), layout, mode=3, pre=1, nxt=0) == [set(range(i + o + 1)) for i in range(q)]


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_band_shows_one_key_more_than_pre_tokens_at_decode(fa, block):
    """HF window W = keys i-W+1 .. i. pre_tokens = W shows W + 1 keys, W - 1 shows W."""
    w = 5
    for position in (w - 1, w, w + 1, 2 * w):
        length = position + 1
        hf = set(range(max(0, position - w + 1), position + 1))
        one_more = set(range(max(0, position - w), position + 1))
        assert seen(fa, (1,), (length,), pages=3, block=block, mode=4, pre=w - 1, nxt=0) == [hf]
        assert seen(fa, (1,), (length,), pages=3, block=block, mode=4, pre=w, nxt=0) == [one_more]


def test_band_at_prefill_for_every_query(fa):
    w, n = 3, 8
    hf = [set(range(max(0, i - w + 1), i + 1)) for i in range(n)]
    assert seen(fa, (n,), (n,), mode=4, pre=w - 1, nxt=0) == hf
    assert seen(fa, (n,), (n,), layout="BNSD", mode=4, pre=w - 1, nxt=0) == hf


@pytest.mark.parametrize("mode", [0, 3, 4])
@pytest.mark.parametrize("version", [1, 2])
def test_one_token_on_paged_bsh_keeps_exactly_pre_tokens_keys(fa, mode, version):
    """Section 7: a hard window in every mode, W keys for pre_tokens = W; not on BSND, BNSD, 4-D or unpaged."""
    w = 3
    for length in (w - 1, w, w + 1, 2 * w + 1):
        window = set(range(max(0, length - w), length))
        everything = set(range(length))
        kwargs = {"mode": mode, "pre": w, "nxt": 0, "version": version, "atten_mask": None}
        assert seen(fa, (1, 1), (4, length), "BSH", pages=3, **kwargs) == [window]
        assert seen(fa, (1, 1), (4, length), "BSH", pages=0, **kwargs) == [everything]
        assert seen(fa, (1, 1), (4, length), "BSND", pages=3, **kwargs) == [everything]
        assert seen(fa, (1, 1), (4, length), "BNSD", pages=3, **kwargs) == [everything]
        assert seen(fa, (1, 1), (4, length), "BNSD", pages=4, **kwargs) == [everything]
        assert seen(fa, (1, 1), (4, length), "BSH", pages=5, **kwargs) == [everything]
        assert seen(fa, (1, 1), (4, length), "BSH", pages=3, **{**kwargs, "pre": MAX}) == [everything]


@pytest.mark.parametrize("mode", [2, 3, 4])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_one_token_with_a_compressed_mask_sees_key_zero_only(fa, layout, mode):
    """The trap of section 4, which the rules refuse; without rules the kernel does what the device is read to do."""
    assert seen(fa, (1,), (6,), layout, mode=mode, pre=2, nxt=0) == [{0}]
    assert seen(fa, (1,), (6,), layout, mode=mode, pre=MAX, nxt=0, atten_mask=None) == [set(range(6))]


def test_one_token_on_tnd_honours_modes(fa):
    for layout in ("TND", "NTD_TND"):
        assert seen(fa, (1, 1), (3, 6), layout, mode=3) == [set(range(6))]
        assert seen(fa, (1, 1), (3, 6), layout, mode=4, pre=1, nxt=0) == [{4, 5}]


def test_one_token_key_mask(fa):
    mask = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1]], dtype=torch.int8)
    for shape in ((2, 4), (2, 1, 4), (2, 1, 1, 4)):
        assert seen(fa, (1, 1), (4, 4), "BSND", mode=0, atten_mask=mask.reshape(shape)) == [{0, 2}]


def test_full_mask_polarity_and_band_arguments(fa):
    mask = torch.tensor([[[0, 1, 0, 0], [1, 0, 0, 1]]], dtype=torch.uint8)
    assert seen(fa, (2,), (4,), "BSND", mode=0, atten_mask=mask) == [{0, 2, 3}, {1, 2}]
    assert seen(fa, (2,), (4,), "BSND", mode=1, atten_mask=mask.bool()) == [{0, 2, 3}, {1, 2}]


def test_sliding_mla_on_bsnd_uses_the_band(fa):
    case = fa.Case((1,), (6,), heads=1, kv_heads=1, dim=8, value_dim=8, rope=4, layout="BSND", mode=4, pre=2, nxt=0)
    d = fa.data(case)
    d.v = [torch.eye(8, dtype=torch.float64)[:6, None]]
    got, _ = fa.attend(case, d)
    assert set(got[0][0, 0].nonzero()[:, 0].tolist()) == {3, 4, 5}


def test_tnd_lengths_are_cumulative_unpaged_and_plain_when_paged(fa):
    assert seen(fa, (2, 3), (4, 5), mode=3) == [set(range(n)) for n in (3, 4, 5)]
    assert seen(fa, (2, 3), (4, 5), pages=3, mode=3) == [set(range(n)) for n in (3, 4, 5)]


def test_unknown_layout_and_mode_raise(fa):
    with pytest.raises(RuntimeError, match="SH"):
        seen(fa, (2,), (2,), mode=0, input_layout="SH")
    with pytest.raises(NotImplementedError, match="sparse_mode 5"):
        seen(fa, (2,), (2,), mode=0, sparse_mode=5)
