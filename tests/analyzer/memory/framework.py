"""The memory plan beside a framework's own functions: used by the tests and by scripts/real/issue4.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from kvskill.analyzer.memory import CacheGeometry, Formulas, plan_memory, read_formulas
from kvskill.analyzer.target.classes import SourceTree
from kvskill.analyzer.yamls import RunSettings

CHILD = Path(__file__).with_name("framework_child.py")

F, S = "FullAttention", "SlidingWindow"
BF16 = "bfloat16"


def kv(layers: int, heads: int, dim: int, window: int | None = None, key: str | None = None) -> list[CacheGeometry]:
    kind = S if window else F
    return [CacheGeometry(n, key or kind, kind, layers, heads, dim, 2, window) for n in ("k_cache", "v_cache")]


def mla(layers: int, *, mtp: bool = False) -> list[CacheGeometry]:
    return [
        CacheGeometry(n, F, F, layers, 1, d, 2, None, split=False, mtp=mtp)
        for n, d in (("nope_cache", 512), ("rope_cache", 64))
    ]


# geometry of the published configs: gpt-oss-20b/120b, Qwen3-235B-A22B, DeepSeek-R1 with its MTP layer
MODELS: dict[str, list[CacheGeometry]] = {
    "gpt_oss_20b": kv(12, 8, 64, 128) + kv(12, 8, 64),
    "gpt_oss_120b": kv(18, 8, 64, 128) + kv(18, 8, 64),
    "qwen3_moe": kv(94, 4, 128),
    "deepseek_r1": mla(61) + mla(1, mtp=True),
}
RUNS = [
    RunSettings(batch_size=1, input_len=4096, max_new_tokens=100),
    RunSettings(batch_size=16, input_len=4096, max_new_tokens=256, world_size=16, attn_tp_size=16),
    RunSettings(batch_size=64, input_len=2047, max_new_tokens=33, world_size=16, attn_tp_size=2, block_size=64),
    RunSettings(batch_size=128, input_len=4060, max_new_tokens=36, world_size=128, next_n=1),
    RunSettings(batch_size=48, input_len=1, max_new_tokens=1, world_size=4, attn_tp_size=4, next_n=3, block_size=16),
]


def request(caches: list[CacheGeometry], run: RunSettings, formulas: Formulas) -> dict:
    live = [c for c in caches if run.next_n > 0 or not c.mtp]
    layers: list[list[dict]] = []
    for start in range(0, len(live), 2):
        pair = live[start : start + 2]
        one = [
            {
                "name": c.name,
                "attn_type": c.attn_type,
                "dim": c.dim,
                "num_head": c.heads_per_rank(run.attn_tp_size),
                "dtype": BF16,
                "window": c.window,
                "manager_key": c.group_key if c.group_key != c.attn_type else None,
            }
            for c in pair
        ]
        layers.extend([one] * pair[0].layers)
    return {
        "layers": layers,
        "run": {
            "batch_per_rank": run.batch_per_rank,
            "next_n": run.next_n,
            "block_size": run.block_size,
            "prefill_dp_group": run.prefill_dp_group,
            "max_total_len": formulas.total(run),
        },
    }


def compare(tree: Path, models: dict[str, list[CacheGeometry]] = MODELS, runs: list[RunSettings] = RUNS) -> list[str]:
    """Differences between the plan and the tree's own functions; empty when all are equal, byte for byte."""
    formulas = read_formulas(SourceTree(tree, "executor"))
    cases = [(n, c, r) for n, c in models.items() for r in runs]
    if formulas.partitions:
        cases.extend((n, c, replace(r, prefill_dp_group=2, batch_size=r.batch_size * 2)) for n, c, r in list(cases))
    payload = json.dumps([request(c, r, formulas) for _, c, r in cases])
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tree)],
        input=payload,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    if done.returncode:
        return [done.stderr[-800:]]
    wrong = []
    for (name, caches, run), own in zip(cases, json.loads(done.stdout), strict=True):
        plan = plan_memory(caches, run, formulas, None)
        if plan.blocks != own["blocks"] or plan.paged_bytes != own["bytes"]:
            wrong.append(f"{name} {run}: plan {plan.blocks} {plan.paged_bytes}, framework {own}")
    return wrong
