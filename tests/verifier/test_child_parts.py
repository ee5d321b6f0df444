"""Parts that run in child processes, one by one, on small doubles."""

from __future__ import annotations

import importlib
import sys
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvskill.verifier.backend.record import CallRecord, TensorFact
from kvskill.verifier.child import standins
from kvskill.verifier.child.caches import Caches, CacheTensor
from kvskill.verifier.child.observe import Observer
from kvskill.verifier.child.template_reference import attention
from kvskill.verifier.child.weights import random_tensor


class Pool:
    """As the framework's block pool, reduced."""

    def __init__(self, count: int) -> None:
        self._free_block_queue = deque(range(1, count))

    def get_null_block(self) -> int:
        return 0

    def free_blocks(self, blocks: list[int]) -> None:
        self._free_block_queue.extend(blocks)


def caches(owned: dict[int, list[int]], count: int = 6, size: int = 4) -> Caches:
    pool = Pool(count)
    single = types.SimpleNamespace(
        attn_type="SlidingWindow", block_pool=pool, block_size=size, req_to_blocks=owned,
        get_num_free_blocks=lambda: len(pool._free_block_queue),
    )  # fmt: skip
    found = Caches()
    found.tensors = [CacheTensor(0, "k_cache", "SlidingWindow", 8, torch.zeros(count, size, 1, 2))]
    found.attach(types.SimpleNamespace(single_type_managers=[single]))
    return found


def test_poison_covers_free_blocks_and_the_null_block() -> None:
    found = caches({})
    cache, pool = found.tensors[0].tensor, found.managers["SlidingWindow"].block_pool
    found.start(float("nan"))
    assert bool(cache.isnan().all())
    cache.zero_()
    pool.free_blocks([2, 3, 0])
    assert bool(cache[[2, 3]].isnan().all()) and not bool(cache[[0, 1, 4, 5]].isnan().any())
    found.before_forward()
    assert bool(cache[0].isnan().all())
    found.start(None)
    cache.zero_()
    pool.free_blocks([4])
    assert not bool(cache.isnan().any()), "the second run keeps stale data"


def test_permutation_depends_on_the_seed_and_loses_nothing() -> None:
    orders = []
    for seed in (1, 1, 2):
        found = caches({}, count=20)
        found.permute(seed)
        orders.append(list(found.managers["SlidingWindow"].block_pool._free_block_queue))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(1, 20)) != orders[0]


def call(lengths: list[int], mode: int, pre: int, table: Any) -> CallRecord:
    fact = TensorFact(tuple(table.shape), (1,), "int32", table.data_ptr(), False)
    return CallRecord(
        "npu_fused_infer_attention_score_v2",
        {
            "actual_seq_kvlen": lengths,
            "sparse_mode": mode,
            "pre_tokens": pre,
            "input_layout": "TND",
            "block_table": fact,
        },
    )


@pytest.mark.parametrize(
    ("lengths", "mode", "pre", "table", "kinds"),
    [
        ([12], 4, 7, [0, 2, 3], set()),
        ([12], 4, 8, [0, 2, 3], {"window", "freed-block"}),
        ([12], 4, 6, [0, 2, 3], {"window"}),
        ([12], 3, 0, [1, 2, 3], {"window", "freed-block"}),
        ([11], 4, 7, [0, 2, 3], {"kv-length", "freed-block"}),
        ([12], 4, 7, [0, 5, 3], {"freed-block"}),
    ],
    ids=["right", "one too many", "one short", "no window", "length", "foreign block"],
)
def test_what_decode_calls_show(lengths: list[int], mode: int, pre: int, table: list[int], kinds: set[str]) -> None:
    """Request 0 has 12 tokens, a window of 8, blocks of 4: it owns blocks 2 and 3, the first was given back."""
    observer = Observer(caches({7: [0, 2, 3]}), {0: "SlidingWindow"}, {0: 8})
    tensor = torch.tensor([table], dtype=torch.int32)
    meta = types.SimpleNamespace(
        is_prefill=False, block_table={"SlidingWindow": tensor}, actual_seq_lengths_kv=torch.tensor([12])
    )
    observer.see([(0, call(lengths, mode, pre, tensor))], meta, [(0, 7, 5)])
    assert {f["kind"] for f in observer.to_json()["findings"]} == kinds


def test_the_table_of_another_group_is_seen() -> None:
    observer = Observer(caches({7: [1, 2, 3]}), {0: "FullAttention"}, {})
    tensor = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    other = torch.zeros(1, 3, dtype=torch.int32)
    meta = types.SimpleNamespace(
        is_prefill=False,
        block_table={"SlidingWindow": tensor, "FullAttention": other},
        actual_seq_lengths_kv=torch.tensor([12]),
    )
    observer.see([(0, call([12], 3, 0, tensor))], meta, [(0, 7, 5)])
    found = observer.to_json()["findings"][0]
    assert (found["kind"], found["group"], found["used"]) == ("wrong-table", "FullAttention", "SlidingWindow")


def test_weights_follow_from_seed_and_name() -> None:
    one = random_tensor("a.weight", (4, 8), 1)
    assert torch.equal(one, random_tensor("a.weight", (4, 8), 1))
    assert not torch.equal(one, random_tensor("b.weight", (4, 8), 1))
    assert not torch.equal(one, random_tensor("a.weight", (4, 8), 2))
    norm = random_tensor("input_layernorm.weight", (512,), 1)
    assert abs(float(norm.mean()) - 1) < 0.1 and float(norm.std()) > 0.1
    assert float(random_tensor("x.bias", (512,), 1).abs().max()) > 0.1


def test_standins_serve_only_what_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_text('{"packages": ["no_such_package_x", "json"], "removed_modules": ["email.no_such_part"]}')
    monkeypatch.setattr(standins, "_LIST", listed)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert standins.install_standins() == ["no_such_package_x", "email.no_such_part"]
    module = importlib.import_module("no_such_package_x.sub")
    thing = module.Thing.Other
    with pytest.raises(RuntimeError, match="stand-in"):
        thing()
    assert importlib.import_module("email.no_such_part").Name
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_missing_package")


def test_the_reference_is_softmax_attention() -> None:
    """Against torch's own, which shares no code with it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 6)
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4) & ~torch.ones(5, 9, dtype=torch.bool).tril(1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(2, 1).transpose(0, 1), v.repeat_interleave(2, 1).transpose(0, 1),
        attn_mask=mask, scale=0.3,
    )  # fmt: skip
    got = attention(q, k, v, 4, 0.3, window=3)
    assert torch.allclose(got.float(), wanted.transpose(0, 1), atol=1e-5)
    sunk = attention(q, k, v, 4, 0.3, sinks=torch.full((4,), 50.0))
    assert float(sunk.abs().max()) < 1e-6, "a large sink takes all the weight"
