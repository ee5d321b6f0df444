"""Find the language model's settings inside a config: flat, or under text_config, llm_config and the like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvskill.analyzer.config.problems import invalid
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rules import ClassInfo, class_info, class_of_architecture, rules

__all__ = ["Located", "locate"]

_DEPTH = 3


@dataclass(frozen=True)
class Located:
    """The settings and what stands around them."""

    settings: Settings
    top: ClassInfo
    model_type: str | None
    text_model_type: str | None  # None when flat
    multimodal: bool
    twins: tuple[str, ...]  # keys that the top level repeats with another value


def locate(config: Mapping[str, Any], shown: str) -> Located:
    """Choose the settings that describe the text decoder.

    Raises InputError KV049 for a model_type that is no string, KV051 when nothing describes a language model.
    """
    model_type = _model_type(config, shown, "")
    top = class_info(model_type)
    _check_types(config, top, shown)
    path, tree = _nested(config, top)
    _check_architectures(tree, shown, path)
    flat = _describes(config)
    if not path:
        info = class_info(top.text[1]) if top.text else _by_architecture(top, config)
        if not flat and not (info.has_class and info.role != "other") and top.role != "other":
            raise _nothing(config, shown, model_type)
        return Located(Settings(config, "", info, shown), top, model_type, None, _multimodal(config, top), twins=())
    inner = _model_type(tree, shown, path)
    info = class_info(inner)
    expected = top.text[1] if top.text and path == top.text[0] else None
    if expected and (inner is None or not info.known):
        info = class_info(expected)
    elif not info.known:
        info = _by_architecture(info, tree)
    if not _describes(tree) and not info.has_class:
        raise _nothing(config, shown, model_type)
    twins = tuple(
        key
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
        if config.get(key) is not None and tree.get(key) is not None and config[key] != tree[key]
    )
    return Located(
        Settings(tree, path, info, shown),
        top,
        model_type,
        inner or info.model_type,
        _multimodal(config, top),
        twins if flat else (),
    )


def _by_architecture(info: ClassInfo, tree: Mapping[str, Any]) -> ClassInfo:
    """An unknown model_type takes the facts of the class that its architecture names, when there is one."""
    names = tree.get("architectures")
    if info.known or not isinstance(names, list):
        return info
    for name in names:
        found = class_of_architecture(name) if isinstance(name, str) else None
        if found:
            named = class_info(found)
            named = class_info(named.text[1]) if named.text else named
            return replace(named, has_class=False, by_architecture=name)
    return info


def _model_type(tree: Mapping[str, Any], shown: str, path: str) -> str | None:
    value = tree.get("model_type")
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        key = f"{path}.model_type" if path else "model_type"
        raise invalid("KV049", shown, f"{key} is {value!r}, not a string.", "Give the model's own value.")
    return value


def _check_types(config: Mapping[str, Any], top: ClassInfo, shown: str) -> None:
    """Keys that must be objects or lists of strings, before anything is looked up in them."""
    keys = [top.text[0].partition(".")[0]] if top.text else []
    for key in (*keys, "quantization_config"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise invalid("KV049", shown, f"{key} is {config[key]!r:.40}, not an object.", "Give an object.")
    _check_architectures(config, shown, "")


def _check_architectures(tree: Mapping[str, Any], shown: str, path: str) -> None:
    names = tree.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(x, str) for x in names)):
        key = f"{path}.architectures" if path else "architectures"
        raise invalid("KV049", shown, f"{key} is {names!r:.40}, not a list of names.", "Give a list of names.")


def _nothing(config: Mapping[str, Any], shown: str, model_type: str | None) -> Exception:
    if not config:
        return invalid("KV051", shown, "The object is empty.", "Give a model's config.json.")
    named = f"model_type {model_type!r} is not known and n" if model_type else "N"
    fact = f"{named}o key gives the layers and the hidden size of a language model."
    return invalid("KV051", shown, fact, "Give the config.json of a language model.")


def _describes(tree: Mapping[str, Any]) -> bool:
    """True when the object has a layer count and a hidden size or heads under any of their names."""
    names = rules()["concepts"]
    has = {c: any(tree.get(n) is not None for n in names[c]) for c in ("layers", "hidden", "q_heads")}
    return (has["layers"] and (has["hidden"] or has["q_heads"])) or (has["hidden"] and has["q_heads"])


def _nested(config: Mapping[str, Any], top: ClassInfo) -> tuple[str, Mapping[str, Any]]:
    """Path and object of the nested settings, ("", config) when there are none."""
    if top.text:
        node: Any = config
        for part in top.text[0].split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and node:
            return top.text[0], node
    found = _search(config, 0)
    return found if found else ("", config)


def _search(tree: Mapping[str, Any], depth: int) -> tuple[str, Mapping[str, Any]] | None:
    for key in rules()["language_keys"]:
        node = tree.get(key)
        if not isinstance(node, Mapping) or not node:
            continue
        deeper = _search(node, depth + 1) if depth < _DEPTH else None
        if deeper:
            return f"{key}.{deeper[0]}", deeper[1]
        info = class_info(node["model_type"] if isinstance(node.get("model_type"), str) else None)
        if _describes(node) or (info.has_class and info.role == "decoder"):
            return key, node
    return None


def _multimodal(config: Mapping[str, Any], top: ClassInfo) -> bool:
    keys = rules()["multimodal_keys"]
    nodes: list[Mapping[str, Any]] = [config]
    nodes += [v for k, v in config.items() if k in rules()["language_keys"] and isinstance(v, Mapping)]
    if any(node.get(key) not in (None, {}, "") for node in nodes for key in keys):
        return True
    return top.text is not None and top.role == "decoder"
