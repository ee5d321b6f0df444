"""Who owns which block, checked against brute force."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

ERAS = ["2026-04", "2026-06", "2026-08"]
Load = Callable[[str, str], ModuleType]


def infer_config(batch: int, next_n: int = 0) -> SimpleNamespace:
    """The fields that sizing reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(batch_size_per_dp_rank=batch, mem_fraction_static=0.85, max_prefill_tokens=64),
        model_config=SimpleNamespace(next_n=next_n),
    )


def entry(load: Load, era: str, attn_type: str, size: int, window: int | None = None, **extra: object) -> object:
    """A cache entry of the era."""
    import torch

    info = load(era, "core.kv_cache.cache_info")
    if era != "2026-04":
        extra["block_size"] = size
    return info.CacheEntry(
        cache_name="k_cache",
        attn_type=attn_type,
        dim=8,
        num_head=2,
        dtype=torch.float32,
        needs_block=True,
        sliding_window=window,
        **extra,
    )


def model_info(load: Load, era: str, size: int, *layers: list[object]) -> object:
    """Cache metadata of a model in the form of the era."""
    info = load(era, "core.kv_cache.cache_info")
    infos = [info.LayerCacheInfo(layer_idx=i, caches=entries) for i, entries in enumerate(layers)]
    extra = {"block_size": size} if era == "2026-04" else {}
    return info.ModelCacheInfo(num_layers=len(infos), layer_infos=infos, **extra)


@pytest.mark.parametrize("era", ERAS)
def test_pool_keeps_the_null_block_and_refuses_to_free_twice(era: str, executor: Load) -> None:
    pool = executor(era, "core.kv_cache").BlockPool(5, 16)
    with pytest.raises(ValueError):
        pool.get_new_blocks(5)
    blocks = pool.get_new_blocks(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    pool.free_blocks([0, blocks[0]])
    assert pool.get_num_free_blocks() == 1
    with pytest.raises(ValueError, match="twice"):
        pool.free_blocks([blocks[0]])


@pytest.mark.parametrize("era", ERAS)
def test_block_counts_follow_the_formulas(era: str, executor: Load) -> None:
    utils = executor(era, "core.kv_cache.cache_utils")
    info = model_info(
        executor,
        era,
        16,
        [entry(executor, era, "FullAttention", 16)],
        [entry(executor, era, "SlidingWindow", 16, 40)],
    )
    utils.validate_cache_info(info)
    counts = utils.calculate_block_num(infer_config(3, next_n=1), info, offline_max_len=100)
    assert counts == {"FullAttention": 7 * 3 + 1, "SlidingWindow": 3 * (3 + 1) + 1}


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("seed", range(6))
def test_a_window_keeps_every_visible_key_and_nothing_more(era: str, seed: int, executor: Load) -> None:
    rng = random.Random(seed)
    size, window, batch = rng.choice([4, 16]), rng.choice([1, 5, 16, 33]), 3
    utils = executor(era, "core.kv_cache.cache_utils")
    module = executor(era, "core.kv_cache.single_type_kv_cache_manager")
    coordinator = executor(era, "core.kv_cache.coordinator").CacheCoordinator
    info = model_info(executor, era, size, [entry(executor, era, "SlidingWindow", size, window)])
    counts = utils.calculate_block_num(infer_config(batch), info, offline_max_len=400)
    (manager,) = module.create_single_type_managers(info, counts, 400)
    kv = coordinator(400, [manager])
    lengths = {}
    for request in range(batch):
        lengths[request] = rng.randint(1, 3 * window + 2 * size)
        assert kv.allocate_slots(request, 0, lengths[request])
    for _ in range(3 * size):
        for request, length in lengths.items():
            # the scheduler's call: `length` tokens are in the cache, one more is written and then read
            assert kv.allocate_slots(request, computed_tokens=length, num_new_tokens=1)
            blocks = manager.get_blocks(request)
            visible = range(max(0, length - window + 1), length + 1)
            assert all(blocks[position // size] != 0 for position in visible)
            whole_invisible = max(0, length + 1 - window) // size
            assert blocks[:whole_invisible] == [0] * whole_invisible
            lengths[request] += 1
        owned = [b for request in lengths for b in manager.get_blocks(request) if b]
        assert len(owned) == len(set(owned))
        assert len(owned) + manager.get_num_free_blocks() == counts["SlidingWindow"] - 1
    for request in lengths:
        kv.free(request)
    assert manager.get_num_free_blocks() == counts["SlidingWindow"] - 1


@pytest.mark.parametrize(("era", "first"), [("2026-04", 1), ("2026-06", 1), ("2026-08", 0)])
def test_a_prompt_of_window_plus_block_keeps_one_token_more_in_the_newest_era(
    era: str, first: int, executor: Load
) -> None:
    module = executor(era, "core.kv_cache.single_type_kv_cache_manager")
    manager = module.SlidingWindowManager("SlidingWindow", 20, 4, sliding_window=8)
    missing = manager.get_num_blocks_to_allocate(7, 12)  # tokens 4..11 are visible to token 11
    manager.allocate_new_blocks(7, missing, 12)
    assert [block != 0 for block in manager.get_blocks(7)].index(True) == first


@pytest.mark.parametrize("era", ERAS)
def test_allocation_is_all_or_nothing_over_groups(era: str, executor: Load) -> None:
    managers = executor(era, "core.kv_cache.managers")
    coordinator = executor(era, "core.kv_cache.coordinator").CacheCoordinator
    big = managers.FullAttentionManager("FullAttention", 9, 4)
    small = managers.FullAttentionManager("FullAttention", 3, 4, manager_key="second")
    kv = coordinator(100, [big, small])
    assert not kv.allocate_slots(1, 0, 12)
    assert big.get_blocks(1) == small.get_blocks(1) == []
    assert kv.allocate_slots(1, 0, 8)


@pytest.mark.parametrize("era", ERAS)
def test_slots_and_tables_match_a_plain_loop(era: str, executor: Load) -> None:
    import torch

    sizing = executor(era, "core.kv_cache.sizing")
    managers = executor(era, "core.kv_cache.managers")
    manager = managers.FullAttentionManager("FullAttention", 30, 4)
    lengths = [5, 1, 9]
    for request, length in enumerate(lengths):
        manager.allocate_new_blocks(request, manager.get_num_blocks_to_allocate(request, length))
    requests = [SimpleNamespace(request_id=request) for request in range(3)]
    table = sizing.block_table(requests, manager, 6, torch.device("cpu"), 4)
    assert table.dtype == torch.int32 and table.shape == (4, 6)
    assert table[3].tolist() == [0] * 6 and table[1].tolist()[1:] == [0] * 5
    positions = torch.cat([torch.arange(length) for length in lengths] + [torch.tensor([0])])
    cu_q = torch.tensor([*lengths, 1]).cumsum(0)
    slots = sizing.slots_of(positions, cu_q, table, 4)
    want = [manager.get_blocks(r)[p // 4] * 4 + p % 4 for r, n in enumerate(lengths) for p in range(n)] + [0]
    assert slots.dtype == torch.int64 and slots.tolist() == want
    with pytest.raises(ValueError, match="beyond"):
        sizing.slots_of(torch.tensor([24]), torch.tensor([1]), table[:1], 4)


@pytest.mark.parametrize("era", ERAS)
def test_metadata_that_cannot_be_allocated_is_refused(era: str, executor: Load) -> None:
    utils = executor(era, "core.kv_cache.cache_utils")
    module = executor(era, "core.kv_cache.single_type_kv_cache_manager")
    good = entry(executor, era, "FullAttention", 16)
    for bad in (
        entry(executor, era, "Sliding", 16),
        entry(executor, era, "FullAttention", 0),
    ):
        if era == "2026-04" and bad.attn_type == "FullAttention":  # type: ignore[attr-defined]
            info = model_info(executor, era, 0, [good])
        else:
            info = model_info(executor, era, 16, [good, bad])
        with pytest.raises(ValueError):
            utils.validate_cache_info(info)
    with pytest.raises(ValueError):
        utils.validate_cache_info(model_info(executor, era, 16, []))
    two = [entry(executor, era, "SlidingWindow", 16, 8), entry(executor, era, "SlidingWindow", 16, 9)]
    with pytest.raises(ValueError, match="sliding_window"):
        module.create_single_type_managers(model_info(executor, era, 16, two), {"SlidingWindow": 9}, 64)


@pytest.mark.parametrize("era", ["2026-06", "2026-08"])
def test_two_block_sizes_need_two_keys(era: str, executor: Load) -> None:
    utils = executor(era, "core.kv_cache.cache_utils")
    same = [entry(executor, era, "FullAttention", 16), entry(executor, era, "FullAttention", 32)]
    with pytest.raises(ValueError, match="block_size"):
        utils.calculate_block_num(infer_config(1), model_info(executor, era, 0, same), offline_max_len=64)
    apart = [same[0], entry(executor, era, "FullAttention", 32, manager_key="wide")]
    counts = utils.calculate_block_num(infer_config(1), model_info(executor, era, 0, apart), offline_max_len=64)
    assert counts == {"FullAttention": 5, "wide": 3}


@pytest.mark.parametrize("era", ERAS)
def test_allocated_tensors_have_the_documented_shape_and_reach_their_setter(era: str, executor: Load) -> None:
    import torch

    utils = executor(era, "core.kv_cache.cache_utils")
    seen: list[object] = []
    info = model_info(executor, era, 16, [entry(executor, era, "FullAttention", 16, tensor_setter=seen.append)])
    utils.allocate_cache_tensors(torch.device("cpu"), info, {"FullAttention": 3})
    (tensor,) = seen
    assert tensor.shape == (3, 16, 2, 8) and tensor.is_contiguous()  # type: ignore[attr-defined]
    without = model_info(executor, era, 16, [entry(executor, era, "FullAttention", 16)])
    with pytest.raises(ValueError, match="tensor_setter"):
        utils.allocate_cache_tensors(torch.device("cpu"), without, {"FullAttention": 3})
