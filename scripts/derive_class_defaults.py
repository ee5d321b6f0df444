"""Derive src/kvskill/data/class_defaults.json from an installed transformers release.

    python scripts/derive_class_defaults.py [--check]

For every configuration class with a text decoder or encoder: the defaults of the keys that decide the KV
cache, key aliases, the path to the language model's settings, and its role. Only values are taken, no text.
`--check` compares with the file instead of writing it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import re
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
sys.modules["torch_npu"] = None  # type: ignore[assignment]  # a wheel without CANN cannot be imported
warnings.filterwarnings("ignore")

OUT = Path(__file__).resolve().parents[1] / "src/kvskill/data/class_defaults.json"

# The keys the analyzer reads. A class's default is kept only for these.
KEYS = frozenset(
    """
    add_cross_attention add_full_attention_sink_bias add_swa_attention_sink_bias alibi attention_chunk_size
    attention_dim attention_k_eq_v attention_multiplier attention_head_dim attention_heads attention_types
    attention_type attention_window_size attention_window attn_config.alibi attn_config.attn_type
    attn_config.kv_n_heads attn_config.softmax_scale attn_layer_indices attn_layer_offset attn_layer_period
    attn_layers attn_logit_softcapping block_configs block_types compress_ratios compress_rates cross_attention_layers
    cross_layer_interval d_head d_kv d_model decoder_attention_heads decoder_layers dim encoder_attention_heads
    encoder_layers expert_layer_offset expert_layer_period ffn_config.moe_num_experts
    final_logit_softcapping full_attention_interval full_attn_idxs global_attn_every_n_layers global_head_dim
    head_dim hidden_size hybrid_layer_ids hybrid_override_pattern index_head_dim index_n_heads index_topk
    indexer_head_dim indexer_kv_heads indexer_n_heads indexer_types is_causal is_decoder is_encoder_decoder
    key_multiplier kv_channels kv_lora_rank kv_n_heads kv_source_layers layer_group_size layer_rope_theta
    layer_types layers layers_block_type local_attention local_layer_ids logits_soft_cap max_position_embeddings
    max_seq_len max_window_layers moe_num_experts mtp_num_hidden_layers multi_query n_ctx n_embd n_head n_heads
    n_layer n_layers n_mamba_heads n_positions n_routed_experts new_decoder_architecture no_rope_layer_interval
    no_rope_layers num_attention_heads num_attention_heads_per_layer num_attention_groups num_decoder_layers
    num_experts num_global_key_value_heads num_heads num_hidden_layers num_key_value_heads
    num_key_value_heads_per_layer num_kv_heads num_kv_shared_layers num_layers num_layers_per_stack
    num_local_experts num_mtp_layers num_mtp_modules num_nextn_predict_layers num_sliding_attention_heads
    original_max_position_embeddings partial_rotary_factor position_embedding_type
    prefix_dense_sliding_window_pattern q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim
    query_pre_attn_scalar rotary_dim rotary_pct scale_attn_by_inverse_layer_idx scale_attn_weights
    sliding_window sliding_window_pattern sliding_window_size swa_head_dim swa_num_attention_heads
    swa_num_key_value_heads swa_qk_nope_head_dim swa_kv_lora_rank swa_v_head_dim temporal_block_width
    use_bidirectional_attention use_mla use_sliding_window v_head_dim vocab_size window_size
    H_cycles L_cycles n_recurrent_loops n_input_layers n_recurrent_layers n_output_layers causal
    interleaved_sliding_window index_kpool indexer_compress_ratio
    encoder_hidden_size max_window_size prefix_lm recurrent_kv_cache_mode embed_dim emb_dim attention_heads
    num_experts_per_tok loop_layer_index_start loop_layer_index_end loop_num_passes
    """.split()  # noqa: SIM905
)
# Values of no interest when they say nothing.
DROP = {"vocab_size"}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, (list, tuple)) and len(value) <= 128 and all(isinstance(x, (int, str)) for x in value):
        return list(value)
    return ...


def _popped(cls: type) -> dict[str, Any]:
    """Defaults given only inside `__post_init__`: `kwargs.pop("key", constant)` and `kwargs.get(...)`."""
    found: dict[str, Any] = {}
    for klass in reversed(cls.__mro__):
        init = klass.__dict__.get("__post_init__")
        if init is None or not klass.__module__.startswith("transformers.models."):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(init))))
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("pop", "get", "setdefault")
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "kwargs"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                continue
            default = node.args[1] if len(node.args) > 1 else None
            value = default.value if isinstance(default, ast.Constant) else None
            found[str(node.args[0].value)] = value
    return found


def _rope(config: Any) -> dict[str, Any] | None:
    """The class's own rope settings when they are not plain (theta is left out)."""
    params = getattr(config, "rope_parameters", None)
    if not isinstance(params, dict):
        return None
    keep = (
        "rope_type", "factor", "partial_rotary_factor", "original_max_position_embeddings", "beta_fast",
        "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "attention_factor",
        "truncate", "mrope_section",
    )  # fmt: skip

    def slim(p: dict[str, Any]) -> dict[str, Any]:
        return {k: p[k] for k in keep if p.get(k) is not None}

    if any(isinstance(v, dict) for v in params.values()):
        return {k: slim(v) for k, v in sorted(params.items()) if isinstance(v, dict)}
    out = slim(params)
    return None if out in ({"rope_type": "default"}, {}) else out


def _decoder_path(config: Any) -> tuple[str, str] | None:
    """Dotted path of the settings of the text decoder, and their model_type; None when they are flat."""
    subs = getattr(type(config), "sub_configs", {}) or {}
    for name in ("thinker_config", "text_config", "decoder", "generator", "llm_config", "language_config"):
        sub = getattr(config, name, None) if name in subs else None
        if sub is None:
            continue
        deeper = _decoder_path(sub)
        if deeper:
            return f"{name}.{deeper[0]}", deeper[1]
        return name, sub.model_type
    return None


def _role(model_type: str, heads: dict[str, set[str]], defaults: dict[str, Any]) -> str:
    """What the class generates: decoder, encoder (unless switched by is_decoder), encoder-decoder or other."""
    if defaults.get("is_encoder_decoder"):
        return "encoder-decoder"
    if model_type in heads["masked"]:
        return "encoder"
    if any(model_type in names for role, names in heads.items() if role != "masked"):
        return "decoder"
    return "other"


def _entry(cls: type, asked: str, roles: dict[str, set[str]]) -> dict[str, Any] | None:
    config = cls()
    own = {f.name: f for f in dataclasses.fields(cls)}
    defaults: dict[str, Any] = {}
    for name, field in own.items():
        if name in KEYS and field.default is not dataclasses.MISSING:
            value = _plain(field.default)
            if value is not ...:
                defaults[name] = value
    for name, value in _popped(cls).items():
        if name in KEYS and name not in defaults:
            defaults[name] = value
    for group in ("attn_config", "ffn_config"):
        sub = getattr(config, group, None)
        if sub is not None and dataclasses.is_dataclass(sub):
            for f in dataclasses.fields(sub):
                value = _plain(getattr(sub, f.name))
                if f"{group}.{f.name}" in KEYS and value is not ...:
                    defaults[f"{group}.{f.name}"] = value
    if getattr(config, "is_encoder_decoder", False):
        defaults["is_encoder_decoder"] = True
    else:
        defaults.pop("is_encoder_decoder", None)
    rope = _rope(config)
    if rope is not None:
        defaults["rope_parameters"] = rope
    elif hasattr(config, "rope_parameters"):
        defaults["rope_parameters"] = None
    path = _decoder_path(config)
    if path is None and "vocab_size" not in own:
        return None
    model_type = cls.model_type
    entry: dict[str, Any] = {"class": cls.__name__}
    if asked != model_type:
        entry["of"] = model_type
    if path is not None:
        entry["text"] = list(path)
    alias = {k: v for k, v in cls.attribute_map.items() if k in KEYS or v in KEYS}
    if alias:
        entry["alias"] = dict(sorted(alias.items()))
    entry["role"] = _role(model_type, roles, defaults)
    entry["defaults"] = {k: defaults[k] for k in sorted(defaults) if k not in DROP}
    return entry


def derive() -> dict[str, Any]:
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    roles = {
        "causal": set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "multimodal": set(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        | set(auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
        "seq2seq": set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
        | set(auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
        "masked": set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    }
    classes: dict[str, Any] = {}
    failed: dict[str, str] = {}
    other: list[str] = []  # no text generation: vision, audio, embedding towers
    for model_type in sorted(CONFIG_MAPPING):
        try:
            cls = CONFIG_MAPPING[model_type]
            # a name may point at another name's class (exaone -> llama): the name's own heads count
            entry = _entry(
                cls, model_type, {k: {cls.model_type} if model_type in v else set() for k, v in roles.items()}
            )
        except Exception as exc:  # a class that cannot be built with its own defaults says nothing
            failed[model_type] = f"{type(exc).__name__}"
            continue
        if entry is None:
            other.append(model_type)
        else:
            classes[model_type] = entry
    for entry in list(classes.values()):  # the text part of a generating model generates
        text = classes.get(entry["text"][1]) if "text" in entry and entry["role"] == "decoder" else None
        if text is not None and text["role"] == "other":
            text["role"] = "decoder"
    other += [name for name, entry in classes.items() if entry["role"] == "other"]
    classes = {name: entry for name, entry in classes.items() if entry["role"] != "other"}
    return {
        "source": f"transformers {transformers.__version__}: defaults of its configuration classes",
        "script": "scripts/derive_class_defaults.py",
        "keys": sorted(KEYS | {"rope_parameters"}),
        "not_built": dict(sorted(failed.items())),
        "other": sorted(other),
        "classes": classes,
    }


def unread() -> list[str]:
    """Keys that the analyzer looks up and that are fields of a class, but whose default is not derived."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = OUT.parents[3] / "analyzer/config"
    looked_up: set[str] = set()
    for path in folder.glob("*.py"):
        for call in re.findall(r"settings\.(?:get|value|flag)\(([^()]*)\)", path.read_text(encoding="utf-8")):
            looked_up |= set(re.findall(r'"([a-zA-Z_.]+)"', call))
    loaded = json.loads(OUT.read_text(encoding="utf-8"))["classes"]
    fields = {f.name for name in loaded for f in dataclasses.fields(CONFIG_MAPPING[name])}
    return sorted((looked_up & fields) - KEYS - {"rope_parameters", "rope_scaling"})


def render(data: dict[str, Any]) -> str:
    """One class per line, so that a diff names the class."""
    head = {k: v for k, v in data.items() if k != "classes"}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
    rows = [f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in data["classes"].items()]
    return "{\n" + "\n".join(lines) + '\n"classes": {\n' + ",\n".join(rows) + "\n}\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    args = parser.parse_args()
    text = render(derive())
    if args.check:
        same = OUT.read_text(encoding="utf-8") == text
        print("same" if same else "different")
        return 0 if same else 1
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(text, encoding="utf-8")
    print(f"{OUT.name}: {len(json.loads(text)['classes'])} classes, {len(text)} bytes")
    if missing := unread():
        print(f"add to KEYS: {missing}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
