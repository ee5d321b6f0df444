"""Compare config understanding with the running classes of an installed transformers release.

    python scripts/crosscheck_configs.py [--only TYPE ...] [--variants N] [--verbose]

For every decoder class: build the model on the meta device (no weights), run one prefill through a recording
attention function, and compare layers, K/V heads, cached widths, windows, scales, sinks, softcaps and score biases
with what `kvskill.analyzer.config` concludes from the same settings as JSON. Variants change the keys that decide
(layer counts, head counts, windows, gates, patterns, rope scaling). Classes whose forward does not run are compared
by the attention calls made until then, or counted as not compared. Needs torch and transformers; prints one line
per disagreement.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.modules["torch_npu"] = None  # type: ignore[assignment]
warnings.filterwarnings("ignore")

import torch
import transformers
from transformers import AttentionInterface, AutoModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvskill.analyzer.config import ConfigFacts, understand
from kvskill.analyzer.config.rules import _defaults, class_info
from kvskill.diagnostics import KvskillError

TOLERANCE = 1e-6
# Classes that multiply the query themselves and hand 1.0 on; their own factor is compared by hand.
PRESCALED = {"opt", "biogpt", "xglm", "kosmos_2_text_model", "kosmos_2_5_text_model", "evolla"}
# Values without which a class's own defaults do not make a model.
NEEDED: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "glm4v_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4_moe": {"head_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 64,
        "indexer_compress_ratio": 4, "ple_layer_ids": [], "ple_embed_dim": 64,
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8, "num_hidden_layers": 32},
    "bamba": {"attn_layer_indices": [0, 3, 9]},
    "granitemoehybrid": {"layer_types": (["full_attention"] + ["linear_attention"] * 3) * 8},
    "kosmos_2_text_model": {}, "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 3},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "longcat_flash": {
        "num_layers": 3, "hidden_size": 256, "n_routed_experts": 4, "moe_topk": 2, "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32, "vocab_size": 512, "q_lora_rank": 64, "zero_expert_num": 2,
    },
    "glm5_next_text": {
        "pad_token_id": 0, "num_hidden_layers": 8, "hidden_size": 256, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": 512, "q_lora_rank": 64,
    },
    "step3p5": {
        "sliding_window": 512, "num_hidden_layers": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 4,
    },
    "qwen3_omni_moe_text": {"head_dim": 128},
    "jetmoe": {"num_hidden_layers": 3, "hidden_size": 256, "vocab_size": 512, "intermediate_size": 64},
    "moshi": {"num_hidden_layers": 3, "vocab_size": 512},
}  # fmt: skip
RECORDS: list[dict[str, Any]] = []


def _record(module: Any, query: Any, key: Any, value: Any, mask: Any = None, scaling: Any = None, **kwargs: Any) -> Any:
    RECORDS.append(
        {
            "layer": getattr(module, "layer_idx", None),
            "class": type(module).__name__,
            "q": tuple(query.shape),
            "k": tuple(key.shape),
            "v": tuple(value.shape),
            "scaling": scaling,
            "window": kwargs.get("sliding_window"),
            "softcap": kwargs.get("softcap"),
            "sinks": kwargs.get("s_aux") is not None,
            "bias": kwargs.get("position_bias") is not None,
        }
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return torch.empty(shape, device=query.device, dtype=query.dtype), None


@dataclass
class Observed:
    """What one model really does."""

    ran: bool
    layers: list[dict[str, Any]] = field(default_factory=list)  # per cache slot
    records: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def _mask(batch_size: int, q_length: int, kv_length: int, device: Any = "cpu", **_: Any) -> Any:
    return torch.zeros(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)


def _setup() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    transformers.logging.set_verbosity_error()
    AttentionInterface.register("kvskill_record", _record)
    AttentionMaskInterface.register("kvskill_record", _mask)


def _takes(cls: type, config: type) -> bool:
    """Does a class say that it is built from this config class?"""
    hints = getattr(cls, "__annotations__", {})
    if hints.get("config") in (config, config.__name__):
        return True
    if not issubclass(cls, transformers.PreTrainedModel) or not isinstance(getattr(cls, "config_class", None), type):
        return False
    return cls.config_class is config or config in hints.values()


def _model_class(config: Any) -> Any:
    """The text model of a config class that AutoModel does not know: by config_class, the smallest name first."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    module = importlib.import_module(name)
    found = [x for x in vars(module).values() if isinstance(x, type) and _takes(x, type(config))]
    models = [x for x in found if x.__name__.endswith(("TextModel", "Model", "ForCausalLM", "Decoder"))]
    if not models:
        raise ValueError(f"no model class for {type(config).__name__}")
    return min(models, key=lambda x: ("PreTrained" in x.__name__, len(x.__name__)))


def _build(config: Any, attention: str) -> Any:
    config._attn_implementation = attention
    try:
        return AutoModel.from_config(config, attn_implementation=attention)
    except ValueError as exc:
        if "Unrecognized configuration class" not in str(exc) and "Could not find" not in str(exc):
            raise
        return _model_class(config)._from_config(config, attn_implementation=attention)


def observe(config: Any) -> Observed:
    """Build and run the model of a config: on the meta device, on the CPU where that needs data and is small."""
    best = Observed(False)
    for device, masked in (("meta", False), ("meta", True), ("cpu", False)):
        seen = _observe(config, device, masked)
        if seen.ran:
            return seen
        if len(seen.records) >= len(best.records) and (device == "meta" or not best.error):
            best = seen
    return best


def _shown(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc)[:120]}".replace("\n", " ")


def _observe(config: Any, device: str, masked: bool) -> Observed:
    RECORDS.clear()
    config = copy.deepcopy(config)
    config.dtype = torch.bfloat16
    try:
        with torch.device("meta"):
            try:
                model = _build(config, "kvskill_record")
            except (KeyError, ImportError, ValueError):
                model = _build(config, "eager")
        if device == "cpu":
            if sum(p.numel() for p in model.parameters()) > 60_000_000:
                raise ValueError("too large to run with data")
            model = model.to_empty(device="cpu")
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data.zero_() if tensor.dtype.is_floating_point else tensor.data.fill_(0)
        model.eval()
        with torch.device(device), torch.no_grad():
            ids = torch.zeros(1, 6, dtype=torch.long)
            extra = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
            if masked and "attention_mask" in inspect.signature(model.forward).parameters:
                extra["attention_mask"] = torch.ones(1, 6, dtype=torch.long)
            out = model(input_ids=ids, use_cache=True, **extra)
    except BaseException as exc:  # anything: it only means that this class is compared less deeply
        if isinstance(exc, KeyboardInterrupt):
            raise
        return Observed(False, records=list(RECORDS), error=_shown(exc))
    cache = out.get("past_key_values") if hasattr(out, "get") else None
    cache = getattr(cache, "self_attention_cache", cache)
    rows = []
    for layer in getattr(cache, "layers", []) or []:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        rows.append(
            {
                "type": type(layer).__name__,
                "k": tuple(keys.shape) if keys is not None else None,
                "v": tuple(values.shape) if values is not None else None,
                "window": getattr(layer, "sliding_window", None),
            }
        )
    return Observed(True, rows, list(RECORDS))


def variants(model_type: str, limit: int) -> list[dict[str, Any]]:
    """Settings to try: the class's own, then changes of keys that it has."""
    info = class_info(model_type)
    has = info.defaults
    out: list[dict[str, Any]] = [{}]

    def add(**changes: Any) -> None:
        if all(k in has for k in changes):
            out.append(changes)

    layers = next((k for k in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if k in has), None)
    heads = next((k for k in ("num_attention_heads", "n_head", "num_heads", "n_heads") if k in has), None)
    if layers:
        add(**{layers: 14})
        add(**{layers: 14, "sliding_window": 4})
        add(**{layers: 14, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3})
        add(**{layers: 14, "sliding_window": 4, "use_sliding_window": True})
        add(**{layers: 14, "sliding_window": 4, "use_sliding_window": False})
        add(**{layers: 14, "sliding_window": None})
        add(**{layers: 14, "sliding_window_pattern": 3})
        add(**{layers: 14, "full_attention_interval": 3})
        add(**{layers: 14, "global_attn_every_n_layers": 3})
        add(**{layers: 14, "no_rope_layer_interval": 3})
        add(**{layers: 14, "num_kv_shared_layers": 4})
        add(**{layers: 14, "attn_layer_period": 4, "attn_layer_offset": 2})
        add(**{layers: 14, "layer_group_size": 3})
    kv = next((k for k in ("num_key_value_heads", "num_kv_heads") if k in has), None)
    if kv and heads and isinstance(has.get(heads), int):
        for count in (has[heads] // 2, 1, None):
            add(**{kv: count})
    if "multi_query" in has:
        add(multi_query=False)
        add(multi_query=True)
        add(new_decoder_architecture=True, num_kv_heads=1)
    add(head_dim=96)
    add(head_dim=None)
    add(query_pre_attn_scalar=100)
    add(attention_multiplier=0.02)
    add(attn_logit_softcapping=30.0)
    add(scale_attn_weights=False)
    add(attention_k_eq_v=True, num_global_key_value_heads=2)
    if "kv_lora_rank" in has:
        yarn = {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.707}
        out.append({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **yarn}})
        add(q_lora_rank=None)
    needed = NEEDED.get(model_type, {})
    unique = [{**needed, **changes} for changes in out]
    return [c for i, c in enumerate(unique) if c not in unique[:i]][:limit]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)


# Differences that are known and right: model_type -> words of the disagreement.
KNOWN = {
    "falcon": "the cache holds",  # the new architecture repeats K/V before it caches them
    "gemma3_text": "softcap",  # the class never passes it on; a config that sets it stays a ground
    "dory": "attends, expected none",  # to_dict lists attention and mlp blocks apart
    "unlimited_ocr_text": "the cache has 0",  # a cache class of its own
}


def compare(facts: ConfigFacts, seen: Observed, model_type: str) -> list[str]:
    """Disagreements, one sentence each."""
    wrong: list[str] = []
    if seen.ran and seen.layers:
        wrong += _compare_cache(facts, seen)
    wrong += _compare_records(facts, seen, model_type)
    return wrong


def _compare_cache(facts: ConfigFacts, seen: Observed) -> list[str]:
    wrong: list[str] = []
    rows = seen.layers
    owners = [s for s in facts.layers if s.owns_cache]
    full = [r for r in rows if r["k"] is not None and len(r["k"]) == 4]
    if len(full) != len(owners):
        return [f"{len(owners)} slots own K/V, the cache has {len(full)}"]
    positional = len(rows) == len(facts.layers)
    for slot, row in zip(owners, full, strict=True):
        where = f"slot {slot.index}"
        if positional and rows[slot.index] is not row:
            wrong.append(f"{where}: K/V expected, the cache has {rows[slot.index]['type']}")
            break
        if slot.cache_width is not None:
            width = row["k"][1] * row["k"][3] + row["v"][1] * row["v"][3]
            if width != slot.cache_width:
                wrong.append(f"{where}: latent width {slot.cache_width}, the cache holds {width}")
        else:
            have = (slot.kv_heads, slot.k_head_dim, slot.v_head_dim or slot.k_head_dim)
            real = (row["k"][1], row["k"][3], row["v"][3])
            if have != real:
                wrong.append(f"{where}: kv heads, widths {have}, the cache holds {real}")
        window = row["window"] if "Sliding" in row["type"] else None
        mine = slot.window if slot.kind == "sliding" else slot.span if slot.kind == "chunked" else None
        masked_only = row["type"] == "DynamicLayer" or "V4" in row["type"]  # the mask holds the window, not the cache
        if window != mine and not (masked_only and window is None) and not _inert(window, mine, facts):
            wrong.append(f"{where}: window {mine}, the cache {row['type']} has {window}")
        if wrong:
            break
    return wrong


def _inert(real: int | None, mine: int | None, facts: ConfigFacts) -> bool:
    """A window of at least the model's positions: the class applies it, it never hides a key."""
    found = facts.get("max_position_embeddings") or facts.get("n_positions")
    return mine is None and real is not None and found is not None and real >= found.value


def _compare_records(facts: ConfigFacts, seen: Observed, model_type: str) -> list[str]:
    wrong: list[str] = []
    by_layer = {s.index: s for s in facts.layers}
    for record in seen.records:
        slot = by_layer.get(record["layer"]) if isinstance(record["layer"], int) else None
        if slot is None or not slot.grows:
            known = record["layer"] is not None and slot is not None and slot.kind != "cross"
            if known and "Residual" not in record["class"]:
                wrong.append(f"layer {record['layer']}: {record['class']} attends, expected {slot.kind}")
            continue
        where = f"layer {slot.index} {record['class']}"
        if record["q"][1] != slot.q_heads:
            wrong.append(f"{where}: query heads {slot.q_heads}, really {record['q'][1]}")
        if record["scaling"] is not None and slot.scale is not None and model_type not in PRESCALED:
            if abs(record["scaling"] - slot.scale) > TOLERANCE * abs(slot.scale):
                wrong.append(f"{where}: scale {slot.scale}, really {record['scaling']}")
        window = record["window"]
        mine = slot.window
        if window is not None and window != mine and slot.kind != "chunked" and not _inert(window, mine, facts):
            wrong.append(f"{where}: window {mine}, really {window}")
        if bool(record["softcap"]) != (facts.softcap_attention.value is not None):
            wrong.append(f"{where}: softcap {facts.softcap_attention.value}, really {record['softcap']}")
        sinks = facts.sinks.value
        expected = sinks.startswith("every") or (sinks.startswith("sliding") and slot.kind == "sliding")
        if record["sinks"] != expected:
            wrong.append(f"{where}: sinks {sinks!r}, really {record['sinks']}")
        if record["bias"] and facts.verdict.verdict == "paged":
            wrong.append(f"{where}: a position bias is added, but the verdict is paged")
        if wrong:
            break
    return wrong


def check(model_type: str, changes: dict[str, Any], depth: Counter[str]) -> list[str] | None:
    """Disagreements for one variant; None when the class itself refuses it."""
    cls = CONFIG_MAPPING[model_type]
    try:
        config = cls(**changes)
    except Exception as exc:
        if changes == NEEDED.get(model_type, {}):
            print(f"{model_type}: the class refuses its own settings: {str(exc)[:160]!r}", flush=True)
        return None
    text = config.get_text_config(decoder=True) if not getattr(config, "is_encoder_decoder", False) else config
    seen = observe(text)
    depth["run" if seen.ran else "recorded in part" if seen.records else "not run"] += 1
    wrong: list[str] = []
    sparse = {"model_type": model_type, **{k: _plain(v) for k, v in changes.items()}}
    full = json.loads(json.dumps(_plain(config.to_dict())))
    for name, settings in (("sparse", sparse), ("to_dict", full)):
        try:
            facts = understand(settings, shown=f"{model_type}.json")
        except KvskillError as exc:
            if exc.findings[0].code == "KV055" and changes.get("sliding_window", 0) is None:
                continue  # sliding layers without a window: refused on purpose, the class takes them as full
            wrong.append(f"{name}: refused, {exc.findings[0]}")
            continue
        except Exception as exc:
            wrong.append(f"{name}: {type(exc).__name__}: {exc}")
            continue
        known = KNOWN.get(model_type)
        wrong += [f"{name}: {w}" for w in compare(facts, seen, text.model_type) if not (known and known in w)]
    if not seen.ran and changes == NEEDED.get(model_type, {}):
        print(f"{model_type}: compared by {len(seen.records)} attention calls only: {seen.error}", flush=True)
    if not wrong and not seen.ran and not seen.records:
        return None
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model_types")
    parser.add_argument("--variants", type=int, default=99)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    _setup()
    data = _defaults()["classes"]
    todo = args.only or [k for k, v in data.items() if class_info(k).role == "decoder" and "text" not in v]
    depth: Counter[str] = Counter()
    good = bad = refused = 0
    for number, model_type in enumerate(todo):
        if args.verbose:
            print(f"# {number} {model_type} {dict(depth)}", flush=True)
        for changes in variants(model_type, args.variants):
            wrong = check(model_type, changes, depth)
            if wrong is None:
                refused += 1
            elif wrong:
                bad += 1
                for line in wrong:
                    print(f"{model_type} {changes}: {line}", flush=True)
            else:
                good += 1
    print(f"{len(todo)} classes, {good} variants agree, {bad} disagree, {refused} not compared; {dict(depth)}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
