"""The YAML files of a model folder: their era, the settings that size a cache, and where they differ.

Framework files have the sections `model_config`, `data_config`, `parallel_config`, `scheduler_config`.
Runner files are flat at the top and keep lengths under `data_config`. Anything else (diffusion scripts) has
no cache settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from kvskill.analyzer.data import load_yaml
from kvskill.diagnostics import Diagnostic, Severity, Span

__all__ = ["RunSettings", "YamlFacts", "differences", "primary_yaml", "read_yaml_file", "read_yamls"]

Era = Literal["framework", "framework-2d", "runner", "other"]
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_BYTES = 1_000_000
_MAX_KEYS = 5000
_SECTIONS = ("model_config", "data_config", "parallel_config", "scheduler_config")

# RunSettings field -> (path in framework files, paths in older or runner files).
_KEYS: dict[str, tuple[str, ...]] = {
    "batch_size": ("scheduler_config.batch_size", "data_config.batch_size"),
    "input_len": (
        "data_config.input_truncated_len",
        "scheduler_config.input_max_len",
        "data_config.input_max_len",
    ),
    "max_new_tokens": ("scheduler_config.max_new_tokens", "data_config.max_new_tokens"),
    "max_prefill_tokens": ("scheduler_config.max_prefill_tokens",),
    "world_size": ("parallel_config.world_size", "world_size"),
    "attn_tp_size": ("parallel_config.attn_tp_size",),
    "prefill_dp_group": ("parallel_config.offline_prefill_dp_group_size",),
    "cp_size": ("parallel_config.cp_size",),
    "kvp_size": ("parallel_config.kvp_size",),
    "next_n": ("model_config.next_n",),
    "block_size": ("scheduler_config.block_size", "model_config.pa_block_size"),
}
_TEXTS: dict[str, tuple[str, ...]] = {
    "exe_mode": ("model_config.exe_mode", "exe_mode"),
    "model_path": ("model_config.model_path", "model_path"),
    "model_name": ("model_config.model_name", "model_name"),
}


@dataclass(frozen=True)
class RunSettings:
    """What sizes a cache in one run. `given` names the fields that the file sets; the others are defaults."""

    batch_size: int = 1
    input_len: int = 256
    max_new_tokens: int = 32
    max_prefill_tokens: int = 0
    world_size: int = 1
    attn_tp_size: int = 1
    prefill_dp_group: int = 1
    cp_size: int = 1
    kvp_size: int = 1
    next_n: int = 0
    block_size: int = 128
    afd: bool = False
    exe_mode: str = "eager"
    model_path: str = ""
    model_name: str = ""
    given: frozenset[str] = frozenset()

    @property
    def batch_per_rank(self) -> int:
        """`batch_size_per_dp_rank` as InferenceConfig.from_dict computes it."""
        ranks = self.world_size // 2 if self.afd else self.world_size
        return self.batch_size // max(ranks // max(self.attn_tp_size, 1), 1)


@dataclass(frozen=True)
class YamlFacts:
    """One file. `keys` maps each dotted key to (value, line); `online` files belong to prefill/decode
    serving.
    """

    path: Path
    shown: str
    era: Era
    settings: RunSettings
    keys: dict[str, tuple[Any, int]] = field(default_factory=dict)
    online: bool = False
    findings: tuple[Diagnostic, ...] = ()

    def span(self, key: str) -> Span:
        """Where a key stands, else the file."""
        return Span(self.shown, self.keys[key][1]) if key in self.keys else Span(self.shown)

    def setting_span(self, name: str) -> Span:
        """Where a RunSettings field is set."""
        for key in (*_KEYS.get(name, ()), *_TEXTS.get(name, ())):
            if key in self.keys:
                return self.span(key)
        return Span(self.shown)


def read_yamls(model_dir: Path, shown_root: Path, defaults: Mapping[str, Any] | None = None) -> tuple[YamlFacts, ...]:
    """Every YAML file below `config/` and in the model folder itself, in path order.

    `defaults` are the target's own dataclass defaults (`scheduler_config.block_size` -> 128). Links that
    leave the folder are not followed. A broken file gives a finding (KV005), never an exception.
    """
    real = model_dir.resolve()
    paths: dict[Path, None] = {}
    for pattern in ("config/**/*.yaml", "config/**/*.yml", "*.yaml", "*.yml"):
        for path in sorted(model_dir.glob(pattern)):
            inside = path.resolve()
            if path.is_file() and (real in inside.parents) and path.name != "kv_manifest.yaml":
                paths[path] = None
    return tuple(read_yaml_file(p, p.relative_to(shown_root).as_posix(), defaults) for p in paths)


def read_yaml_file(path: Path, shown: str, defaults: Mapping[str, Any] | None = None) -> YamlFacts:
    """Read one file; what cannot be read becomes a finding of the result."""
    none = RunSettings()
    try:
        if path.stat().st_size > _MAX_BYTES:
            return YamlFacts(path, shown, "other", none, findings=(_broken(shown, 1, "it is larger than 1 MB"),))
        text = path.read_text(encoding="utf-8-sig")
        loader = _LOADER(text)
        try:
            node = loader.get_single_node()
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (OSError, UnicodeDecodeError) as exc:
        return YamlFacts(path, shown, "other", none, findings=(_broken(shown, 1, str(exc)),))
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        mark = getattr(exc, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        problem = getattr(exc, "problem", None) or str(exc).splitlines()[0]
        return YamlFacts(path, shown, "other", none, findings=(_broken(shown, line, problem),))
    if not isinstance(data, dict):
        fact = () if data is None else (_broken(shown, 1, "its top is not a mapping"),)
        return YamlFacts(path, shown, "other", none, findings=fact)
    keys: dict[str, tuple[Any, int]] = {}
    doubled: list[Diagnostic] = []
    _flatten(node, data, "", keys, doubled, shown)
    settings, wrong = _settings(keys, defaults or {}, shown)
    online = "pd" in Path(shown).parent.name.split("_") or any(k.startswith("disagg_config") for k in keys)
    return YamlFacts(path, shown, _era(keys), settings, keys, online, (*doubled, *wrong))


def primary_yaml(yamls: tuple[YamlFacts, ...], wanted: str | None = None) -> YamlFacts | None:
    """The file that the memory plan follows: the one asked for, else the first offline one."""
    able = [y for y in yamls if y.era != "other"]
    if wanted is not None:
        named = [y for y in able if y.path.name == wanted or y.shown.endswith(wanted)]
        return named[0] if named else None
    able.sort(key=lambda y: (y.online, y.shown.count("/"), y.shown))
    return able[0] if able else None


def differences(yamls: tuple[YamlFacts, ...]) -> dict[str, tuple[tuple[str, Any], ...]]:
    """Settings whose value is not the same in every file: field -> ((file, value), ...)."""
    able = [y for y in yamls if y.era != "other"]
    out = {}
    for name in (*_KEYS, "exe_mode", "model_name"):
        values = tuple((y.shown, getattr(y.settings, name)) for y in able)
        if len({v for _, v in values}) > 1:
            out[name] = values
    eras = tuple((y.shown, y.era) for y in able)
    if len({e for _, e in eras}) > 1:
        out["era"] = eras
    return out


def _flatten(
    node: Any,
    data: dict[Any, Any],
    prefix: str,
    out: dict[str, tuple[Any, int]],
    doubled: list[Diagnostic],
    shown: str,
) -> None:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        if len(out) >= _MAX_KEYS:
            return
        name = str(key_node.value)
        line = key_node.start_mark.line + 1
        if name in seen:
            doubled.append(
                Diagnostic(
                    "KV006",
                    Severity.WARNING,
                    f"The key `{prefix}{name}` stands twice; YAML keeps the last one.",
                    "Remove one of them.",
                    Span(shown, line),
                )
            )
        seen.add(name)
        value = data.get(name)
        out[prefix + name] = (value, line)
        if isinstance(value_node, yaml.MappingNode) and isinstance(value, dict) and prefix.count(".") < 8:
            _flatten(value_node, value, f"{prefix}{name}.", out, doubled, shown)


def _era(keys: dict[str, tuple[Any, int]]) -> Era:
    sections = [s for s in _SECTIONS if isinstance(keys.get(s, (None,))[0], dict)]
    if "scheduler_config" in sections:
        return "framework-2d" if "scheduler_config.input_max_len" in keys else "framework"
    if "data_config.input_max_len" in keys or "data_config.batch_size" in keys:
        return "runner"
    if "model_config" in sections and ("parallel_config" in sections or "data_config" in sections):
        return "framework" if "model_config.model_path" in keys else "runner"
    return "other"


def _settings(
    keys: dict[str, tuple[Any, int]], defaults: Mapping[str, Any], shown: str
) -> tuple[RunSettings, tuple[Diagnostic, ...]]:
    values: dict[str, Any] = {}
    wrong = []
    for name, paths in _KEYS.items():
        if isinstance(defaults.get(paths[0]), int):
            values[name] = defaults[paths[0]]
        for path in paths:
            if path not in keys:
                continue
            value, line = keys[path]
            least = 0 if name in ("next_n", "max_prefill_tokens") else 1
            kind = "non-negative" if least == 0 else "positive"
            if isinstance(value, bool) or not isinstance(value, int) or value < least or value > 2**40:
                wrong.append(
                    Diagnostic(
                        "KV007",
                        Severity.WARNING,
                        f"`{path}` is {value!r}, which is no {kind} whole number.",
                        "Correct the file; the default is used for the memory plan.",
                        Span(shown, line),
                    )
                )
                break
            values[name] = value
            values.setdefault("given", set()).add(name)
            break
    for name, paths in _TEXTS.items():
        for path in paths:
            if isinstance(keys.get(path, (None,))[0], str):
                values[name] = keys[path][0]
                values.setdefault("given", set()).add(name)
                break
    values["afd"] = keys.get("model_config.custom_params.enable_afd", (False,))[0] is True
    values["given"] = frozenset(values.get("given", ()))
    return RunSettings(**values), tuple(wrong)


def old_keys(facts: YamlFacts) -> Iterator[tuple[str, str, int]]:
    """Keys of an older era or of a runner that the framework reads elsewhere: (old, new, line)."""
    table = load_yaml("framework_fields.yaml")
    moves = dict(table["runner_yaml"])
    moves.update({r["old"]: r["new"] for r in table["renamed"]})
    for key, (_, line) in facts.keys.items():
        if key in moves:
            yield key, moves[key], line


def _broken(shown: str, line: int, problem: str) -> Diagnostic:
    return Diagnostic(
        "KV005",
        Severity.WARNING,
        f"The YAML file cannot be read: {problem}.",
        "Correct it; it was left out of the analysis.",
        Span(shown, line),
    )
