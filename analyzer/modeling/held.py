"""Caches that the attention does not own: tuples, lists, dicts or an object of caches on the model, one pair a layer.

The engine injects paged caches into the attention objects, so each of these caches is given to the module whose
method writes it. A cache module below the attention is such a container as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvskill.analyzer.modeling.builtins import inplace_source
from kvskill.analyzer.modeling.operators import WRITE_OPS, argument
from kvskill.analyzer.modeling.scores import find_attends
from kvskill.analyzer.modeling.trace import method_frame, through
from kvskill.analyzer.modeling.values import Dict_, Frame, Instance, ModuleSeq, Tensor, Tup, Value

if TYPE_CHECKING:
    from kvskill.analyzer.modeling.walk import Walk

__all__ = ["HELD", "adopt", "cache_root", "is_module", "lift", "mark_held", "writes_of"]

HELD = "<held>"  # what the name of such a cache begins with
_FRESH = frozenset({"zeros", "empty", "full", "new_zeros", "new_empty", "zeros_like", "empty_like"})


def is_module(value: Value | None) -> bool:
    return isinstance(value, Instance) and "torch.nn.Module" in value.cls.external_bases()


def mark_held(walk: Walk, modules: list[Instance]) -> None:
    """Tensors inside containers on modules are caches that no module owns yet (when hidden states are written)."""
    for module in modules:
        _unstack(walk, module.attrs)
        for attr, value in module.attrs.items():
            for path, tensor in _inside(value, attr, set()):
                if tensor.op in _FRESH and tensor.shape is not None and len(tensor.shape) >= 3:
                    tensor.op = "cache"
                    tensor.parents = ()
                    tensor.attrs = {"name": path, "owner": None, "holder": (module, attr)}


def _unstack(walk: Walk, attrs: dict[str, Value]) -> None:
    """One tensor [2, batch, ...] of keys and values is two caches."""
    for name, value in attrs.items():
        if isinstance(value, Tensor):
            attrs[name] = _pair(walk, value)
        elif isinstance(value, Tup):
            value.items[:] = [_pair(walk, v) for v in value.items]
        elif isinstance(value, Dict_):
            value.items.update({k: _pair(walk, v) for k, v in value.items.items()})


def _pair(walk: Walk, value: Value) -> Value:
    if not isinstance(value, Tensor) or value.op not in _FRESH | {"cache"} or not value.shape:
        return value
    if len(value.shape) < 4 or value.shape[0].value != 2:
        return value
    both = [replace(value, op="zeros", shape=value.shape[1:], attrs={}) for _ in range(2)]
    walk.tensors.extend(both)
    return Tup(list(both))


def _inside(value: Value, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of the tensors in a container; modules and bare tensors are not containers."""
    if id(value) in seen or isinstance(value, (ModuleSeq, Tensor)) or is_module(value):
        return
    seen.add(id(value))
    items: list[tuple[str, Value]] = []
    if isinstance(value, Tup):
        items = [(f"{path}.{i}", v) for i, v in enumerate(value.items)]
    elif isinstance(value, Dict_):
        items = [(f"{path}.{k}", v) for k, v in value.items.items()]
    elif isinstance(value, Instance):
        items = [(f"{path}.{k}", v) for k, v in value.attrs.items()]
    for name, item in items:
        if isinstance(item, Tensor):
            yield name, item
        else:
            yield from _inside(item, name, seen)


def cache_root(value: Value | None) -> Tensor | None:
    """The cache that a value is a view of."""
    for t in through(value, lambda t: t.op == "cache") if isinstance(value, Tensor) else ():
        if t.op == "cache":
            return t
    return None


def writes_of(walk: Walk) -> Iterator[tuple[Tensor, Frame]]:
    """(cache, frame) of every write of hidden states into a cache."""
    for call in walk.calls:
        if call.name in WRITE_OPS:
            target, source = (argument(call.name, call.args, call.kwargs, n) for n in ("input", "updates"))
        elif call.name.startswith("tensor."):
            source, _ = inplace_source(call.name[len("tensor.") :], call.args[1:], call.kwargs)
            target = call.args[0]
        else:
            continue
        cache = cache_root(target) if isinstance(source, Tensor) and source.stream else None
        if cache is not None:
            yield cache, call.frame
    for _, frame, obj, value in walk.item_writes:
        cache = cache_root(obj) if isinstance(value, Tensor) and value.stream else None
        if cache is not None:
            yield cache, frame


def adopt(walk: Walk, modules: list[Instance]) -> None:
    """Give each held cache to the module that writes it; other modules of that class get theirs as well."""
    adopters: dict[int, tuple[Instance, list[str]]] = {}
    for cache, frame in writes_of(walk):
        if cache.attrs.get("owner") is not None:
            continue
        current: Frame | None = frame
        while current is not None and not is_module(current.self_):
            current = current.parent
        owner = current.self_ if current is not None else None
        if not isinstance(owner, Instance):
            continue
        name = HELD + _without_layer(str(cache.attrs["name"]), owner)
        cache.attrs.update(owner=owner, name=name)
        owner.attrs[name] = cache
        adopters.setdefault(id(owner), (owner, []))[1].append(name)
    for owner, names in adopters.values():
        for other in modules:
            if other.cls is owner.cls and id(other) not in adopters:
                for name in names:
                    other.attrs.setdefault(name, walk.tensor("cache", [], None, None, name=name, owner=other))


def lift(walk: Walk, modules: list[Instance]) -> None:
    """Caches of a module that attends nothing itself (a cache module) go to the module above that attends."""
    attends = find_attends(walk)

    def attending(module: Value | None) -> bool:
        return isinstance(module, Instance) and any(method_frame(a.out.frame, module) is not None for a in attends)

    for cache, frame in list(writes_of(walk)):
        below, name = cache.attrs.get("owner"), str(cache.attrs.get("name"))
        if not isinstance(below, Instance) or name.startswith(HELD) or attending(below):
            continue
        above = next((f.self_ for f in frame.chain() if is_module(f.self_) and attending(f.self_)), None)
        attr = next((k for k, v in above.attrs.items() if v is below), None) if isinstance(above, Instance) else None
        if not isinstance(above, Instance) or attr is None:
            continue
        for module in modules:
            child = module.attrs.get(attr)
            if module.cls is not above.cls or not isinstance(child, Instance) or name not in child.attrs:
                continue
            mine = cache if module is above else walk.tensor("cache", [], None, None)
            mine.attrs = {"name": f"{HELD}{attr}.{name}", "owner": module, "holder": (module, attr), "home": child}
            module.attrs[f"{HELD}{attr}.{name}"] = mine
            child.attrs[name] = walk.tensor("placeholder", [], None, None)


def _without_layer(path: str, owner: Instance) -> str:
    """The path with the layer's number left out, so that it is one name for all layers."""
    number = next((p for p in owner.path.split(".") if p.isdigit()), None)
    parts = path.split(".")
    if number in parts:
        parts[parts.index(number)] = "*"
    return ".".join(parts)
