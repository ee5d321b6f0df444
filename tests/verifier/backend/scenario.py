"""Runs in a child process: install a backend, call every kernel through the dispatcher, write what came out.

usage: scenario.py KIND OUT.json [opcheck test ...]
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from kvskill.verifier.backend import OpContext, install, record_calls

KIND, OUT = sys.argv[1], sys.argv[2]
INFO = install(KIND, context=OpContext(profile="cann-9.0", dtype="bfloat16", block_size=128))  # type: ignore[arg-type]

import torch  # noqa: E402
import torch_npu  # noqa: E402

OPS = torch.ops.npu
I32, I64 = torch.int32, torch.int64


def rnd(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ints(values: Any, dtype: Any = I64) -> Any:
    return torch.tensor(values, dtype=dtype)


MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
TABLE = ints([[1, 2, 0], [3, 4, 0]], I32)


def fa2(**more: Any) -> Any:
    kw = {
        "num_query_heads": 4, "num_key_value_heads": 2, "softmax_scale": 0.125, "input_layout": "TND",
        "actual_seq_qlen": [3, 7], "actual_seq_kvlen": [3, 7], "sparse_mode": 4, "pre_tokens": 1, "next_tokens": 0,
        "atten_mask": MASK, "learnable_sink": rnd(4), "return_softmax_lse": True, **more,
    }  # fmt: skip
    return (rnd(7, 4, 64), rnd(7, 2, 64), rnd(7, 2, 64, seed=1)), kw


def fa1(**more: Any) -> Any:
    kw = {
        "num_heads": 4, "num_key_value_heads": 2, "scale": 0.125, "input_layout": "TND", "sparse_mode": 3,
        "actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [20, 17], "atten_mask": MASK, "block_table": TABLE,
        "block_size": 16, **more,
    }  # fmt: skip
    return (rnd(2, 4, 64), rnd(6, 16, 128), rnd(6, 16, 128, seed=1)), kw


def kvn(**more: Any) -> Any:
    args = (rnd(2, 1, 1, 576), rnd(512), rnd(2, 1, 1, 64), rnd(2, 1, 1, 64, seed=1), ints([3, 0]), rnd(2, 4, 1, 64),
            rnd(2, 4, 1, 512))  # fmt: skip
    return args, {"epsilon": 1e-6, "cache_mode": "PA_NZ", "is_output_kv": True, **more}


def prolog() -> Any:
    shapes = ((2, 8), (8, 4), (4, 2 * 192), (2, 128, 512), (8, 576), (4,), (512,), (2, 64), (2, 64), (2, 16, 1, 512),
              (2, 16, 1, 64))  # fmt: skip
    # the wheel's Meta kernel always says bf16
    return tuple(rnd(*s).bfloat16() for s in shapes), {"cache_index": ints([3, 17]), "cache_mode": "PA_NZ"}


def gather() -> Any:
    cache = rnd(4, 3, 2, 8)
    return (cache, cache * 2, ints([[2, 1], [3, 0]], I32), ints([4, 2], I32), rnd(6, 2, 8), rnd(6, 2, 8)), {}


def pa() -> Any:
    return (rnd(3, 2, 16), rnd(3, 2, 16, seed=1), rnd(2, 4, 2, 16), rnd(2, 4, 2, 16, seed=1), ints([3, 0, 7])), {
        "cache_mode": "Norm"
    }


EXPERTS = ints([[1, 0], [0, 2], [2, 1]], I32)
DISPATCH = ("g", 1, 0, 4)


def combine() -> Any:
    out = OPS.npu_moe_distribute_dispatch_v2(rnd(3, 8).bfloat16(), EXPERTS, *DISPATCH)
    return (out[0], EXPERTS, out[2], out[4], rnd(3, 2).abs(), *DISPATCH), {}


# operator -> function that makes (args, kwargs); every kernel must be here
SAMPLES: dict[str, Any] = {
    "npu_fused_infer_attention_score": fa1,
    "npu_fused_infer_attention_score_v2": fa2,
    "npu_fused_infer_attention_score.out": lambda: (fa1()[0], {**fa1()[1], "out": [rnd(2, 4, 64), rnd(1)]}),
    "npu_fused_infer_attention_score_v2.out": lambda: (fa2()[0], {**fa2()[1], "out": [rnd(7, 4, 64), rnd(7, 4, 1)]}),
    "npu_prompt_flash_attention": lambda: (
        (rnd(2, 4, 3, 16), rnd(2, 2, 3, 16), rnd(2, 2, 3, 16, seed=1)),
        {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "sparse_mode": 3, "atten_mask": MASK},
    ),
    "npu_incre_flash_attention": lambda: (
        (rnd(2, 4, 1, 16), rnd(2, 2, 3, 16), rnd(2, 2, 3, 16, seed=1)),
        {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "actual_seq_lengths": [2, 3]},
    ),
    "npu_fusion_attention": lambda: (
        (rnd(2, 3, 64), rnd(2, 3, 32), rnd(2, 3, 32, seed=1), 4, "BSH"),
        {"scale": 0.25, "sparse_mode": 3, "atten_mask": MASK},
    ),
    "scatter_update_": lambda: ((rnd(3, 8, 4), ints([1, 5], I32), rnd(2, 1, 4), 1), {}),
    "scatter_update": lambda: ((rnd(3, 8, 4), ints([1, 5], I32), rnd(2, 1, 4), -2), {}),
    "npu_scatter_nd_update_": lambda: ((rnd(8, 2, 4), ints([[3], [0], [7]]), rnd(3, 2, 4)), {}),
    "npu_scatter_nd_update": lambda: ((rnd(8, 2, 4), ints([[3], [0], [7]]), rnd(3, 2, 4)), {}),
    "npu_scatter_pa_kv_cache": pa,
    "npu_scatter_pa_kv_cache_functional": pa,
    "npu_gather_pa_kv_cache": gather,
    "npu_gather_pa_kv_cache_functional": gather,
    "npu_kv_rmsnorm_rope_cache": kvn,
    "npu_kv_rmsnorm_rope_cache_v2": kvn,
    "npu_kv_rmsnorm_rope_cache_v2_functional": kvn,
    "npu_mla_prolog_v3": prolog,
    "npu_mla_prolog_v3_functional": prolog,
    "npu_rms_norm": lambda: ((rnd(3, 8), rnd(8), 1e-5), {}),
    "npu_gemma_rms_norm": lambda: ((rnd(3, 8), rnd(8)), {}),
    "npu_add_rms_norm": lambda: ((rnd(3, 8), rnd(3, 8, seed=1), rnd(8)), {}),
    "npu_add_rms_norm_cast": lambda: ((rnd(3, 8).bfloat16(), rnd(3, 8, seed=1).bfloat16(), rnd(8).bfloat16()), {}),
    "npu_add_rms_norm_v2": lambda: ((rnd(3, 8), rnd(3, 8, seed=1), rnd(8)), {}),
    "npu_add_rms_norm_v2_functional": lambda: ((rnd(3, 8), rnd(3, 8, seed=1), rnd(8)), {}),
    "npu_rotary_mul": lambda: ((rnd(5, 2, 8), rnd(5, 1, 8), rnd(5, 1, 8, seed=1)), {}),
    "npu_apply_rotary_pos_emb": lambda: (
        (rnd(5, 4, 64), rnd(5, 2, 64), rnd(5, 1, 64), rnd(5, 1, 64, seed=1), "TND"), {}
    ),
    "npu_interleave_rope": lambda: ((rnd(2, 4, 3, 64), rnd(2, 1, 3, 64), rnd(2, 1, 3, 64, seed=1)), {}),
    "npu_swiglu": lambda: ((rnd(3, 8),), {}),
    "npu_geglu": lambda: ((rnd(3, 8),), {}),
    "npu_silu": lambda: ((rnd(3, 8),), {}),
    "npu_silu_": lambda: ((rnd(3, 8),), {}),
    "npu_gelu": lambda: ((rnd(3, 8),), {"approximate": "tanh"}),
    "npu_gelu_mul": lambda: ((rnd(3, 8),), {}),
    "fast_gelu": lambda: ((rnd(3, 8),), {}),
    "npu_fast_gelu": lambda: ((rnd(3, 8),), {}),
    "npu_clipped_swiglu": lambda: ((rnd(3, 8) * 5,), {"limit": 2.0}),
    "npu_scaled_masked_softmax": lambda: ((rnd(1, 2, 32, 32), rnd(1, 1, 32, 32) > 1, 0.5), {}),
    "npu_attn_softmax_": lambda: ((rnd(3, 8),), {}),
    "npu_transpose_batchmatmul": lambda: ((rnd(2, 3, 16), rnd(2, 16, 32)), {}),
    "npu_grouped_matmul": lambda: (
        ([rnd(6, 4)], [rnd(2, 4, 8)]), {"group_list": ints([2, 6]), "group_type": 0, "split_item": 3}
    ),
    "npu_grouped_matmul.List": lambda: (
        ([rnd(6, 4)], [rnd(4, 8), rnd(4, 8, seed=1)]), {"group_list": [2, 6], "group_type": 0, "split_item": 3}
    ),
    "npu_moe_gating_top_k_softmax": lambda: ((rnd(3, 4), None, 2), {}),
    "npu_moe_gating_top_k_softmax_v2": lambda: ((rnd(3, 4),), {"k": 2, "renorm": 1}),
    "npu_moe_gating_top_k": lambda: ((rnd(3, 8), 2), {"bias": rnd(8), "norm_type": 1, "k_group": 1, "group_count": 2}),
    "npu_moe_init_routing": lambda: ((rnd(3, 8), ints([[0, 3], [1, 4], [2, 5]], I32), EXPERTS, 3), {}),
    "npu_moe_init_routing_v2": lambda: (
        (rnd(3, 8), EXPERTS),
        {"expert_num": 3, "active_expert_range": [0, 3], "expert_tokens_num_type": 1, "expert_tokens_num_flag": True},
    ),
    "npu_moe_compute_expert_tokens": lambda: ((ints([0, 0, 1, 2], I32), 3), {}),
    "npu_moe_finalize_routing": lambda: (
        (rnd(6, 8), None, None, None, rnd(3, 2), ints([2, 0, 1, 4, 5, 3], I32), None), {"drop_pad_mode": 2}
    ),
    "npu_moe_re_routing": lambda: ((rnd(6, 4), ints([[1, 2], [2, 1]])), {"per_token_scales": rnd(6)}),
    "npu_moe_token_permute": lambda: ((rnd(3, 8), EXPERTS), {}),
    "npu_moe_token_unpermute": lambda: ((rnd(6, 8), ints([2, 0, 1, 4, 5, 3], I32), rnd(3, 2)), {}),
    "npu_moe_distribute_dispatch_v2": lambda: ((rnd(3, 8).bfloat16(), EXPERTS, *DISPATCH), {}),
    "npu_moe_distribute_combine_v2": combine,
    "npu_format_cast": lambda: ((rnd(3, 4), 29), {}),
    "npu_format_cast.Tensor": lambda: ((rnd(3, 4), rnd(2, 2)), {}),
    "npu_format_cast_": lambda: ((rnd(3, 4), rnd(2, 2)), {}),
    "npu_format_cast_.acl_format": lambda: ((rnd(3, 4), 29), {}),
    "get_npu_format": lambda: ((rnd(3, 4),), {}),
    "npu_dtype_cast": lambda: ((rnd(3, 4), torch.bfloat16), {}),
    "npu_dtype_cast_": lambda: ((rnd(3, 4), rnd(3, 4)), {}),
    "npu_prefetch": lambda: ((rnd(3, 4), None, 10), {}),
    "npu_dynamic_quant": lambda: ((rnd(3, 8),), {}),
    "npu_quant_matmul": lambda: (
        (ints([[1, -2], [3, 4]], torch.int8), ints([[5, 6], [7, -8]], torch.int8), rnd(2).abs()),
        {"pertoken_scale": rnd(2).abs(), "output_dtype": torch.bfloat16},
    ),
    "npu_dequant_swiglu_quant": lambda: (
        (ints([[1, 2, 3, 4]], I32),),
        {"weight_scale": rnd(1, 4).abs(), "activation_scale": rnd(1).abs(), "quant_mode": 1, "activate_left": True},
    ),
}


def overload(name: str) -> Any:
    base, _, rest = name.partition(".")
    return getattr(getattr(OPS, base), rest or "default")


def digest(values: Any) -> list[Any]:
    """Shape, dtype and a hash of the bytes of every tensor, other values as text."""
    flat = values if isinstance(values, (list, tuple)) else [values]
    found = []
    for value in flat:
        if isinstance(value, (list, tuple)):
            found.extend(digest(value))
        elif isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().flatten().view(torch.uint8) if value.numel() else value
            code = hashlib.sha256(bytes(raw.tolist())).hexdigest()[:16] if value.numel() else ""
            found.append([list(value.shape), str(value.dtype), code])
        else:
            found.append(repr(value))
    return found


def outcome(make: Any) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def binder_cases() -> dict[str, str]:
    """What the eager binder takes for SymInt[] and what it refuses, on v2 of the attention operator."""
    (q, k, v), kw = fa2()
    fa = OPS.npu_fused_infer_attention_score_v2

    def with_lengths(lengths: Any) -> Any:
        return lambda: fa(q, k, v, **{**kw, "actual_seq_qlen": lengths})

    return {
        "list": outcome(with_lengths([3, 7])),
        "tuple": outcome(with_lengths((3, 7))),
        "int32 tensor": outcome(with_lengths(ints([3, 7], I32))),
        "int64 tensor": outcome(with_lengths(ints([3, 7]))),
        "list of 0-d tensors": outcome(with_lengths([ints(3), ints(7)])),
        "float tensor": outcome(with_lengths(torch.tensor([3.0, 7.0]))),
        "0-d tensor": outcome(with_lengths(ints(7))),
        "unknown keyword": outcome(lambda: fa(q, k, v, **kw, scale=1.0)),
        "missing value": outcome(lambda: fa(q, k, **kw)),
        "too many positional": outcome(lambda: fa(q, k, v, None, **kw)),
        "v1 keywords": outcome(lambda: OPS.npu_fused_infer_attention_score(q, k, v, softmax_scale=1.0)),
        "text as int": outcome(lambda: fa(q, k, v, **{**kw, "sparse_mode": "3"})),
        "no kernel": outcome(lambda: OPS.npu_lightning_indexer(q, k, v)),
        "not modelled": outcome(lambda: fa(q, k, v, **kw, query_quant_mode=3)),
        "broken rule": outcome(lambda: fa(q, k, v, **{**kw, "actual_seq_qlen": [3, 4]})),
    }


def main() -> None:
    from kvskill.verifier.backend.schemas import load_table
    from kvskill.verifier.kernels.registry import load_kernels

    result: dict[str, Any] = {"info": INFO.to_json(), "kernels": sorted(load_kernels()), "samples": sorted(SAMPLES)}
    result["schemas"] = {n: str(overload(n)._schema) for n in load_table().schemas("2.13.0")}
    result["results"] = {}
    for name, make in SAMPLES.items():
        args, kwargs = make()
        with torch.inference_mode(), record_calls() as calls:
            out = overload(name)(*args, **kwargs)
        assert [c.op for c in calls] == [name], name
        packet = getattr(torch_npu, name.split(".")[0])(*make()[0], **make()[1]) if name in _PLAIN else None
        result["results"][name] = {"out": digest(out), "inputs": digest([*args, *kwargs.values()])}
        if packet is not None:
            assert digest(packet) == digest(out), name
    result["binder"] = binder_cases()
    result["opcheck"] = {n: opcheck(n, sys.argv[3:]) for n in SAMPLES} if sys.argv[3:] else {}
    Path(OUT).write_text(json.dumps(result), encoding="utf-8")


# also called as torch_npu.X
_PLAIN = {
    "npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_moe_init_routing_v2", "npu_fused_infer_attention_score_v2",
}  # fmt: skip


def opcheck(name: str, tests: list[str]) -> dict[str, str]:
    """Verdict of torch.library.opcheck on schema (mutation, aliasing) and fake tensors (Meta kernel)."""
    verdicts = {}
    for test in tests:
        args, kwargs = SAMPLES[name]()
        try:
            torch.library.opcheck(overload(name), args, kwargs, test_utils=test)
            verdicts[test] = "ok"
        except Exception as error:
            verdicts[test] = f"{type(error).__name__}: {str(error)[-400:]}"
    return verdicts


if __name__ == "__main__":
    main()
