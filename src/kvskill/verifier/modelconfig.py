"""The HF config that a verification starts from, and the small one it runs.

The base comes from --config, the manifest's config file, the `model_path` of a YAML in the folder, or the
defaults of the model's own configuration class (read from its source, not run). Shrinking changes width, depth,
vocabulary and expert count only. It never touches head dims, latent and rope dims, head ratios, rope_scaling or
max_position_embeddings: they decide which operator path runs, and HF derives yarn factors from them.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.source import read_source
from kvskill.verifier.discover import ModelUnderTest

__all__ = ["BaseConfig", "SmallConfig", "base_config", "layer_count", "shrink", "text_settings"]

VOCAB = 320
WIDTH = 64
EXPERTS = 8
WINDOW_KEPT = 256  # larger windows cost prompts that are too long; see `_shrink_window`
WINDOW_SMALL = 40
SHARED_NESTS = ("text_config", "llm_config", "language_config")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
# A layer count at which the model changes: kept at one layer before the change.
THRESHOLDS = ("first_k_dense_replace", "max_window_layers")
# A period in layers: at least one full period stays.
PERIODS = (
    "sliding_window_pattern",
    "layer_types_period",
    "full_attention_interval",
    "interleave_moe_layer_step",
)
WINDOW_KEYS = ("sliding_window", "window_size", "attention_window")
DROPPED = ("quantization_config", "compression_config", "auto_map", "_name_or_path", "quant_config")


@dataclass(frozen=True)
class BaseConfig:
    """A full-size config and where it came from."""

    values: dict[str, Any]
    source: str
    from_defaults: bool = False


@dataclass(frozen=True)
class SmallConfig:
    """The config that runs, the window it has (None: no sliding layers) and what was changed, for the report."""

    values: dict[str, Any]
    window: int | None
    layers: int
    notes: tuple[str, ...] = ()


def base_config(model: ModelUnderTest, given: Path | None) -> BaseConfig:
    """Find the full-size config. Raises InputError KV435 when there is none or it is not JSON."""
    if given is not None:
        path = given / "config.json" if given.is_dir() else given
        return BaseConfig(_load(path), str(given))
    if model.manifest is not None and model.manifest.model.config_file:
        for root in (model.folder, model.root):
            path = root / model.manifest.model.config_file
            if path.is_file():
                return BaseConfig(_load(path), model.manifest.model.config_file)
    for path in sorted([*model.folder.rglob("config.json"), *_yaml_model_paths(model)]):
        if path.is_file() and ".kvskill" not in path.parts:
            return BaseConfig(_load(path), path.name)
    defaults = _class_defaults(model)
    if defaults is None:
        raise _error(model, "No HF config was found, and the configuration class has no readable defaults.")
    return BaseConfig(defaults, f"defaults of {model.config_class}", from_defaults=True)


def _load(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InputError(
            Diagnostic(
                "KV435",
                Severity.ERROR,
                f"The model config cannot be read ({exc}).",
                "Give the model's config.json with --config.",
                Span(str(path)),
            )
        ) from None
    if not isinstance(values, dict):
        raise InputError(
            Diagnostic("KV435", Severity.ERROR, "The model config is not an object.", "Check it.", Span(str(path)))
        )
    return values


def _yaml_model_paths(model: ModelUnderTest) -> list[Path]:
    out = []
    for path in sorted(model.folder.rglob("*.yaml")):
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        section = data.get("model_config", data) if isinstance(data, dict) else {}
        value = section.get("model_path") if isinstance(section, dict) else None
        if isinstance(value, str) and value:
            out.append(Path(value) / "config.json")
    return out


def _class_defaults(model: ModelUnderTest) -> dict[str, Any] | None:
    """Literal defaults of the configuration class: `__init__` parameters, or annotated class attributes."""
    if model.config_module is None:
        return None
    path = model.root / Path(*model.config_module.split(".")).with_suffix(".py")
    if not path.is_file():
        return None
    source = read_source(path, str(path.relative_to(model.root)))
    node = next((c for c in source.tree.body if isinstance(c, ast.ClassDef) and c.name == model.config_class), None)
    if node is None:
        return None
    out: dict[str, Any] = {}
    for item in node.body:
        target: ast.expr | None = item.target if isinstance(item, ast.AnnAssign) else None
        if isinstance(item, ast.Assign) and len(item.targets) == 1:
            target = item.targets[0]
        if isinstance(target, ast.Name) and isinstance(item, (ast.Assign, ast.AnnAssign)) and item.value:
            if isinstance(item, ast.AnnAssign) or target.id == "model_type":
                _put(out, target.id, item.value)
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            args = item.args
            positional = args.args[len(args.args) - len(args.defaults) :]
            for arg, default in [*zip(positional, args.defaults, strict=True), *_kw(args)]:
                _put(out, arg.arg, default)
    return out or None


def _kw(args: ast.arguments) -> list[tuple[ast.arg, ast.expr]]:
    return [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None]


def _put(out: dict[str, Any], name: str, node: ast.expr) -> None:
    try:
        out[name] = ast.literal_eval(node)
    except ValueError:
        return


def _error(model: ModelUnderTest, fact: str) -> InputError:
    where = str(model.folder.relative_to(model.root))
    return InputError(
        Diagnostic("KV435", Severity.ERROR, fact, "Give the model's config.json with --config.", Span(where))
    )


def shrink(base: BaseConfig, model: ModelUnderTest, tp: int = 1, mtp: bool = False) -> SmallConfig:
    """The small config. Depth keeps one full pattern period and every distinct per-layer value."""
    values: dict[str, Any] = json.loads(json.dumps(base.values))
    for key in DROPPED:
        values.pop(key, None)
    inner = text_settings(values)
    notes: list[str] = []
    if base.values.get("quantization_config"):
        notes.append("quantization_config dropped: the run is unquantised")
    if inner.get("head_dim") is None and "num_attention_heads" in inner and "kv_lora_rank" not in inner:
        if base.from_defaults:
            inner["head_dim"] = inner["hidden_size"] // inner["num_attention_heads"]
    _shrink_depth(inner, model)
    _shrink_heads(inner, tp)
    _shrink_width(inner, tp)
    window = _shrink_window(inner, model, notes)
    if "num_nextn_predict_layers" in inner:
        inner["num_nextn_predict_layers"] = 1 if mtp or inner["num_nextn_predict_layers"] else 0
    inner["use_cache"] = True
    if values.get("torch_dtype") is None and values.get("dtype") is None:
        values["torch_dtype"] = "bfloat16"  # what the framework runs; caches take their dtype from it
    return SmallConfig(values, window, int(inner.get("num_hidden_layers", inner.get("num_layers", 0))), tuple(notes))


def text_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: the nested one, or the config itself."""
    return next((values[k] for k in SHARED_NESTS if isinstance(values.get(k), dict)), values)


def layer_count(values: dict[str, Any]) -> int | None:
    """The number of layers that a config gives, nested or not."""
    inner = text_settings(values)
    return next((int(inner[k]) for k in DEPTHS if isinstance(inner.get(k), int)), None)


def _shrink_depth(c: dict[str, Any], model: ModelUnderTest) -> None:
    total = layer_count(c) or 2
    lists = {k: v for k, v in c.items() if isinstance(v, list) and len(v) == total and total > 1}
    keep = 2
    rows = list(zip(*lists.values(), strict=True)) if lists else []
    if rows:
        seen: dict[str, int] = {}
        for index, row in enumerate(rows):
            seen.setdefault(repr(row), index)
        keep = max(keep, max(seen.values()) + 1)
    for key in PERIODS:
        if isinstance(c.get(key), int):
            keep = max(keep, int(c[key]))
    moved = set()  # first layers of a kind that comes after a threshold: they come after layer 0 now
    for key in THRESHOLDS:
        if isinstance(c.get(key), int) and 0 < c[key] < total:
            moved.add(c[key])
            c[key] = 1
    if model.manifest is not None:
        for group in model.manifest.groups:
            if group.layers and min(group.layers) not in moved:
                keep = max(keep, min(group.layers) + 1)
    keep = min(keep, total)
    for key in lists:
        c[key] = c[key][:keep]
    for key in ("mlp_only_layers", "full_attention_layers", "no_rope_layers"):
        if isinstance(c.get(key), list) and key not in lists:
            c[key] = [i for i in c[key] if isinstance(i, int) and i < keep]
    if "num_layers" in c and "num_hidden_layers" not in c:  # HF derives the other from it (two sublayers per layer)
        c["num_layers"] = keep
    else:
        c["num_hidden_layers"] = keep


def _shrink_heads(c: dict[str, Any], tp: int) -> None:
    heads = int(c.get("num_attention_heads", 0))
    if not heads:
        return
    kv = int(c.get("num_key_value_heads") or heads)
    if heads % kv:
        return
    ratio = heads // kv
    small_kv = min(kv, max(2, tp)) if ratio > 1 else min(kv, max(4, 2 * tp))
    if c.get("kv_lora_rank"):
        small_kv, ratio = min(heads, max(4, 2 * tp)), 1
    hidden = int(c.get("hidden_size", 0))
    head_dim = c.get("head_dim")
    tied = head_dim is None and "kv_lora_rank" not in c
    if tied or (head_dim and head_dim * heads == hidden):
        c["hidden_size"] = (hidden // heads) * small_kv * ratio
    else:  # a width of its own stays different from heads * head_dim
        c["hidden_size"] = min(hidden, 192 if head_dim and head_dim * small_kv * ratio == 128 else 128)
    c["num_attention_heads"] = small_kv * ratio
    if c.get("num_key_value_heads") is not None:
        c["num_key_value_heads"] = small_kv if ratio > 1 or kv == heads else kv
    if isinstance(c.get("num_global_key_value_heads"), int):
        c["num_global_key_value_heads"] = min(int(c["num_global_key_value_heads"]), small_kv)


def _shrink_width(c: dict[str, Any], tp: int) -> None:
    for key in (
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "ffn_hidden_size",
    ):
        if isinstance(c.get(key), int):
            c[key] = min(c[key], WIDTH * tp)
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if isinstance(c.get(key), int) and c[key] > 0:
            c[key] = min(c[key], EXPERTS)
            if isinstance(c.get("n_group"), int) and c["n_group"] > 1:
                c["n_group"] = min(c["n_group"], 4)
                c["topk_group"] = min(int(c.get("topk_group", 1)), 2)
            for top in ("num_experts_per_tok", "moe_topk", "top_k"):
                if isinstance(c.get(top), int):
                    c[top] = min(c[top], 2)
    if isinstance(c.get("vocab_size"), int):
        c["vocab_size"] = min(c["vocab_size"], VOCAB)
    c["pad_token_id"] = 0 if c.get("pad_token_id") is not None else None
    for key, value in (("bos_token_id", 1), ("eos_token_id", 2)):
        if c.get(key) is not None:
            c[key] = value


def _shrink_window(c: dict[str, Any], model: ModelUnderTest, notes: list[str]) -> int | None:
    """The effective window, shrunk only when it is large and its number stands nowhere in the code."""
    key = next((k for k in WINDOW_KEYS if isinstance(c.get(k), int) and c[k] > 0), None)
    if key is None or c.get("use_sliding_window") is False:
        return None
    types = c.get("layer_types")
    if isinstance(types, list) and not any("sliding" in str(t) for t in types):
        return None
    window = int(c[key])
    positions = c.get("max_position_embeddings")
    if isinstance(positions, int) and window >= positions:
        return None  # it never hides a key; shrunk, it would
    if window <= WINDOW_KEPT:
        return window
    if window in model.literals:
        notes.append(f"{key} stays {window}: the number stands in the code")
        return window
    c[key] = WINDOW_SMALL
    return WINDOW_SMALL
