"""The stage-2 decision table of progress.md, from a manifest, in both languages.

It follows the writing rules of progress.md: decisions, reasons and places inside the repository; no absolute paths,
no commits, no machines.
"""

from __future__ import annotations

from typing import Literal

from kvskill.analyzer.report.pattern import compact
from kvskill.manifest import Evidence, Group, Manifest

__all__ = ["decision_rows"]

Row = tuple[str, str, str]
Language = Literal["zh", "en"]

_TEXT: dict[str, tuple[str, str]] = {
    "deployment": ("部署模式", "Deployment mode"),
    "framework": ("框架部署", "framework"),
    "standalone": ("独立部署", "standalone"),
    "kv_mode": ("KV 模式", "KV mode"),
    "attn_type": ("attn_type", "attn_type"),
    "fa": ("FA 算子版本", "FA version"),
    "absorb": ("MLA absorb", "MLA absorb"),
    "mixed": ("多 attn_type 混合", "Mixed attn_type"),
    "block": ("block_size", "block_size"),
    "window": ("滑窗 pre_tokens", "Window pre_tokens"),
    "memory": ("KV 显存（每 rank）", "KV memory per rank"),
    "yes": ("启用", "yes"),
    "no": ("不启用", "no"),
    "on": ("是", "yes"),
    "off": ("否", "no"),
    "legacy-note": ("仅支持 offline 推理", "offline inference only"),
    "out-of-scope": ("不适用（无因果增长的 KV 缓存）", "out of scope (no causal growing K/V)"),
    "pattern": ("逐层", "layers"),
    "blocks": ("block 数", "blocks"),
}


def decision_rows(manifest: Manifest) -> dict[Language, list[Row]]:
    """Rows (decision, choice, reason) for each language."""
    return {"zh": _rows(manifest, 0), "en": _rows(manifest, 1)}


def _rows(m: Manifest, lang: int) -> list[Row]:
    def text(key: str) -> str:
        return _TEXT[key][lang]

    mode = {"paged": "Paged", "legacy": f"Legacy ({text('legacy-note')})"}.get(m.kv_mode.value, text("out-of-scope"))
    rows: list[Row] = [
        (text("deployment"), text(m.deployment.value), _why(m.deployment.evidence)),
        (text("kv_mode"), mode, "; ".join(m.kv_grounds) or _why(m.kv_mode.evidence)),
        (text("attn_type"), _types(m.groups), f"{text('pattern')}: {compact(m.layer_pattern)}"),
    ]
    if m.kv_mode.value != "paged":  # the other rows are about calls that are not written
        return rows
    rows += [
        (text("fa"), f"v{m.fa_version.value}", _why(m.fa_version.evidence)),
        (text("absorb"), text("yes" if m.mla_absorb.value else "no"), _why(m.mla_absorb.evidence)),
        (text("mixed"), text("on" if m.mixed_attn_types.value else "off"), _why(m.mixed_attn_types.evidence)),
        (text("block"), str(m.block_size.value), _why(m.block_size.evidence)),
    ]
    windows = sorted({g.sliding_window for g in m.groups if g.sliding_window})
    if windows:
        rule = "W - 1" if m.window_rule.value == "hf" else "W"
        rows.append((text("window"), f"{rule} (W = {', '.join(map(str, windows))})", _why(m.window_rule.evidence)))
    if m.memory is not None:
        blocks = ", ".join(f"{k} {v}" for k, v in m.memory.blocks.items())
        rows.append(
            (
                text("memory"),
                f"Legacy {m.memory.legacy_bytes} B, Paged {m.memory.paged_bytes} B",
                f"{m.memory.yaml or ''}; {text('blocks')}: {blocks}",
            )
        )
    return rows


def _types(groups: tuple[Group, ...]) -> str:
    return ", ".join(f"{g.manager_key or g.attn_type} x{len(g.layers)}" for g in groups) or "-"


def _why(evidence: tuple[Evidence, ...]) -> str:
    """The first two pieces of evidence: where, and what it says."""
    parts = []
    for e in evidence[:2]:
        parts.append(f"{e.ref}: {e.note}" if e.note else e.ref)
    return "; ".join(parts)
