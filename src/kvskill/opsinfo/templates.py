"""The code templates: their headers, and rendering with a context. Imports jinja2 only when it renders.

A template begins with a comment block that says `name`, `operators`, `constraints`, `evidence`, and whatever else
its author adds, one `key: value` each (a value goes on over indented lines).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.abc import Traversable
from typing import TYPE_CHECKING, Any

from kvskill.manifest import Group, Manifest
from kvskill.opsinfo.facts import reference_data

if TYPE_CHECKING:
    import jinja2

__all__ = ["TemplateInfo", "default_context", "has_context", "list_templates", "model_contexts", "render_template"]

_HEADER = re.compile(r"\A\s*\{#-?(?P<text>.*?)-?#\}\n?", re.DOTALL)
_FIELD = re.compile(r"(?P<key>[a-z][a-z_ -]*):(?:\s+(?P<value>.*))?$")


@dataclass(frozen=True)
class TemplateInfo:
    """One template. `name`: path below `templates/` without the ending. `header`: its fields, in order."""

    name: str
    file: str
    header: dict[str, str]
    body: str

    @property
    def summary(self) -> str:
        """The first line of what the template says of itself."""
        for key in ("summary", "what", "purpose", "name"):
            if self.header.get(key):
                return self.header[key]
        return self.name


def _root() -> Traversable:
    return resources.files("kvskill").joinpath("templates")


def _walk(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    out: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            out += _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".j2"):
            out.append((f"{prefix}{entry.name}", entry))
    return out


def parse_header(text: str) -> tuple[dict[str, str], str]:
    """(fields, rest) of a template text; no fields when it does not begin with a comment."""
    match = _HEADER.match(text)
    if match is None:
        return {}, text
    fields: dict[str, str] = {}
    key = ""
    for line in match["text"].splitlines():
        found = _FIELD.match(line.strip()) if not line.startswith((" " * 4, "\t")) or not key else None
        if found:
            key = found["key"]
            fields[key] = (found["value"] or "").strip()
        elif key and line.strip():
            fields[key] = f"{fields[key]} {line.strip()}".strip()
    return fields, text[match.end() :]


@cache
def list_templates() -> dict[str, TemplateInfo]:
    """Every packaged template by name."""
    out = {}
    for file, entry in _walk(_root()):
        header, body = parse_header(entry.read_text(encoding="utf-8"))
        name = file.removesuffix(".j2").removesuffix(".py")
        out[name] = TemplateInfo(name, file, header, body)
    return out


def render_template(name: str, context: dict[str, Any]) -> str:
    """The code of a template. Raises KeyError for an unknown one, jinja2.UndefinedError for a missing value."""
    text: str = _environment().get_template(list_templates()[name].file).render(context)
    return text


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_load),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _load(file: str) -> str | None:
    return next((entry.read_text(encoding="utf-8") for name, entry in _walk(_root()) if name == file), None)


def has_context(name: str) -> bool:
    """True when example values of the template are known."""
    return name in reference_data("template_contexts")["templates"]


def default_context(name: str) -> dict[str, Any]:
    """The values of a common model, from `references/template_contexts.yaml`. Raises KeyError for no entry."""
    return dict(reference_data("template_contexts")["templates"][name]["context"])


def model_contexts(name: str, manifest: Manifest) -> list[tuple[str, dict[str, Any]]]:
    """(title, values) for each group of a model that the template serves.

    The manifest gives what it decided (versions, caches, windows, eras); names of locals and attributes stay those
    of the default context, since the manifest does not hold them.
    """
    entry = reference_data("template_contexts")["templates"][name]
    out: list[tuple[str, dict[str, Any]]] = []
    for number, group in enumerate(manifest.groups):
        if group.attention not in entry["for"]:
            continue
        values = _from_manifest(manifest, group)
        context = {**entry["context"], **{k: v for k, v in values.items() if k in entry["manifest"]}}
        title = f"group {number}: layers {_ranges(group.layers)}, {group.attention}, {group.attn_type}"
        if not any(context == seen for _, seen in out):
            out.append((title, context))
    return out


def _from_manifest(manifest: Manifest, group: Group) -> dict[str, Any]:
    target = manifest.target
    mixed = manifest.mixed_attn_types.value
    sliding = ("some" if mixed else "always") if group.attn_type == "SlidingWindow" or mixed else None
    window = "self.sliding_window or None" if mixed else "self.sliding_window"
    attn_type = f'"{group.attn_type}"'
    if mixed:
        attn_type = '"SlidingWindow" if self.sliding_window else "FullAttention"'
    caches = [{"name": c.name, "dim": c.dim} for c in group.caches]
    values: dict[str, Any] = {
        "fa_version": manifest.fa_version.value,
        "window_rule": manifest.window_rule.value,
        "host_lists": "actual_seq_lengths_list_kv" in target.forward_metadata_fields,
        "model_block_size": target.block_size_on == "model",
        "block_size": "infer_config.scheduler_config.block_size" if target.block_size_on == "entry" else None,
        "sliding": sliding,
        "window": window if sliding else None,
        "attn_type": attn_type,
        "sinks": "self.sinks" if group.sinks else None,
        "rope_op_version": target.kv_rmsnorm_rope_version,
    }
    if manifest.overrides.mla_cache == "nd":
        values["fused"] = None
    if caches:
        values |= {"caches": caches, "kv_heads": group.caches[0].num_head}
    if len(caches) == 2:
        values |= {f"{x}_cache": c["name"] for x, c in zip("kv", caches, strict=True)}
        values |= {f"{x}_dim": c["dim"] for x, c in zip("kv", caches, strict=True)}
    return values


def _ranges(layers: tuple[int, ...]) -> str:
    """`0-3, 6` of layer numbers."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
