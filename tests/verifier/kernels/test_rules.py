"""Every rule: a call that breaks exactly it, and the good call it was made from. Every rule has an entry here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

torch = pytest.importorskip("torch")

from kvskill.verifier.backend.context import OpContext  # noqa: E402
from kvskill.verifier.backend.schemas import load_table  # noqa: E402
from kvskill.verifier.kernels.errors import OperatorRuleViolation  # noqa: E402
from kvskill.verifier.kernels.rules.engine import broken_rules, check_call  # noqa: E402
from kvskill.verifier.kernels.rules.profile import load_profile, profile_names  # noqa: E402
from kvskill.verifier.kernels.rules.warnings import take_warnings  # noqa: E402

V1, V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
OLD, NEW, NEWEST = "cann-8.5-snapshot", "cann-9.0", "cann-9.1"
MAX = 2147483647
I32, I64 = torch.int32, torch.int64
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def z(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def hide(*shape):
    return torch.zeros(*shape, dtype=torch.bool)


def bound(op, **given):
    schema = torch._C.parse_schema("npu::" + load_table().schemas("2.13.0")[op])
    arguments = {a.name: a.default_value for a in schema.arguments}
    assert set(given) <= set(arguments), set(given) - set(arguments)
    return {**arguments, **given}


def tnd(d=128, dv=None, heads=4, kv=2, **more):
    """Unpaged TND prefill of 3 + 4 tokens."""
    return bound(V2, **{
        "query": z(7, heads, d), "key": z(7, kv, d), "value": z(7, kv, dv or d), "num_query_heads": heads,
        "num_key_value_heads": kv, "softmax_scale": 0.1, "input_layout": "TND", "actual_seq_qlen": [3, 7],
        "actual_seq_kvlen": [3, 7], "sparse_mode": 3, "atten_mask": MASK, **more,
    })  # fmt: skip


def paged(layout="TND", d=128, heads=4, kv=2, block=16, blocks=8, **more):
    """Paged decode of two sequences of 20 and 17 keys."""
    shape = {"TND": (2, heads, d), "BSH": (2, 1, heads * d), "BSND": (2, 1, heads, d), "BNSD": (2, heads, 1, d)}[layout]
    cache = z(blocks, block, kv * d)
    args = {
        "query": z(*shape), "key": cache, "value": cache, "num_query_heads": heads, "num_key_value_heads": kv,
        "softmax_scale": 0.1, "input_layout": layout, "actual_seq_kvlen": [20, 17], "block_size": block,
        "block_table": torch.tensor([[1, 2, 0], [3, 4, 0]], dtype=I32),
    }  # fmt: skip
    if layout == "TND":
        args.update(actual_seq_qlen=[1, 2], sparse_mode=3, atten_mask=MASK)
    return bound(V2, **{**args, **more})


def mla(layout="TND_NTD", heads=4, tokens=2, **more):
    """Absorbed decode: D = 512 + 64, paged ND."""
    if layout.startswith("TND"):
        q, r, lengths = z(tokens, heads, 512), z(tokens, heads, 64), {"actual_seq_qlen": [1, tokens]}
    else:
        q, r, lengths = z(2, tokens, heads, 512), z(2, tokens, heads, 64), {}
    cache = z(8, 16, 512)
    return bound(V2, **{
        "query": q, "key": cache, "value": cache, "query_rope": r, "key_rope": z(8, 16, 64), "num_query_heads": heads,
        "num_key_value_heads": 1, "softmax_scale": 0.1, "input_layout": layout, "actual_seq_kvlen": [20, 17],
        "block_table": torch.tensor([[1, 2], [3, 4]], dtype=I32), "block_size": 16, **lengths, **more,
    })  # fmt: skip


def dense(layout="BNSD", d=128, heads=4, kv=2, **more):
    """Unpaged BNSD prefill of two sequences of 6 tokens."""
    q = {"BNSD": (2, heads, 6, d), "BSND": (2, 6, heads, d), "BSH": (2, 6, heads * d)}[layout]
    k = {"BNSD": (2, kv, 6, d), "BSND": (2, 6, kv, d), "BSH": (2, 6, kv * d)}[layout]
    return bound(V2, **{
        "query": z(*q), "key": z(*k), "value": z(*k), "num_query_heads": heads, "num_key_value_heads": kv,
        "softmax_scale": 0.1, "input_layout": layout, "sparse_mode": 3, "atten_mask": MASK, **more,
    })  # fmt: skip


def sink(**more):
    return tnd(**{"learnable_sink": z(4), **more})


def nd(slots=(3, 0, 7), **more):
    return bound("npu_scatter_nd_update_", **{
        "input": z(8, 2, 4), "indices": torch.tensor(slots).view(-1, 1), "updates": z(3, 2, 4), **more
    })  # fmt: skip


def upd(**more):
    given = {"input": z(3, 8, 4), "indices": torch.tensor([1, 5], dtype=I32), "updates": z(2, 1, 4), "axis": 1}
    return bound("scatter_update_", **{**given, **more})


def pa(slots=(3, 0, 7), **more):
    return bound("npu_scatter_pa_kv_cache", **{
        "key": z(3, 2, 16), "value": z(3, 2, 16), "key_cache": z(2, 4, 2, 16), "value_cache": z(2, 4, 2, 16),
        "slot_mapping": torch.tensor(slots), "cache_mode": "Norm", **more,
    })  # fmt: skip


def kvn(slots=(3, 0), **more):
    return bound("npu_kv_rmsnorm_rope_cache_v2", **{
        "kv": z(2, 1, 1, 576), "gamma": z(512), "cos": z(2, 1, 1, 64), "sin": z(2, 1, 1, 64),
        "index": torch.tensor(slots), "k_cache": z(2, 4, 1, 64), "ckv_cache": z(2, 4, 1, 512), "epsilon": 1e-6,
        "cache_mode": "PA_NZ", **more,
    })  # fmt: skip


def prolog(slots=(3, 0), heads=2, dim=128, **more):
    return bound("npu_mla_prolog_v3", **{
        "token_x": z(2, 8), "weight_dq": z(8, 4), "weight_uq_qr": z(4, heads * (dim + 64)),
        "weight_uk": z(heads, dim, 512), "weight_dkv_kr": z(8, 576), "rmsnorm_gamma_cq": z(4),
        "rmsnorm_gamma_ckv": z(512), "rope_sin": z(2, 64), "rope_cos": z(2, 64), "kv_cache": z(2, 16, 1, 512),
        "kr_cache": z(2, 16, 1, 64), "cache_index": torch.tensor(slots), **more,
    })  # fmt: skip


def norm(**more):
    return bound("npu_rms_norm", **{"input": z(2, 8), "gamma": z(8), **more})


def rot(**more):
    return bound("npu_rotary_mul", **{"input": z(5, 2, 8), "r1": z(5, 1, 8), "r2": z(5, 1, 8), **more})


def pair(**more):
    given = {"query": z(5, 4, 128), "key": z(5, 2, 128), "cos": z(5, 1, 128), "sin": z(5, 1, 128), "layout": "TND"}
    return bound("npu_apply_rotary_pos_emb", **{**given, **more})


def inter(**more):
    return bound("npu_interleave_rope", **{"x": z(2, 4, 3, 64), "cos": z(2, 1, 3, 64), "sin": z(2, 1, 1, 64), **more})


def tbm(**more):
    return bound("npu_transpose_batchmatmul", **{"input": z(2, 3, 16), "weight": z(2, 16, 32), **more})


def gmm(**more):
    return bound("npu_grouped_matmul", **{
        "x": [z(6, 4)], "weight": [z(2, 4, 4)], "group_list": torch.tensor([2, 6]), "group_type": 0, "split_item": 3,
        **more,
    })  # fmt: skip


def moe(**more):
    given = {"x": z(2, 4), "expert_idx": z(2, 2, dtype=I32), "expert_num": 4}
    return bound("npu_moe_init_routing_v2", **{**given, **more})


def c(profile=NEW, **kw):
    return OpContext(profile=profile, **{"dtype": "bfloat16", "block_size": 128, **kw})


def view(*shape):
    """A non-contiguous tensor of this shape."""
    return z(*shape[:-1], shape[-1] * 2)[..., : shape[-1]]


# rule -> list of (operator, context, good arguments, broken arguments)
CASES = {
    "fa-layout": [(V2, c(), tnd(), tnd(input_layout="SH")), (V2, c(OLD), tnd(), tnd(input_layout="NTD"))],
    "fa-heads": [
        (V2, c(), tnd(), tnd(num_query_heads=1, num_key_value_heads=1)),
        (V2, c(), dense("BSH"), dense("BSH", num_query_heads=3)),
    ],
    "fa-head-ratio": [
        (V2, c(), tnd(), tnd(num_key_value_heads=3, key=z(7, 3, 128), value=z(7, 3, 128))),
        (V2, c(), tnd(heads=64, kv=1), tnd(heads=128, kv=1)),
    ],
    "fa-kv-heads": [
        (V2, c(), paged(), paged(num_key_value_heads=0)),
        (V2, c(), paged(), paged(num_key_value_heads=1)),
        (V2, c(), tnd(), tnd(num_key_value_heads=0)),
        (V2, c(), dense("BSH"), dense("BSH", num_key_value_heads=4)),
    ],
    "fa-rope-pair": [(V2, c(), mla(), mla(key_rope=None)), (V2, c(), tnd(), tnd(query_rope=z(7, 4, 64)))],
    "fa-rope-form": [
        (V2, c(), mla(), mla(query_rope=z(2, 4, 32))),
        (V2, c(), mla(), mla(key_rope=z(8, 16, 64, dtype=torch.bfloat16))),
        (V2, c(), mla(), mla(key_rope=z(7, 16, 64))),
    ],
    "fa-rope-dims": [
        (V2, c(), tnd(kv=4, query_rope=z(7, 4, 64), key_rope=z(7, 4, 64)),
         tnd(d=192, kv=4, query_rope=z(7, 4, 64), key_rope=z(7, 4, 64))),
        (V2, c(OLD), tnd(kv=4, query_rope=z(7, 4, 64), key_rope=z(7, 4, 64)),
         dense(kv=4, query_rope=z(2, 4, 6, 64), key_rope=z(2, 4, 6, 64))),
    ],
    "fa-key-dim": [(V2, c(), dense(), dense(value=z(2, 2, 6, 64)))],
    "fa-dim-limit": [(V2, c(), dense(), dense(d=80 + 8)), (V2, c(), dense(), dense(d=528))],
    "fa-packed-dims": [
        (V2, c(OLD), tnd(), tnd(d=256)), (V2, c(NEW), tnd(d=256), tnd(d=96)), (V2, c(NEW), tnd(d=64), tnd(d=512)),
    ],
    "fa-wide-value": [
        (V2, c(), tnd(d=192, kv=4), tnd(d=192)),
        (V2, c(), tnd(d=192, dv=128), tnd(d=192, kv=4, input_layout="NTD_TND", query=z(4, 7, 192), key=z(4, 7, 192),
                                          value=z(4, 7, 192))),
    ],
    "fa-dtype": [
        (V2, c(OLD), tnd(), (tnd(), c(OLD, dtype="float16"))),
        (V2, c(NEW, dtype="float16"), tnd(), (tnd(), c(NEW, dtype="float32"))),
        (V2, c(), tnd(), tnd(key=z(7, 2, 128, dtype=torch.bfloat16))),
    ],
    "fa-contiguous": [
        (V2, c(), tnd(), tnd(query=view(7, 4, 128))), (V2, c(), tnd(), tnd(value=view(7, 2, 128))),
        (V2, c(), mla(), mla(query_rope=view(2, 4, 64))),
    ],
    "fa-scale": [(V2, c(), tnd(), tnd(softmax_scale=1.0))],
    "fa-inner-precise": [
        (V2, c(), mla(), mla(inner_precise=2)), (V2, c(), paged("BSH"), paged("BSH", inner_precise=3)),
    ],
    "fa-lengths-needed": [
        (V2, c(), tnd(), tnd(actual_seq_qlen=None)), (V2, c(), tnd(), tnd(actual_seq_kvlen=None)),
        (V2, c(), paged("BSND"), paged("BSND", actual_seq_kvlen=None)),
    ],
    "fa-lengths-count": [
        (V2, c(), tnd(), tnd(actual_seq_kvlen=[7])), (V2, c(), dense(), dense(actual_seq_qlen=[])),
        (V2, c(), tnd(), tnd(actual_seq_qlen=[0] * 4095 + [3, 7], actual_seq_kvlen=[0] * 4095 + [3, 7])),
    ],
    "fa-lengths-order": [
        (V2, c(), tnd(), tnd(actual_seq_qlen=[8, 7])), (V2, c(), paged(), paged(actual_seq_kvlen=[20, -1])),
        (V2, c(), dense(), dense(actual_seq_qlen=[-1, 6])),
    ],
    "fa-query-total": [
        (V2, c(), tnd(), tnd(actual_seq_qlen=[3, 4])),  # plain instead of running
        (V2, c(), paged(), paged(actual_seq_qlen=[1, 1])),
    ],
    "fa-key-total": [(V2, c(), tnd(), tnd(actual_seq_kvlen=[3, 6]))],
    "fa-lengths-range": [
        (V2, c(), dense(), dense(actual_seq_qlen=[3, 9])), (V2, c(), dense(), dense(actual_seq_kvlen=[3, 9])),
    ],
    "fa-queries-fit": [(V2, c(), tnd(), tnd(key=z(6, 2, 128), value=z(6, 2, 128), actual_seq_kvlen=[2, 6]))],
    "fa-block-table": [
        (V2, c(), paged(), paged(block_table=torch.zeros(2, 3, dtype=I64))),
        (V2, c(), paged(), paged(block_table=torch.zeros(3, 3, dtype=I32))),
        (V2, c(), paged("BSH"), paged("BSH", block_table=torch.zeros(6, dtype=I32))),
    ],
    "fa-cache-rank": [
        (V2, c(), paged("BSND"), paged("BSND", key=z(8, 2, 16, 128), value=z(8, 2, 16, 128))),
        (V2, c(), paged("BNSD", key=z(8, 2, 16, 128), value=z(8, 2, 16, 128)),
         paged("BNSD", key=z(8, 2, 8, 16, 16), value=z(8, 2, 8, 16, 16))),
    ],
    "fa-block-size": [
        (V2, c(), paged(), paged(block_size=0)), (V2, c(), paged(), paged(block_size=128)),
        # a token-major 4-D cache, passed as is
        (V2, c(), paged(), paged(key=z(8, 16, 2, 128), value=z(8, 16, 2, 128), num_key_value_heads=2, kv=2)),
    ],
    "fa-caches-alike": [
        (V2, c(), paged(), paged(value=z(8, 2, 16, 128))), (V2, c(), paged(), paged(value=z(7, 16, 256))),
    ],
    "fa-cache-width": [
        (V2, c(), paged(heads=128, kv=128, block=16, blocks=5), paged(d=256, heads=256, kv=256, block=16, blocks=5))
    ],
    "fa-block-size-limit": [
        (V2, c(OLD), paged(), (paged(), c(OLD, block_size=16))), (V2, c(), paged(), (paged(), c(block_size=100))),
        (V2, c(), paged("BSH"), (paged("BSH"), c(block_size=1024))),
        (V2, c(OLD), mla(), (mla(), c(OLD, block_size=256))),
        (V2, c(), paged(), (paged(), c(block_size=2048))),
    ],
    "fa-table-width": [
        (V2, c(), paged(), paged(actual_seq_kvlen=[20, 49])), (V2, c(), mla(), mla(actual_seq_kvlen=[20, 37])),
    ],
    "fa-table-ids": [
        (V2, c(), paged(), paged(block_table=torch.tensor([[1, -1, 0], [3, 4, 0]], dtype=I32))),
        (V2, c(), paged(), paged(block_table=torch.tensor([[1, 2, 0], [3, 8, 0]], dtype=I32))),
    ],
    "fa-blocks-suffice": [
        (V2, c(OLD), paged(), paged(blocks=3, block_table=torch.tensor([[1, 2, 0], [1, 2, 0]], dtype=I32)))
    ],
    "fa-mode": [
        (V2, c(), tnd(), tnd(sparse_mode=2)), (V2, c(), dense(), dense(sparse_mode=5)),
        (V2, c(), mla(sparse_mode=4, atten_mask=MASK), mla(sparse_mode=1, atten_mask=MASK)),
        (V2, c(OLD), mla(), mla(sparse_mode=4, atten_mask=MASK)),
        (V2, c(OLD), mla("BSND", tokens=1), mla("BSND", tokens=1, sparse_mode=3, atten_mask=MASK)),
        (V2, c(OLD), mla("BSND", tokens=2, sparse_mode=3, atten_mask=MASK), mla("BSND", tokens=2)),
    ],
    "fa-mask-needed": [
        (V2, c(), tnd(), tnd(atten_mask=None)), (V2, c(), dense(), dense(sparse_mode=1, atten_mask=None)),
    ],
    "fa-mask-unwanted": [
        (V2, c(), tnd(sparse_mode=0, atten_mask=None), tnd(sparse_mode=0)), (V2, c(), mla(), mla(atten_mask=MASK)),
    ],
    "fa-mask-dtype": [
        (V2, c(), tnd(atten_mask=MASK.to(torch.int8)), tnd(atten_mask=MASK.to(torch.bfloat16))),
        (V2, c(), tnd(atten_mask=MASK.to(torch.uint8)), tnd(atten_mask=MASK.float())),
    ],
    "fa-mask-shape": [
        (V2, c(), tnd(), tnd(atten_mask=torch.ones(4096, 4096, dtype=torch.bool).triu(1))),
        (V2, c(), tnd(), tnd(atten_mask=torch.ones(7, 7, dtype=torch.bool).triu(1))),
        (V2, c(), dense(atten_mask=MASK[None, None]), mla(sparse_mode=3, atten_mask=MASK[None, None])),
    ],
    "fa-mask-contents": [
        (V2, c(), tnd(), tnd(atten_mask=~MASK)), (V2, c(), tnd(), tnd(atten_mask=MASK.T.contiguous())),
        (V2, c(), tnd(), tnd(atten_mask=torch.zeros(2048, 2048, dtype=torch.bool))),
        (V2, c(), tnd(), tnd(atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(0))),
    ],
    "fa-full-mask": [
        (V2, c(), dense(sparse_mode=0, atten_mask=hide(2, 1, 6, 6)), dense(sparse_mode=0, atten_mask=hide(5, 6))),
        (V2, c(), dense(sparse_mode=1, atten_mask=hide(1, 8, 8)), dense(sparse_mode=1, atten_mask=hide(3, 6, 6))),
        (V2, c(), paged("BSND", atten_mask=hide(2, 48)), paged("BSND", atten_mask=hide(2, 20))),
    ],
    "fa-mask-outside-band": [
        (V2, c(), dense(sparse_mode=0, atten_mask=torch.ones(6, 6, dtype=torch.bool).triu(1), next_tokens=0),
         dense(sparse_mode=0, atten_mask=torch.ones(6, 6, dtype=torch.bool).triu(1), next_tokens=0, pre_tokens=3))
    ],
    "fa-one-token-mask": [
        (V2, c(), paged("BSH"), paged("BSH", sparse_mode=3, atten_mask=MASK)),
        (V2, c(), paged("BNSD"), paged("BNSD", sparse_mode=4, atten_mask=MASK, next_tokens=0)),
    ],
    "fa-one-token-window": [(V2, c(), paged("BSH"), paged("BSH", pre_tokens=65535))],
    "fa-window-ignored": [
        (V2, c(), paged(sparse_mode=4, pre_tokens=15, next_tokens=0, d=128), paged(pre_tokens=15, next_tokens=0)),
        (V2, c(), paged("BNSD"), paged("BNSD", pre_tokens=15)),
    ],
    "fa-band": [
        (V2, c(), tnd(sparse_mode=4, pre_tokens=2, next_tokens=0), tnd(sparse_mode=4, pre_tokens=-1, next_tokens=0)),
        (V2, c(), tnd(sparse_mode=4, pre_tokens=2, next_tokens=0), tnd(sparse_mode=4, pre_tokens=5, next_tokens=-4)),
        (V2, c(), mla("BSND", heads=128, tokens=1, sparse_mode=4, pre_tokens=64, next_tokens=0, atten_mask=MASK),
         mla("BSND", heads=128, tokens=1, sparse_mode=4, pre_tokens=4096, next_tokens=0, atten_mask=MASK)),
    ],
    "fa-band-value-dim": [
        (V2, c(OLD), tnd(d=192, dv=128, sparse_mode=4, next_tokens=0), tnd(d=192, kv=4, sparse_mode=4, next_tokens=0))
    ],
    "fa-mla-heads": [
        (V2, c(), mla(), mla(heads=12)),
        (V2, c(), mla("BSND", heads=128, tokens=1, sparse_mode=4, pre_tokens=64, next_tokens=0, atten_mask=MASK),
         mla("BSND", heads=64, tokens=1, sparse_mode=4, pre_tokens=64, next_tokens=0, atten_mask=MASK)),
    ],
    "fa-mla-paged": [
        (V2, profile, mla(), mla("BSND", tokens=1, key=z(2, 20, 1, 512), value=z(2, 20, 1, 512),
                                 key_rope=z(2, 20, 1, 64), block_table=None, block_size=0))
        for profile in (c(OLD), c())
    ],
    "fa-mla-queries": [
        (V2, c(OLD), mla(sparse_mode=3, atten_mask=MASK, tokens=16, actual_seq_kvlen=[20, 20]),
         mla(sparse_mode=3, atten_mask=MASK, tokens=18, actual_seq_kvlen=[20, 20])),
        (V2, c(), mla(), mla(sparse_mode=3, atten_mask=MASK, tokens=18, actual_seq_kvlen=[20, 20])),
    ],
    "fa-mla-lengths": [(V2, c(), mla("BSND", tokens=1), mla("BSND", tokens=1, actual_seq_qlen=[1, 1]))],
    "fa-mla-lse": [(V2, c(OLD), mla(), mla(return_softmax_lse=True)), (V2, c(), mla(), mla(return_softmax_lse=True))],
    "fa-sink": [
        (V2, c(), sink(), sink(learnable_sink=z(2))), (V2, c(), sink(), (sink(), c(dtype="float16"))),
        (V2, c(), sink(), sink(d=192, dv=128)), (V2, c(), sink(), dense(learnable_sink=z(4))),
    ],
    "nd-update-form": [
        ("npu_scatter_nd_update_", c(), nd(), nd(updates=z(3, 8))),
        ("npu_scatter_nd_update_", c(), nd(), nd(indices=torch.tensor([3, 0, 7]))),
        ("npu_scatter_nd_update_", c(), nd(), nd(indices=torch.tensor([[3.0], [0.0], [7.0]]))),
        ("npu_scatter_nd_update_", c(), nd(), nd(updates=z(3, 2, 4, dtype=torch.bfloat16))),
    ],
    "nd-update-slots": [
        ("npu_scatter_nd_update_", c(), nd(), nd((3, 0, -1))), ("npu_scatter_nd_update_", c(), nd(), nd((3, 0, 8))),
        ("npu_scatter_nd_update_", c(), nd((0, 0, 7)), nd((3, 3, 7))),
        ("npu_scatter_nd_update_", c(null_slots=4), nd((3, 3, 7)), nd((7, 3, 7))),
    ],
    "update-form": [
        ("scatter_update_", c(), upd(), upd(axis=0)), ("scatter_update_", c(), upd(), upd(updates=z(2, 1, 5))),
        ("scatter_update_", c(), upd(), upd(indices=torch.tensor([1, 5, 2]))),
        ("scatter_update_", c(), upd(), upd(updates=z(2, 1, 4, dtype=torch.bfloat16))),
    ],
    "update-range": [
        ("scatter_update_", c(), upd(), upd(indices=torch.tensor([1, 8]))),
        ("scatter_update_", c(), upd(), upd(indices=torch.tensor([-1, 0]))),
    ],
    "pa-write-form": [
        ("npu_scatter_pa_kv_cache", c(), pa(), pa(cache_mode="PA_NZ", key_cache=z(2, 4, 4, 16))),
        ("npu_scatter_pa_kv_cache", c(), pa(), pa(key=view(3, 2, 16))),
        ("npu_scatter_pa_kv_cache", c(), pa(), pa(slot_mapping=torch.tensor([1, 2]))),
    ],
    "pa-write-slots": [
        ("npu_scatter_pa_kv_cache", c(), pa((3, -1, 7)), pa((3, 0, 8))),
        ("npu_scatter_pa_kv_cache", c(), pa((-1, -1, 7)), pa((3, 3, 7))),
    ],
    "norm-rope-form": [
        ("npu_kv_rmsnorm_rope_cache_v2", c(), kvn(), kvn(kv=z(2, 1, 1, 320))),
        ("npu_kv_rmsnorm_rope_cache_v2", c(), kvn(), kvn(cos=z(1, 1, 1, 64))),
        ("npu_kv_rmsnorm_rope_cache_v2", c(), kvn(), kvn(index=torch.tensor([3, 0], dtype=I32))),
        ("npu_kv_rmsnorm_rope_cache_v2", c(), kvn(), kvn(gamma=z(576))),
    ],
    "norm-rope-caches": [
        ("npu_kv_rmsnorm_rope_cache_v2", c(), kvn(), kvn(k_cache=z(2, 4, 1, 512), ckv_cache=z(2, 4, 1, 64))),
        ("npu_kv_rmsnorm_rope_cache_v2", c(), kvn(), kvn(index=torch.tensor([3]))),
    ],
    "norm-rope-slots": [
        ("npu_kv_rmsnorm_rope_cache_v2", c(), kvn((-1, -1)), kvn((3, 8))),
        ("npu_kv_rmsnorm_rope_cache_v2", c(), kvn((0, 0)), kvn((3, 3))),
    ],
    "norm-rope-epsilon": [("npu_kv_rmsnorm_rope_cache_v2", c(), kvn(), kvn(epsilon=1e-5))],
    "mla-prolog-form": [
        ("npu_mla_prolog_v3", c(), prolog(), prolog(heads=3)),
        ("npu_mla_prolog_v3", c(OLD), prolog(), prolog(dim=192)),
        ("npu_mla_prolog_v3", c(), prolog(dim=192), prolog(cache_index=torch.tensor([3, 0], dtype=I32))),
        ("npu_mla_prolog_v3", c(), prolog(), (prolog(), c(block_size=8))),
    ],
    "mla-prolog-slots": [("npu_mla_prolog_v3", c(), prolog(), prolog((3, 32)))],
    "norm-gamma": [
        ("npu_rms_norm", c(), norm(), norm(gamma=z(4))),
        ("npu_rms_norm", c(), norm(input=z(2, 8, dtype=torch.bfloat16)), norm(gamma=z(8, dtype=torch.bfloat16))),
    ],
    "rotary-mul": [
        ("npu_rotary_mul", c(), rot(), rot(r1=z(5, 8))), ("npu_rotary_mul", c(), rot(), rot(r1=z(5, 1, 4))),
        ("npu_rotary_mul", c(), rot(), rot(input=z(5, 2, 896), r1=z(5, 1, 896), r2=z(5, 1, 896))),
    ],
    "rotary-pair": [
        ("npu_apply_rotary_pos_emb", c(), pair(), pair(layout="BSH")),
        ("npu_apply_rotary_pos_emb", c(), pair(), pair(cos=z(5, 1, 64))),
        ("npu_apply_rotary_pos_emb", c(), pair(), pair(cos=z(4, 1, 128))),
        ("npu_apply_rotary_pos_emb", c(), pair(), pair(layout="BSND")),
        ("npu_apply_rotary_pos_emb", c(), pair(), pair(rotary_mode="interleave")),
    ],
    "interleave-rope": [
        ("npu_interleave_rope", c(), inter(), inter(x=z(2, 4, 3, 128))),
        ("npu_interleave_rope", c(), inter(), inter(cos=z(2, 1, 2, 64))),
    ],
    "transpose-batchmatmul": [
        ("npu_transpose_batchmatmul", c(), tbm(), tbm(input=z(2, 3, 8), weight=z(2, 8, 32))),
        ("npu_transpose_batchmatmul", c(), tbm(), tbm(bias=z(32))),
        ("npu_transpose_batchmatmul", c(), tbm(), tbm(input=z(3, 2, 16))),
    ],
    "group-list": [
        ("npu_grouped_matmul", c(), gmm(), gmm(group_list=torch.tensor([4, 2]))),
        ("npu_grouped_matmul", c(), gmm(), gmm(group_list=torch.tensor([2, 6], dtype=I32))),
        ("npu_grouped_matmul", c(), gmm(), gmm(group_list_type=1)),
    ],
    "expert-ids": [("npu_moe_init_routing_v2", c(), moe(), moe(expert_idx=z(2, 2, dtype=I64)))],
}  # fmt: skip
ROWS = [(rule, n, *row) for rule, rows in CASES.items() for n, row in enumerate(rows)]


@pytest.mark.parametrize(("rule", "n", "op", "context", "good", "bad"), ROWS, ids=[f"{r[0]}-{r[1]}" for r in ROWS])
def test_rule(rule, n, op, context, good, bad):
    assert [h.rule for _, h in broken_rules(op, good, context)] == []
    if isinstance(bad, tuple):
        bad, context = bad
    hits = broken_rules(op, bad, context)
    assert rule in [h.rule for _, h in hits], [str(h) for _, h in hits]
    found, hit = next(p for p in hits if p[0].id == rule)
    assert hit.source and hit.message and "{" not in hit.message and hit.profile == context.profile
    if found.level == "error":
        with pytest.raises(OperatorRuleViolation) as caught:
            check_call(op, bad, context)
        assert rule in [h.rule for h in caught.value.hits] and hit.source in str(caught.value)
    else:
        take_warnings()
        if len(hits) == 1:
            check_call(op, bad, context)
            assert [h.rule for h in take_warnings()] == [rule]
        with pytest.raises(OperatorRuleViolation):
            check_call(op, bad, replace(context, strict=True))
    rest = [h for _, h in broken_rules(op, bad, replace(context, waive=frozenset({rule})))]
    assert rule not in [h.rule for h in rest]


def test_every_rule_of_every_profile_is_tested():
    for name in profile_names():
        assert {r.id for r in load_profile(name).rules} <= set(CASES), name


def test_profiles_and_their_sources():
    assert profile_names() == (OLD, NEW, NEWEST)
    for name in profile_names():
        for rule in load_profile(name).rules:
            assert rule.source and rule.ops and re.fullmatch(r"KV4[5-7]\d", rule.code)
    assert "fa-blocks-suffice" in load_profile(NEW).removed
    with pytest.raises(KeyError, match="cann-9"):
        load_profile("cann-0")


def test_profiles_differ_where_versions_do():
    wide = tnd(d=256, sparse_mode=4, pre_tokens=7, next_tokens=0)
    assert [h.rule for _, h in broken_rules(V2, wide, c(OLD))] == ["fa-packed-dims", "fa-band-value-dim"]
    assert broken_rules(V2, wide, c(NEW)) == []
    half = replace(c(NEW), dtype="float16")
    assert broken_rules(V2, tnd(), half) == [] and broken_rules(V2, tnd(), replace(half, profile=OLD))
    view_call = tnd(value=view(7, 2, 128))
    check_call(V2, view_call, c(NEW))  # a warning there
    with pytest.raises(OperatorRuleViolation, match="contiguous"):
        check_call(V2, view_call, c(NEWEST))


def test_float32_and_small_blocks_are_judged_as_deployed():
    assert broken_rules(V2, paged(block=4, blocks=16, actual_seq_kvlen=[8, 8]), c(block_size=128)) == []
    undeclared = OpContext(profile=NEW)  # no deployed block size: the call's own counts
    small = paged(block=4, actual_seq_kvlen=[8, 8])
    assert [h.rule for _, h in broken_rules(V2, small, undeclared)] == ["fa-block-size-limit"]
    narrow = {n: v.to(torch.float16) if n in ("query", "key", "value") else v for n, v in tnd().items()}
    assert [h.rule for _, h in broken_rules(V2, narrow, c(OLD))] == ["fa-dtype"]  # a real float16 stays one


def test_early_rules_stop_the_later_ones():
    hits = broken_rules(V2, tnd(actual_seq_qlen=[3, 4], softmax_scale=1.0), c())
    assert [h.rule for _, h in hits] == ["fa-query-total"]


def test_version_one_names():
    call = bound(V1, query=z(7, 4, 128), key=z(7, 2, 128), value=z(7, 2, 128), input_layout="TND")
    assert "num_heads is 1" in str(broken_rules(V1, call, c())[0][1])


def test_mask_contents_are_checked_again_after_a_change():
    mask = MASK.clone()
    assert broken_rules(V2, tnd(atten_mask=mask), c()) == []
    mask[0, 0] = True
    assert [h.rule for _, h in broken_rules(V2, tnd(atten_mask=mask), c())] == ["fa-mask-contents"]


def test_codes_are_registered_with_a_page():
    root = Path(__file__).resolve().parents[3]
    registry = yaml.safe_load((root / "references/rules/registry.yaml").read_text(encoding="utf-8"))
    for name in profile_names():
        for rule in load_profile(name).rules:
            assert rule.code in registry
            assert (root / f"references/rules/{rule.code}.md").is_file()


def test_silent_rules_are_those_that_no_device_checks():
    silent = {r.id for r in load_profile(NEW).rules if r.silent}
    assert {"fa-mask-contents", "fa-table-ids", "nd-update-slots", "fa-one-token-mask", "fa-scale"} <= silent
    assert not {"fa-packed-dims", "fa-query-total", "fa-mask-dtype", "fa-block-size"} & silent
    (_, hit), *_ = broken_rules(V2, tnd(atten_mask=~MASK), c())
    assert hit.rule == "fa-mask-contents" and hit.silent


def test_noted_rules_do_not_raise():
    noted = replace(c(), note=frozenset({"fa-mask-contents"}))
    take_warnings()
    check_call(V2, tnd(atten_mask=~MASK), noted)
    assert [h.rule for h in take_warnings()] == ["fa-mask-contents"]
    with pytest.raises(OperatorRuleViolation, match="fa-query-total"):
        check_call(V2, tnd(atten_mask=~MASK, actual_seq_qlen=[3, 4]), noted)
