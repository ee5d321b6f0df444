"""Cache writes, each against a loop over tokens written here."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_scatter_nd_update_writes_slots_through_a_view(call):
    cache = torch.zeros(4, 3, 2, 5)
    new = rand(4, 2, 5)
    slots = [7, 0, 11, 3]
    out = call("npu_scatter_nd_update_", cache.view(-1, 2, 5), torch.tensor(slots).view(-1, 1), new)
    for token, slot in zip(new, slots, strict=True):
        assert torch.equal(cache[slot // 3, slot % 3], token)
    untouched = [s for s in range(12) if s not in slots]
    assert (cache.view(-1, 2, 5)[untouched] == 0).all()
    assert out.data_ptr() == cache.data_ptr()


def test_scatter_nd_update_with_two_index_columns_and_extra_axes(call):
    target = torch.zeros(3, 4, 2)
    index = torch.tensor([[[2, 1], [0, 3]]], dtype=torch.int32)
    new = rand(1, 2, 2)
    call("npu_scatter_nd_update_", target, index, new)
    assert torch.equal(target[2, 1], new[0, 0]) and torch.equal(target[0, 3], new[0, 1])
    assert int((target != 0).sum()) == 4


def test_scatter_nd_update_without_underscore_copies(call):
    target = torch.zeros(3, 2)
    out = call("npu_scatter_nd_update", target, torch.tensor([[1]]), torch.ones(1, 2))
    assert (target == 0).all() and (out[1] == 1).all()


@pytest.mark.parametrize("slot", [-1, 12])
def test_scatter_nd_update_raises_out_of_range(call, slot):
    with pytest.raises(IndexError, match=str(slot)):
        call("npu_scatter_nd_update_", torch.zeros(12, 2), torch.tensor([[slot]]), torch.ones(1, 2))


@pytest.mark.parametrize(("shape", "update", "axis"), [
    ((3, 9, 4), (2, 2, 4), 1), ((3, 9, 4), (2, 2, 4), -2), ((3, 9, 2, 4), (3, 1, 2, 4), 1),
    ((3, 9, 2, 4), (3, 1, 2, 4), -3), ((3, 2, 9, 4), (3, 2, 3, 4), -2),
])  # fmt: skip
def test_scatter_update_along_every_cache_axis(call, shape, update, axis):
    cache, new = torch.zeros(shape), rand(*update)
    starts = [5, 0, 3][: update[0]]
    out = call("scatter_update_", cache, torch.tensor(starts, dtype=torch.int32), new, axis)
    wanted = torch.zeros(shape)
    where = axis % len(shape)
    for i, start in enumerate(starts):
        for n in range(update[where]):
            if where == 1:
                wanted[i, start + n] = new[i, n]
            else:
                wanted[i, :, start + n] = new[i, :, n]
    assert torch.equal(cache, wanted) and out.data_ptr() == cache.data_ptr()


def test_scatter_update_with_row_and_offset_pairs(call):
    cache, new = torch.zeros(3, 5, 2), rand(1, 1, 2)
    call("scatter_update_", cache, torch.tensor([[2, 4]]), new, 1)
    assert torch.equal(cache[2, 4], new[0, 0]) and int((cache != 0).sum()) == 2


def test_scatter_update_copies_without_underscore_and_raises_out_of_range(call):
    cache = torch.zeros(2, 4, 2)
    out = call("scatter_update", cache, torch.tensor([0, 1]), torch.ones(2, 1, 2), 1)
    assert (cache == 0).all() and int(out.sum()) == 4
    with pytest.raises(IndexError, match="axis 1"):
        call("scatter_update_", cache, torch.tensor([3, 0]), torch.ones(2, 2, 2), 1)


@pytest.mark.parametrize("mode", ["Norm", None, "PA_NZ"])
def test_scatter_pa_kv_cache(call, mode):
    key, value = rand(4, 2, 32), rand(4, 2, 16, seed=1)
    slots = [5, -1, 0, 9]  # -1 must not reach the last slot, 11
    if mode == "PA_NZ":
        key_cache, value_cache = torch.zeros(3, 4, 4, 16), torch.zeros(3, 2, 4, 16)
    else:
        key_cache, value_cache = torch.zeros(3, 4, 2, 32), torch.zeros(3, 4, 2, 16)
    before = key_cache.clone()
    copies = call("npu_scatter_pa_kv_cache_functional", key, value, key_cache, value_cache, torch.tensor(slots),
                  cache_mode=mode)  # fmt: skip
    assert torch.equal(key_cache, before)
    args = (key, value, key_cache, value_cache, torch.tensor(slots))
    assert call("npu_scatter_pa_kv_cache", *args, cache_mode=mode) is None
    assert torch.equal(copies[0], key_cache) and torch.equal(copies[1], value_cache)
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        written = 0
        for token, slot in zip(tokens, slots, strict=True):
            if slot < 0:
                continue
            written += token.numel()
            flat = token.flatten()
            for e in range(len(flat)):
                if mode == "PA_NZ":
                    assert cache[slot // 4, e // 16, slot % 4, e % 16] == flat[e]
                else:
                    assert cache[slot // 4, slot % 4].flatten()[e] == flat[e]
        assert int((cache != 0).sum()) == written


def test_write_layout_and_read_layout_must_match(call, fa):
    """What PA_NZ wrote reads back right as a 5-D cache and wrong as a 3-D one."""
    case = fa.Case((1,), (5,), heads=2, kv_heads=1, dim=32, value_dim=32, mode=0, dtype=torch.float32)
    d = fa.data(case)
    caches = [torch.zeros(3, 2, 4, 16) for _ in range(2)]
    slots = torch.tensor([4, 5, 6, 7, 8])
    call("npu_scatter_pa_kv_cache", d.k[0], d.v[0], *caches, slots)
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    args = {"block_table": table, "block_size": 4, "actual_seq_kvlen": [5]}
    wanted = fa.expected(case, d)[0][0]
    nz = fa.attend(case, d, key=caches[0].view(3, 1, 2, 4, 16), value=caches[1].view(3, 1, 2, 4, 16), **args)[0][0]
    assert (nz.double() - wanted).abs().max() < 1e-5
    flat = fa.attend(case, d, key=caches[0].view(3, 4, 32), value=caches[1].view(3, 4, 32), **args)[0][0]
    assert (flat.double() - wanted).abs().max() > 0.1


def test_gather_reads_back_what_was_written(call):
    """npu_gather_pa_kv_cache is the reader of npu_scatter_pa_kv_cache in Norm mode."""
    cache = rand(4, 3, 2, 5)
    lengths, table = [4, 2], torch.tensor([[2, 1], [3, 0]], dtype=torch.int32)
    key, value = torch.zeros(6, 2, 5), torch.zeros(6, 2, 5)
    call("npu_gather_pa_kv_cache", cache, cache * 2, table, torch.tensor(lengths, dtype=torch.int32), key, value)
    row = 0
    for b, n in enumerate(lengths):
        for p in range(n):
            assert torch.equal(key[row], cache[table[b, p // 3], p % 3])
            assert torch.equal(value[row], key[row] * 2)
            row += 1
