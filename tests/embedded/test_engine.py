"""What a model is given in prefill and decode, in every era; speculation; the Legacy models against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
HERE = Path(__file__).parent
PROMPTS = [[5, 7, 9, 11, 13], [8], [3, 4, 6], [10] * 6]
Tree = Callable[[str], Path]


def child(script: str, *args: str) -> Any:
    """Run a script of this folder; its last line is JSON."""
    result = subprocess.run([sys.executable, str(HERE / script), *args], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


BASE = {"paged": True, "next_n": 0, "exe_mode": "eager", "batch": 3, "prompts": PROMPTS, "steps": 9, "wrong": 0}
SPECULATION = [(1, 0), (1, 40), (2, 0), (3, 40)]
RUNS: dict[str, dict[str, Any]] = {
    "paged": {},
    "graph": {"exe_mode": "npugraph_ex"},
    "legacy": {"paged": False},
    "budget": {"max_prefill_tokens": 6},
    **{f"mtp{n}-{wrong}": {"next_n": n, "wrong": wrong} for n, wrong in SPECULATION},
}
PAGED_ERAS = ["2026-04", "2026-06", "2026-08"]


@pytest.fixture(scope="module")
def run(trees: Tree) -> Callable[[str, str], dict[str, Any]]:
    """(era, name of a run) -> what happened; one process per era."""
    done: dict[str, dict[str, Any]] = {}

    def get(era: str, name: str) -> dict[str, Any]:
        if era not in done:
            settings = json.dumps([{**BASE, **changes} for changes in RUNS.values()])
            done[era] = dict(zip(RUNS, child("run_engine.py", str(trees(era)), settings), strict=True))
        return done[era][name]

    return get


Run = Callable[[str, str], dict[str, Any]]


@pytest.mark.parametrize("era", PAGED_ERAS)
def test_metadata_of_a_paged_model(era: str, run: Run) -> None:
    out = run(era, "paged")
    assert out["right"] and out["free"] == [True]
    prefill, decode = out["seen"][0], out["seen"][1]
    assert prefill["is_prefill"] and prefill["mask_upper"]
    assert prefill["position_ids"] == [0, 1, 2, 3, 4, 0, 0, 1, 2]
    assert prefill["actual_seq_lengths_kv"]["values"] == [5, 1, 3]
    assert prefill["actual_seq_lengths_cu_q"]["values"] == [5, 6, 9]
    assert prefill["actual_seq_lengths_list_q"] is None and prefill["prompt_tokens"] == 9
    assert prefill["kwargs"] == []
    slots = prefill["slot_mapping"]["FullAttention"]
    assert slots["dtype"] == "torch.int64" and len(set(slots["values"])) == 9 and min(slots["values"]) >= 4
    table = prefill["block_table"]["FullAttention"]
    assert table["dtype"] == "torch.int32" and [len(row) for row in table["values"]] == [4, 4, 4]
    assert not decode["is_prefill"] and decode["mask_upper"] and decode["prompt_tokens"] == 0
    assert decode["kv_len"]["values"] == decode["position_ids"] == [5, 1, 3]
    assert decode["actual_seq_lengths_kv"]["values"] == [6, 2, 4]
    assert decode["actual_seq_lengths_cu_kv"]["values"] == [6, 8, 12]
    assert decode["actual_seq_lengths_q"]["values"] == [1, 1, 1]


@pytest.mark.parametrize(("era", "index"), [("2026-04", 1), ("2026-06", 0), ("2026-08", 0)])
def test_idle_rows_write_into_the_null_block(era: str, index: int, run: Run) -> None:
    last = [step for step in run(era, "paged")["seen"] if not step["is_prefill"]][-1]
    assert last["input_ids"][1:] == [0, 0]
    assert last["kv_len"]["values"][1:] == last["position_ids"][1:] == [index, index]
    assert last["slot_mapping"]["FullAttention"]["values"][1:] == [index, index]
    assert last["block_table"]["FullAttention"]["values"][1:] == [[0] * 4] * 2
    assert last["actual_seq_lengths_kv"]["values"][1:] == [index + 1, index + 1]


@pytest.mark.parametrize("era", PAGED_ERAS)
def test_warm_up_touches_the_null_block_only(era: str, run: Run) -> None:
    prefill, decode = run(era, "paged")["warm"]
    for step in (prefill, decode):
        assert max(step["slot_mapping"]["FullAttention"]["values"]) < 4
        assert step.get("is_warm_up", True)
    assert not run(era, "paged")["seen"][0].get("is_warm_up", False)


@pytest.mark.parametrize("era", PAGED_ERAS)
def test_host_lists_only_in_graph_decode(era: str, run: Run) -> None:
    prefill, decode = run(era, "graph")["seen"][:2]
    assert prefill["actual_seq_lengths_cu_list_q"] is None
    assert decode["actual_seq_lengths_list_kv"] == [6, 2, 4]
    assert decode["actual_seq_lengths_cu_list_q"] == [1, 2, 3]


@pytest.mark.parametrize("era", PAGED_ERAS)
def test_metadata_of_a_legacy_model(era: str, run: Run) -> None:
    out = run(era, "legacy")
    assert out["right"] and out["free"] == []
    prefill, decode = out["seen"][0], out["seen"][1]
    row = 6 + 9  # longest prompt + new tokens
    assert prefill["kv_len"]["values"] == [0, 1, 2, 3, 4, row, 2 * row, 2 * row + 1, 2 * row + 2]
    assert prefill["kwargs"] == ["request_offset"] and decode["kwargs"] == []
    assert prefill["block_table"] is None and decode["slot_mapping"] is None


@pytest.mark.parametrize("era", PAGED_ERAS)
def test_a_token_budget_splits_the_prefill(era: str, run: Run) -> None:
    out = run(era, "budget")
    assert out["right"]
    assert [s["actual_seq_lengths_q"]["values"] for s in out["seen"] if s["is_prefill"]] == [[5, 1], [3], [6]]


@pytest.mark.parametrize("era", PAGED_ERAS)
@pytest.mark.parametrize(("next_n", "wrong"), SPECULATION)
def test_speculation_generates_what_greedy_decoding_does(era: str, next_n: int, wrong: int, run: Run) -> None:
    out = run(era, f"mtp{next_n}-{wrong}")
    assert out["right"] and out["free"] == [True]
    per_step = [len(step["input_ids"]) for step in out["seen"] if not step["is_prefill"]]
    assert set(per_step) == {3 * (next_n + 1)}
    if not wrong:  # a prompt drafts one token only; after that every draft is accepted: next_n + 1 tokens per step
        assert len(out["results"]["0"]) == 1 + 2 + 8 * (next_n + 1)


@pytest.mark.parametrize(
    ("era", "model", "prompts", "steps"),
    [
        ("2026-03", "tiny_moe2d", [5, 3, 17], 8),
        ("2026-04", "tiny_dense", [5, 1, 17], 8),
        ("2026-06", "tiny_mixed", [5, 45], 20),
        ("2026-08", "tiny_dense", [5, 1, 17], 8),
    ],
)
def test_legacy_models_equal_transformers(era: str, model: str, prompts: list[int], steps: int, trees: Tree) -> None:
    out = child("run_legacy.py", str(trees(era)), model, json.dumps(prompts), str(steps))
    assert out["rows"] == len(prompts) * (steps + 1)
    assert out["worst"] < 1e-5
