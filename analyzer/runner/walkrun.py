"""Walk a standalone model: its forward takes the caches as an argument, as the runner hands them over.

The names of the entry's parameters are the protocol between runner and model (reference B(k)); a parameter that is
not known keeps its default, and a model whose shapes then do not fit is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from kvskill.analyzer.modeling.dims import Dim, const, fresh
from kvskill.analyzer.modeling.operators import HOOKS, WRITE_OPS, argument
from kvskill.analyzer.modeling.program import Program
from kvskill.analyzer.modeling.run import HF_DEFAULTS, Phase, Run, config_value, construct_model
from kvskill.analyzer.modeling.trace import through
from kvskill.analyzer.modeling.values import ClassVal, Const, Dict_, Frame, Func, Instance, Ref, Tensor, Tup, Value
from kvskill.analyzer.modeling.walk import MISSING, Walk
from kvskill.analyzer.runner.files import leaf

__all__ = ["CACHES", "entry_frame", "run_standalone"]

# spellings under which a model takes the caches; one that is not here is refused as a model that is handed none
CACHES = (
    *("past_key_values", "past_key_value", "past_kvs", "past_kv", "past", "layer_past"),
    *("kv_caches", "kv_cache", "kvcache", "kvcaches", "caches", "cache"),
)
_SETTINGS = ("runner_settings", "infer_config", "settings")
# a runner's configuration class need not set it
_DEFAULTS = {**HF_DEFAULTS, "rope_scaling": None}


def run_standalone(program: Program, entry: ClassVal, config: Mapping[str, Any], phase: Phase) -> Run:
    """Construct `entry` and run its forward on padded [B, S] tokens with one (k, v) pair a layer."""

    def concrete(path: str) -> Any:
        return _lookup(path, config)

    walk = Walk(program.modules, concrete)
    walk.hooks.update(HOOKS)
    root, init_env, _ = construct_model(walk, entry, _init_args(program, entry))
    walk.collapse_layers = True
    meta = Dict_({"is_prefill": Const(phase == "prefill")})
    result: Value = Const(None)
    found = entry.method("forward")
    if found is not None:
        func, owner = found
        inputs = _inputs(walk, func, phase, config, meta)
        result = walk.call_func(Func(func, owner.file, owner), [root], inputs, None)
    _own(walk)
    return Run(phase, "padded-2d", walk, root, meta, result, init_env)


def entry_frame(run: Run, entry: ClassVal) -> Frame | None:
    """The activation of the entry's own forward."""
    found = entry.method("forward")
    if found is None:
        return None
    return next((f for f in run.walk.frames if f.func is found[0] and f.parent is None), None) or next(
        (f for f in run.walk.frames if f.func is found[0]), None
    )


def _init_args(program: Program, entry: ClassVal) -> list[Value]:
    init = entry.method("__init__")
    args: list[Value] = []
    if init is None:
        return args
    spec = init[0].args
    required = len(spec.args) - len(spec.defaults)
    for i, arg in enumerate(spec.args[1:], 1):
        if arg.arg == "config" or i == 1:
            args.append(Ref("config"))
        elif arg.arg in _SETTINGS:
            args.append(_settings(program))
        elif i < required:
            args.append(Ref(arg.arg))
        else:
            break
    return args


def _settings(program: Program) -> Dict_:
    """`runner_settings` as far as the code asks: parallel sizes by name (1 where a number is needed), the rest by
    the defaults that the code itself gives."""
    sections: dict[str, dict[str, Value]] = {}
    for file in program.files.values():
        for node in ast.walk(file.tree):
            if not (isinstance(node, ast.Call) and leaf(node.func) == "get" and node.args):
                continue
            key = node.args[0]
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            assert isinstance(node.func, (ast.Attribute, ast.Name))
            inner = node.func.value if isinstance(node.func, ast.Attribute) else None
            section = _section(inner)
            if section is None:
                continue
            items = sections.setdefault(section, {})
            if (section == "parallel_config" and key.value.endswith("_size")) or len(node.args) == 1:
                items[key.value] = Ref(f"infer.{section}.{key.value}")
    out: dict[Any, Value] = {name: Dict_(dict(items)) for name, items in sections.items()}
    out.setdefault("parallel_config", Dict_({}))
    out["world_size"] = Const(1)
    out["exe_mode"] = Const("eager")
    return Dict_(out)


def _section(node: ast.AST | None) -> str | None:
    """The name in `....get("name")` or `...["name"]`."""
    key: ast.AST | None = None
    if isinstance(node, ast.Call) and leaf(node.func) == "get" and node.args:
        key = node.args[0]
    elif isinstance(node, ast.Subscript):
        key = node.slice
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def _lookup(path: str, config: Mapping[str, Any]) -> Any:
    root, _, rest = path.partition(".")
    if root == "infer":
        return 1 if rest.startswith("parallel_config.") else MISSING
    return config_value(path, config, _DEFAULTS) if root == "config" else MISSING


def _inputs(
    walk: Walk, func: ast.FunctionDef, phase: Phase, config: Mapping[str, Any], meta: Dict_
) -> dict[str, Value]:
    prefill = phase == "prefill"
    b = Dim.atom("B")
    s = Dim.atom("S") if prefill else const(1)

    def t(name: str, *shape: Dim) -> Tensor:
        return walk.tensor(f"input:{name}", [], tuple(shape), None)

    layers = int(config.get("num_hidden_layers", 1) or 1)
    pairs: list[Value] = [
        Tup([walk.tensor("cache", [], None, None, name=name, owner=None, layer=i) for name in ("k", "v")])
        for i in range(layers)
    ]
    known: dict[str, Value] = {
        "input_ids": t("input_ids", b, s),
        "position_ids": t("position_ids", b, s),
        "kv_len": t("kv_len", b),
        "attention_mask": t("attention_mask", fresh(), fresh()) if prefill else Const(None),
        "actual_seq_lengths_kv": Const(None) if prefill else t("actual_seq_lengths_kv", b),
        "is_prefill": Const(prefill),
        "forward_metadata": meta,
    }
    for name in CACHES:
        known[name] = Tup(list(pairs))
    params = {a.arg for a in [*func.args.posonlyargs, *func.args.args, *func.args.kwonlyargs]}
    return {k: v for k, v in known.items() if k in params}


def _own(walk: Walk) -> None:
    """Give each cache the object that writes it."""
    for call in walk.calls:
        if call.name in WRITE_OPS:
            _adopt(argument(call.name, call.args, call.kwargs, "input"), call.frame)
    for _, frame, obj, _ in walk.item_writes:
        _adopt(obj, frame)


def _adopt(value: Value | None, frame: Frame | None) -> None:
    if not isinstance(value, Tensor):
        return
    owner = next((f.self_ for f in frame.chain() if isinstance(f.self_, Instance)), None) if frame else None
    for t in through(value, lambda t: t.op == "cache"):
        if t.op == "cache" and t.attrs.get("owner") is None:
            t.attrs["owner"] = owner
