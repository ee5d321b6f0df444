"""Renders templates with the names of the packaged example contexts, varied by a case. Imports no torch."""

from __future__ import annotations

from typing import Any

from kvskill.opsinfo.templates import default_context, has_context, render_template

__all__ = ["STANDALONE", "render_case", "variants"]

_LOCALS = (
    "rows",
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "slots",
    "kv_lengths",
    "table",
    "block_size",
    "packed",
)
# standalone templates: names of the harness in verifier/child/template_cases.py
STANDALONE: dict[str, Any] = {
    "fa_version": 2,
    "window_rule": "hf",
    "n": {name: name for name in _LOCALS},
    "rows": "query_states.shape[0]",
    "cols": "query_states.shape[1]",
    "q": "query_states.flatten(0, 1)",
    "k": "key_states.flatten(0, 1)",
    "v": "value_states.flatten(0, 1)",
    "k_cache": "self.k_cache",
    "v_cache": "self.v_cache",
    "meta": "forward_metadata",
    "torch": "torch",
    "heads": "self.num_heads_per_rank",
    "kv_heads": "self.num_key_value_heads_per_rank",
    "k_dim": "self.head_dim",
    "v_dim": "self.head_dim",
    "scale": "self.scaling",
    "sinks": None,
    "sliding": None,
    "window": "self.sliding_window",
    "extra": "",
    "out": {"name": "attn_output"},
    "after": "",
}

_LATENT_LOCALS = ("rows", "q_nope", "q_rope", "latent", "k_rope", "nope_cache", "rope_cache", "slots", "kv", "packed")
LATENT: dict[str, Any] = {
    "fa_version": 2,
    "n": {name: f"paged_{name}" for name in _LATENT_LOCALS},
    "rows": "query_nope.shape[0]",
    "cols": "query_nope.shape[1]",
    "q_nope": "query_nope.flatten(0, 1)",
    "q_rope": "query_rope.flatten(0, 1)",
    "latent": "latent.reshape(-1, 1, self.kv_lora_rank)",
    "k_rope": "key_rope.reshape(-1, 1, self.qk_rope_head_dim)",
    "nope_cache": "self.nope_cache",
    "rope_cache": "self.rope_cache",
    "meta": "forward_metadata",
    "me": "self",
    "torch": "torch",
    "up": "kv_b_proj",
    "heads": "self.num_heads",
    "rank": "self.kv_lora_rank",
    "nope": "self.qk_nope_head_dim",
    "rope": "self.qk_rope_head_dim",
    "v": "self.v_head_dim",
    "method": "split_up_projection",
    "absorbed_k": "absorbed_k",
    "absorbed_v": "absorbed_v",
    "scale": "self.scaling",
    "out": {"name": "attn_output"},
    "after": "",
    "extra": "",
}


def context_of(template: str) -> dict[str, Any]:
    """The example context of a template, with the harness's names where it needs others."""
    context = default_context(template) if has_context(template) else {}
    if template == "standalone/attend":
        return {**context, **STANDALONE}
    if template == "standalone/paged_kv":
        names = {"meta": "PagedStep", "cache": "PagedKV", "torch": "torch"}
        return {**context, **names, "right_only": False, "static": True}
    if template in ("standalone/latent_attend", "standalone/latent_absorb"):
        return {**context, **LATENT}
    return context


def render_case(template: str, case: dict[str, Any], **more: Any) -> str:
    """The code of a template for a case: values of the case that the context knows replace the example's."""
    context = context_of(template)
    values = {k: v for k, v in case.items() if k in context and k in _VARIED}
    if "sinks" in values:
        values["sinks"] = "self.sinks" if values["sinks"] else None
    if "fused" in values:
        values["fused"] = context["fused"] if values["fused"] else None
    return render_template(template, {**context, **values, **more})


_VARIED = ("fa_version", "rope_op_version", "sliding", "host_lists", "sinks", "fused", "right_only")


def variants(template: str) -> list[tuple[str, str]]:
    """(title, code) for the versions that change the operators of a template."""
    if not has_context(template) and not template.startswith("standalone/"):
        return []
    context = context_of(template)
    out = []
    for fa in (1, 2) if "fa_version" in context else (None,):
        for rope in (1, 2) if "rope_op_version" in context else (None,):
            case = {"fa_version": fa, "rope_op_version": rope}
            title = ", ".join(f"{k}={v}" for k, v in case.items() if v) or "any"
            out.append((title, render_case(template, case)))
    return out
