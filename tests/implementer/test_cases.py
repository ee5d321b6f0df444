"""Every case folder: converted or refused as it says, twice is once, in three API eras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvskill.diagnostics import ExitCode, Refusal

FOLDER = Path(__file__).resolve().parents[1] / "cases"
CASES = {
    path.parent.name: yaml.safe_load(path.read_text(encoding="utf-8"))["expect"]
    for path in sorted(FOLDER.glob("*/case.yaml"))
}


def outcome(b: Any) -> str:
    try:
        b.analyze()
        return str(b.apply().status)
    except Refusal:
        return "refused"


@pytest.mark.parametrize("name", sorted(CASES))
def test_case(case_bench: Callable[..., Any], name: str) -> None:
    expect, b = CASES[name], case_bench(name)
    files = {p: p.read_bytes() for p in sorted((b.folder / "models").glob("*.py"))}
    status = outcome(b)
    if expect != "convert":
        assert status in ("refused", "legacy-kept", "nothing-to-do"), status
        assert {p: p.read_bytes() for p in files} == files, "a refusal writes nothing"
        return
    assert status == "converted"
    after = {p: p.read_bytes() for p in files}
    assert after != files
    b.analyze()
    again = b.apply()
    assert (again.status, again.exit_code) == ("nothing-to-do", ExitCode.DONE)
    assert {p: p.read_bytes() for p in files} == after


@pytest.mark.parametrize("era", ["2026-06", "2026-08"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gptoss", "granite"])
def test_later_eras(case_bench: Callable[..., Any], name: str, era: str) -> None:
    b = case_bench(name, era)
    assert outcome(b) == "converted"
    text = Path(b.modeling).read_text(encoding="utf-8")
    assert "block_size=" in text.split("CacheEntry(", 2)[1] or "replace(entry" in text


# a prefill whose tokens see later ones: no mask, a flag that is off, a mask of equalities, an in-place mask left out
BIDIRECTIONAL = {
    "no mask": ("qwen3_a3b", "mask = ~forward_metadata.attention_mask[:q_len, :q_len]", "mask = None"),
    "flag off": ("llama", "is_causal=forward_metadata.is_prefill", "is_causal=False"),
    "flag in a helper": ("glm4", "key, value, is_causal=True)", "key, value, is_causal=False)"),
    "equalities": (
        "gpt_neox",
        "forward_metadata.attention_mask[:q_len, :q_len]",
        "torch.arange(q_len, device=hidden_states.device)[None, :] == q_len",
    ),
    "triangle with one later token": ("phi3", "device=qkv.device).tril()", "device=qkv.device).tril(1)"),
    "triangle that hides the token itself": (
        "phi4_mini",
        "device=weights.device).triu(1)",
        "device=weights.device).triu()",
    ),
    "later start of a triangle": ("olmo2", "torch.triu(mask, diagonal=1)", "torch.triu(mask, diagonal=2)"),
    "comparison that hides the token itself": ("gptoss", "kv_idx <= q_idx}", "kv_idx < q_idx}"),
    "the same as what is hidden": ("exaone4", "hidden = kv_pos > q_pos", "hidden = kv_pos >= q_pos"),
    "in place": ("glm4_moe", "forward_metadata.attention_mask[:q_len, :q_len], float", "attn_mask != 0, float"),
}


@pytest.mark.parametrize("kind", sorted(BIDIRECTIONAL))
def test_attention_to_later_tokens_is_refused(case_bench: Callable[..., Any], kind: str) -> None:
    name, old, new = BIDIRECTIONAL[kind]
    b = case_bench(name)
    b.edit(old, new)
    before = b.modeling.read_bytes()
    b.analyze()
    with pytest.raises(Refusal) as caught:
        b.apply()
    assert "KV299" in str(caught.value.findings)
    assert b.modeling.read_bytes() == before


# a mask that the layers carry in **kwargs: with its reader gone it is built and passed for nothing
STARS = "hidden_states = residual + self.self_attn(hidden_states=hidden_states, **kwargs)"


def test_arguments_that_end_unread_in_star_kwargs_go(case_bench: Callable[..., Any]) -> None:
    text = case_bench("gptoss").convert()
    assert "attention_mask=causal" not in text and "write_index" not in text
    assert "= self._build_masks(" not in text, "[T, T] masks of a packed prefill would still be built"


def test_arguments_that_somebody_reads_from_star_kwargs_stay(case_bench: Callable[..., Any]) -> None:
    b = case_bench("gptoss")
    b.edit(STARS, f'{STARS}\n        self.seen = kwargs.get("attention_mask") is not None')
    text = b.convert()
    assert "attention_mask=causal_mask_mapping" in text and "= self._build_masks(" in text
