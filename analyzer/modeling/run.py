"""Runs of a model in one phase and one input form.

Three input forms: `padded-2d` (the framework until 2026-04-25: [B, S] ids), `packed-1d` (Legacy since 2026-04-26:
packed ids that a shim folds back to [B, S]) and `paged` (packed ids, T tokens of n requests). Sources: reference
A5, A8 (framework metadata by era).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvskill.analyzer.modeling.dims import Dim, const, fresh
from kvskill.analyzer.modeling.held import adopt, is_module, lift, mark_held
from kvskill.analyzer.modeling.operators import HOOKS
from kvskill.analyzer.modeling.program import Program
from kvskill.analyzer.modeling.values import (
    ClassVal,
    Const,
    Dict_,
    ExtInstance,
    Frame,
    Func,
    Instance,
    ModuleSeq,
    Ref,
    Scalar,
    Tensor,
    Tup,
    Value,
)
from kvskill.analyzer.modeling.walk import MISSING, Problem, Walk

__all__ = [
    "HF_DEFAULTS",
    "LOADED",
    "Form",
    "Phase",
    "Run",
    "config_value",
    "construct_model",
    "draft_class",
    "run_model",
    "submodules",
]

Form = Literal["padded-2d", "packed-1d", "paged"]
Phase = Literal["prefill", "decode"]

_META_NAMES = (
    "executor.utils.forward_metadata.get_forward_metadata",
    "executor.utils.get_forward_metadata",
)
# what the framework passes when the YAML says nothing special; sizes other than these stay symbolic
_INFER_DEFAULTS: dict[str, Any] = {
    "model_config.exe_mode": "eager",
    "model_config.next_n": 0,
    "model_config.force_eplb": False,
    "model_config.with_ckpt": True,
    "model_config.enable_weight_nz": True,
    "model_config.enable_cache_compile": False,
    "model_config.enable_static_kernel": False,
    "model_config.enable_profiler": False,
    "model_config.custom_params": {},
    "parallel_config.global_rank": 0,
    "parallel_config.local_rank": 0,
    "parallel_config.world_size": 1,
}
LOADED = "process_weights_after_loading"
# keys that PretrainedConfig or a class's own defaults give
HF_DEFAULTS: dict[str, Any] = {
    "output_attentions": False,
    "output_hidden_states": False,
    "use_cache": True,
    "use_return_dict": True,
    "return_dict": True,
    "pretraining_tp": 1,
    "attention_dropout": 0.0,
    "gradient_checkpointing": False,
    "quantization_config": None,
    "quant_config": None,
}


@dataclass
class Run:
    """One finished run."""

    phase: Phase
    form: Form
    walk: Walk
    root: Instance
    meta: Dict_
    result: Value
    init_env: dict[int, dict[str, Value]]  # id(object) -> names of its __init__ at the end
    draft: Instance | None = None  # the model that drafts tokens, where there is one
    drafted: Value = field(default_factory=lambda: Const(None))  # what its forward gives

    @property
    def roots(self) -> list[Instance]:
        """The model, and the one that drafts for it."""
        return [self.root, *([self.draft] if self.draft is not None else [])]


def run_model(
    program: Program,
    entry: ClassVal,
    config: Mapping[str, Any],
    phase: Phase,
    form: Form,
    *,
    infer: Mapping[str, Any] | None = None,
    drafts: bool = True,
    draft: ClassVal | None = None,
) -> Run:
    """Construct `entry` and run its forward in one phase. Never raises on the target's code.

    `drafts`: a paged decode step may carry several tokens per request (multi-token prediction). `draft`: the class
    of the drafting model; it runs after the model, on its hidden states.
    """
    settings = {**_INFER_DEFAULTS, **(infer or {})}

    def concrete(path: str) -> Any:
        return _lookup(path, config, settings)

    walk = Walk(program.modules, concrete)
    walk.hooks.update(HOOKS)
    rows = Dim.atom("n" if form == "paged" else "B")
    walk.dim_alias = {
        "infer.scheduler_config.batch_size_per_dp_rank": rows,
        "infer.scheduler_config.batch_size": rows,
    }
    run_toplevel(walk, program)
    root, init_env, problems_in_init = construct_model(walk, entry, [Ref("config"), Ref("infer"), Ref("comm")])
    second: Instance | None = None
    if draft is not None:
        walk.naming = True
        second, more, problems = construct_model(walk, draft, [Ref("config"), Ref("infer"), Ref("comm")])
        init_env |= more
        problems_in_init += problems
        _share(root, second)
    inputs, meta = _inputs(walk, phase, form, drafts)
    for name in _META_NAMES:
        walk.hooks[name] = lambda *_: meta
    for model in (root, *([second] if second is not None else [])):
        _bind_caches(walk, model, form)
    walk.collapse_layers = True
    forward = entry.method("forward")
    result: Value = Const(None)
    if forward is not None:
        func, owner = forward
        result = walk.call_func(Func(func, owner.file, owner), [root], inputs, None)
    drafted: Value = Const(None)
    if second is not None and draft is not None and (found := draft.method("forward")) is not None:
        given = {**inputs, "prev_hidden_states": _hidden(walk, inputs["input_ids"])}
        drafted = walk.call_func(Func(found[0], found[1].file, found[1]), [second], given, None)
    adopt(walk, submodules(root))
    if form != "paged":
        lift(walk, submodules(root))
    walk.problems[:0] = [p for p in problems_in_init if p.kind == "view"]
    return Run(phase, form, walk, root, meta, result, init_env, second, drafted)


def draft_class(program: Program, entry: ClassVal, config: Mapping[str, Any]) -> ClassVal | None:
    """The class of the drafting model: its forward takes what the engine's worker passes on from the model.

    Source: executor/core/model_worker/mtp_worker.py (`prev_hidden_states` by keyword, weights shared where None).
    """
    if not config.get("num_nextn_predict_layers"):
        return None
    for cls in program.classes():
        found = cls.method("forward")
        if cls is not entry and found is not None and cls.method("load_weights") is not None:
            if any(a.arg == "prev_hidden_states" for a in [*found[0].args.args, *found[0].args.kwonlyargs]):
                return cls
    return None


def _share(main: Instance, second: Instance) -> None:
    """What the engine's worker lets the drafting model share: the head and the embedding, where it has none."""
    none = Const(None)
    inner, source = second.attrs.get("model"), main.attrs.get("model")
    if second.attrs.get("lm_head") == none and "lm_head" in main.attrs:
        second.attrs["lm_head"] = main.attrs["lm_head"]
    if isinstance(inner, Instance) and isinstance(source, Instance) and inner.attrs.get("embed_tokens") == none:
        inner.attrs["embed_tokens"] = source.attrs.get("embed_tokens", none)


def _hidden(walk: Walk, ids: Value) -> Tensor:
    """Hidden states of the model for these ids."""
    assert isinstance(ids, Tensor) and ids.shape is not None
    made = next((t for t in walk.tensors if t.op == "embedding" and t.shape), None)
    size = made.shape[-1] if made is not None and made.shape else fresh()
    return walk.tensor("embedding", [], (*ids.shape, size), None)


def run_toplevel(walk: Walk, program: Program) -> None:
    """What modules do to their own registries on import: decorators of the files, entries set by hand."""
    for shown, file in program.files.items():
        names = program.modules[shown]
        walk.frame = Frame(None, file, None, {}, None, None)
        for stmt in file.tree.body:
            if isinstance(stmt, (ast.FunctionDef, ast.ClassDef)):
                for decorator in reversed(stmt.decorator_list):
                    base = decorator.func if isinstance(decorator, ast.Call) else decorator
                    own = names.get(base.id) if isinstance(base, ast.Name) else None
                    if isinstance(own, Func) and stmt.name in names:
                        call = ast.copy_location(ast.Call(decorator, [], []), decorator)
                        walk.apply(walk.eval(decorator), [names[stmt.name]], {}, call)
            elif isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Subscript):
                if isinstance(stmt.targets[0].value, ast.Name) and isinstance(
                    names.get(stmt.targets[0].value.id), Dict_
                ):
                    walk._assign(stmt.targets[0], walk.eval(stmt.value))
        del walk.frame


def construct_model(
    walk: Walk, entry: ClassVal, args: list[Value]
) -> tuple[Instance, dict[int, dict[str, Value]], list[Problem]]:
    """The model object, the names of each object's `__init__` at its end, and the problems on the way.

    What `walk` logged meanwhile is forgotten: what it logs from here on is the forward's.
    """
    root = walk.construct(entry, args, {}, "", None)
    walk.naming = False
    found = entry.method(LOADED)
    if found is not None:  # the engine calls it between loading and the first forward
        walk.call_func(Func(found[0], found[1].file, found[1]), [root], {}, None)
    init_env = {
        id(f.self_): f.env
        for f in walk.frames
        if isinstance(f.func, ast.FunctionDef) and f.func.name == "__init__" and f.self_ is not None
    }
    problems = list(walk.problems)
    for log in (walk.frames, walk.calls, walk.tests, walk.tensors, walk.problems, walk.attr_writes):
        log.clear()
    return root, init_env, problems


def submodules(value: Value, seen: set[int] | None = None) -> list[Instance]:
    """All objects of the model's own classes below `value`, parents first."""
    seen = seen if seen is not None else set()
    if id(value) in seen:
        return []
    seen.add(id(value))
    out: list[Instance] = []
    if isinstance(value, Instance):
        out.append(value)
        for child in value.attrs.values():
            out.extend(submodules(child, seen))
    elif isinstance(value, ModuleSeq):
        for child in value.items:
            out.extend(submodules(child, seen))
    return out


def config_value(path: str, config: Mapping[str, Any], defaults: Mapping[str, Any] = HF_DEFAULTS) -> Any:
    """What `config`, `config.a.b` or `config.a[0]` is, or MISSING; `defaults`: what configuration classes inherit."""
    rest = path.partition(".")[2]
    if not rest:
        return dict(config)
    base, bracket, index = rest.partition("[")
    value: Any = config
    for part in base.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif value is config and part in defaults:
            value = defaults[part]
        else:
            return MISSING
    if bracket:
        try:
            key = index.rstrip("]")
            value = value[int(key)] if isinstance(value, (list, tuple)) else value[key.strip("'\"")]
        except (ValueError, KeyError, IndexError, TypeError):
            return MISSING
    return value


def _lookup(path: str, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    root, _, rest = path.partition(".")
    if root == "config":
        return config_value(path, config)
    if root == "infer":
        if rest in settings:
            return settings[rest]
        if rest.startswith("parallel_config.") and rest.endswith("_size"):
            return 1
    return MISSING


def _inputs(walk: Walk, phase: Phase, form: Form, drafts: bool) -> tuple[dict[str, Value], Dict_]:
    prefill = phase == "prefill"
    one = const(1)
    b = Dim.atom("B")
    s = Dim.atom("S") if prefill else one
    if form == "paged":
        rows = Dim.atom("n")
        tokens = Dim.atom("T") if prefill else Dim.atom("n") * (Dim.atom("q") if drafts else const(1))
        ids: tuple[Dim, ...] = (tokens,)
        kv_len = (tokens,) if prefill else (rows,)
    else:
        rows = b
        tokens = b * s
        ids = (b, s) if form == "padded-2d" else (tokens,)
        kv_len = (tokens,) if prefill and form == "packed-1d" else (b,)

    def t(name: str, *shape: Dim) -> Tensor:
        return walk.tensor(f"input:{name}", [], tuple(shape), None)

    side = const(2048)
    meta = Dict_(
        {
            "is_prefill": Const(prefill),
            "attention_mask": t("attention_mask", side, side),
            "kv_len": t("kv_len", *kv_len),
            "actual_seq_lengths_kv": t("actual_seq_lengths_kv", rows),
            "actual_seq_lengths_q": t("actual_seq_lengths_q", rows),
            "actual_seq_lengths_cu_kv": t("actual_seq_lengths_cu_kv", rows),
            "actual_seq_lengths_cu_q": t("actual_seq_lengths_cu_q", rows),
            "actual_seq_lengths_cu_list_kv": Const(None),
            "actual_seq_lengths_cu_list_q": Const(None),
            "actual_seq_lengths_list_kv": Const(None),
            "actual_seq_lengths_list_q": Const(None),
            "prompt_tokens": Scalar(str(tokens), tokens) if prefill else Const(0),
            "block_table": Dict_({}, t("block_table", rows, Dim.atom("width"))) if form == "paged" else Const(None),
            "slot_mapping": Dict_({}, t("slot_mapping", tokens)) if form == "paged" else Const(None),
            "is_warm_up": Const(False),
            "cp_metadata": Const(None),
        }
    )
    inputs: dict[str, Value] = {
        "input_ids": t("input_ids", *ids),
        "position_ids": t("position_ids", *ids),
        "forward_metadata": meta,
    }
    if form == "packed-1d" and prefill:
        inputs["request_offset"] = Scalar("request_offset", Dim.atom("request_offset"))
    return inputs, meta


def _bind_caches(walk: Walk, root: Instance, form: Form) -> None:
    """Give declared caches the storage that the engine allocates: [B, C, *cache_unit] or paged blocks."""
    before = {id(m): dict(m.attrs) for m in submodules(root)}
    own = root.cls.method("init_cache")
    if own is not None and form != "paged":
        func, owner = own
        params = len(func.args.args) - 1
        walk.call_func(Func(func, owner.file, owner), [root, *([Ref("device")] * min(params, 1))], {}, None)
        for module in submodules(root):
            for name, value in module.attrs.items():
                if isinstance(value, Tensor) and before.get(id(module), {}).get(name) is not value:
                    module.attrs[name] = walk.tensor("cache", [], value.shape, value.node, name=name, owner=module)
        walk.frames.clear()
        walk.attr_writes.clear()
    if form != "paged":
        mark_held(walk, [m for m in submodules(root) if is_module(m)])
    for module in submodules(root):
        unit = module.attrs.get("cache_unit")
        if unit is not None and {"k_cache", "v_cache"} <= module.attrs.keys():
            dims = walk.unit_dims(unit)
            shape = None if dims is None or form == "paged" else (Dim.atom("B"), Dim.atom("C"), *dims)
            for name in ("k_cache", "v_cache"):
                module.attrs[name] = walk.tensor("cache", [], shape, None, name=name, owner=module)
        entries = module.attrs.get("cache_entries")
        if entries is not None:
            named = _entry_names(entries)
            for name, value in list(module.attrs.items()):
                if name in named or (isinstance(value, Tensor) and value.op == "placeholder"):
                    module.attrs[name] = walk.tensor("cache", [], None, None, name=name, owner=module)


def _entry_names(entries: Value) -> set[str]:
    """The cache names that the entries of an object state."""
    items = entries.items if isinstance(entries, Tup) else []
    names = (item.kwargs.get("cache_name") for item in items if isinstance(item, ExtInstance))
    return {n.value for n in names if isinstance(n, Const) and isinstance(n.value, str)}
