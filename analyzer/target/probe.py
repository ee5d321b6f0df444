"""What a target repository offers, read from its source.

`probe` looks at the classes that the framework's own modules import, never at line shapes: dataclass fields
with their bases, the methods of the class that hands out communication groups, the manager map, the
registry, and how a cache tensor is allocated. Without an `executor` package the newest known profile is
assumed, and said.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvskill.analyzer.data import load_yaml
from kvskill.analyzer.target.classes import ClassFact, SourceTree, module_statements
from kvskill.analyzer.target.environment import OperatorFacts, probe_operators
from kvskill.analyzer.target.registry import Registry, read_registry
from kvskill.analyzer.target.releases import KV_RMSNORM_V2
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.manifest import TargetProfile
from kvskill.source import SourceFile

__all__ = ["ProbeResult", "newest_profile", "probe", "probe_target"]

PACKAGE = "executor"


@dataclass(frozen=True)
class ProbeResult:
    """The profile, what was found on the way, and facts too large for the manifest."""

    profile: TargetProfile
    findings: tuple[Diagnostic, ...] = ()
    registry: Registry = field(default_factory=Registry)
    operators: OperatorFacts | None = None
    classes: dict[str, ClassFact] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)  # "scheduler_config.block_size" -> 128
    tree: SourceTree | None = None


def probe_target(repo: Path, *, torch_npu: str | None) -> TargetProfile:
    """The profile of a target repository. Raises InputError for an unusable `torch_npu` or broken executor
    source.
    """
    return probe(repo, torch_npu=torch_npu).profile


def newest_profile() -> TargetProfile:
    """The profile that is assumed without a repository (`kvskill/data/target_profile.yaml`)."""
    newest = dict(load_yaml("target_profile.yaml")["newest"])
    date = newest.pop("date")
    newest["notes"] = (f"no target repository: the newest known API is assumed ({date})",)
    return TargetProfile(found=False, **newest)


def probe(
    repo: Path | None,
    *,
    torch_npu: str | None = None,
    model_dir: Path | None = None,
    use_installed: bool = True,
) -> ProbeResult:
    """Probe a repository (its root folder, or None) and the operators of the model that lives in it.

    Raises InputError: KV060 unusable `torch_npu`, KV014 the package is a link out of the repository, KV065 a
    class of the contract is in a file that cannot be
    parsed.
    """
    operators = probe_operators(repo, model_dir, torch_npu, use_installed=use_installed)
    if repo is None or not (repo / PACKAGE).is_dir():
        profile = _with_operators(newest_profile(), operators)
        return ProbeResult(profile, operators.findings, operators=operators)
    if repo.resolve() not in (repo / PACKAGE).resolve().parents:
        fact = f"`{PACKAGE}` is a link that leads out of the repository, so its source is not read."
        todo = "Give the real repository with --repo, or copy the package."
        raise InputError(Diagnostic("KV014", Severity.ERROR, fact, todo, Span(PACKAGE)))
    spec = load_yaml("target_profile.yaml")
    tree = SourceTree(repo, PACKAGE)
    findings: list[Diagnostic] = list(operators.findings)
    classes = _classes(tree, spec["classes"], findings)
    registry = read_registry(tree)
    profile = _profile(tree, spec, classes, registry, findings)
    if tree.broken:
        raise InputError(_broken(exc) for exc in tree.broken)
    return ProbeResult(
        _with_operators(profile, operators),
        tuple(findings),
        registry,
        operators,
        classes,
        _defaults(tree, classes.get("inference_config")),
        tree,
    )


def _classes(tree: SourceTree, names: dict[str, str], findings: list[Diagnostic]) -> dict[str, ClassFact]:
    found = {}
    for role, name in names.items():
        fact, candidates = tree.find(name)
        if fact is not None:
            found[role] = fact
        elif candidates:
            places = ", ".join(str(c.span) for c in candidates)
            findings.append(
                Diagnostic(
                    "KV064",
                    Severity.BLOCKING,
                    f"The target defines `{name}` twice ({places}); imports do not tell which counts.",
                    "Remove the unused definition, or point --repo at a clean tree.",
                    candidates[0].span,
                )
            )
    return found


def _profile(
    tree: SourceTree,
    spec: dict[str, Any],
    classes: dict[str, ClassFact],
    registry: Registry,
    findings: list[Diagnostic],
) -> TargetProfile:
    markers = spec["markers"]
    entry, info = classes.get("cache_entry"), classes.get("model_cache_info")
    paged = entry is not None and info is not None
    notes: list[str] = []
    if not paged:
        notes.append("the target has no CacheEntry/ModelCacheInfo: it cannot page")
    side, ambiguous = _block_size_side(entry, info)
    if paged and ambiguous:
        findings.append(_no_block_size(info or entry))
    metadata = classes.get("forward_metadata")
    packed = metadata is None or bool(set(metadata.field_names) & set(markers["packed_input"]))
    groups = _group_class(tree, markers)
    if groups is None:
        notes.append("no class hands out communication groups; models are taken to register theirs")
    cache_files = _cache_files(tree, classes, markers)
    zeroed = _zeroes_caches(cache_files, markers)
    types = _literal_keys(tree, markers["attn_type_map"])
    block = _defaults(tree, classes.get("inference_config")).get("scheduler_config.block_size")
    return TargetProfile(
        found=True,
        root=".",
        paged=paged,
        block_size_on=side,
        cache_entry_fields=_names(entry),
        layer_cache_info_fields=_names(classes.get("layer_cache_info")),
        model_cache_info_fields=_names(info),
        forward_metadata_fields=_names(metadata),
        config_fields=_config_fields(tree, classes.get("inference_config")),
        cache_info_module=None if entry is None else entry.module,
        forward_metadata_module=None if metadata is None else metadata.module,
        registers_groups=groups is None or markers["group_registration"] in groups.methods,
        registration=registry.form,
        input_era="packed-1d" if packed else "padded-2d",
        attn_types=types or (("FullAttention", "SlidingWindow") if paged else ()),
        fixed_block_types=_literal_keys(tree, markers["fixed_block_types"]),
        mamba_cache_entry="mamba_entry" in classes,
        null_block_zeroed=zeroed,
        default_block_size=int(block if isinstance(block, int) else spec["newest"]["default_block_size"]),
        notes=tuple(notes),
    )


def _with_operators(profile: TargetProfile, operators: OperatorFacts) -> TargetProfile:
    rms = operators.operators.get(KV_RMSNORM_V2)
    return profile.model_copy(
        update={
            "torch_npu": operators.releases,
            "torch_npu_source": operators.source,
            "fa_version": operators.fa_version or 2,
            "fa_reason": operators.reason,
            "kv_rmsnorm_rope_version": 2 if rms else 1,
            "operators": dict(operators.operators),
        }
    )


def _block_size_side(entry: ClassFact | None, info: ClassFact | None) -> tuple[Literal["model", "entry"], bool]:
    """Who carries block_size; (side, True) when neither class has the field."""
    if info is not None and "block_size" in info.field_names:
        return "model", False
    return "entry", entry is not None and "block_size" not in entry.field_names


def _no_block_size(fact: ClassFact | None) -> Diagnostic:
    return Diagnostic(
        "KV066",
        Severity.BLOCKING,
        "Neither CacheEntry nor ModelCacheInfo of the target has a field `block_size`.",
        "The cache API of this target is not known; report its commit.",
        fact.span if fact is not None else Span(PACKAGE),
    )


def _names(fact: ClassFact | None) -> tuple[str, ...]:
    return () if fact is None else fact.field_names


def _config_fields(tree: SourceTree, config: ClassFact | None) -> dict[str, tuple[str, ...]]:
    """Section attribute -> field names, from the classes that the configuration object's annotations name."""
    if config is None:
        return {}
    out: dict[str, tuple[str, ...]] = {}
    for part in config.fields:
        section = _section_class(tree, config, part.annotation)
        if section is not None:
            out[part.name] = section.field_names
    return out


def _defaults(tree: SourceTree, config: ClassFact | None) -> dict[str, Any]:
    """Literal defaults of the configuration dataclasses, by path."""
    out: dict[str, Any] = {}
    for part in config.fields if config is not None else ():
        section = _section_class(tree, config, part.annotation) if config is not None else None
        for item in section.fields if section is not None else ():
            try:
                out[f"{part.name}.{item.name}"] = ast.literal_eval(item.default or "")
            except (ValueError, SyntaxError):
                continue
    return out


def _section_class(tree: SourceTree, config: ClassFact, annotation: str) -> ClassFact | None:
    try:
        parsed = ast.parse(annotation.strip("\"' "), mode="eval")
    except SyntaxError:
        return None
    for node in ast.walk(parsed):
        name = node.id if isinstance(node, ast.Name) else None
        hit = tree.resolve(config.module, name) if name else None
        if hit is not None:
            return hit
    return None


def _group_class(tree: SourceTree, markers: dict[str, Any]) -> ClassFact | None:
    """The class that hands out groups: the one with a `get_group` method; one that registers too wins."""
    hits = []
    for file in tree.containing(rf"def\s+{markers['group_lookup']}\b"):
        for stmt in module_statements(file.tree.body):
            if isinstance(stmt, ast.ClassDef):
                fact = tree.resolve(tree.module_of(file), stmt.name)
                if fact is not None and markers["group_lookup"] in fact.methods:
                    hits.append(fact)
    hits.sort(key=lambda f: markers["group_registration"] not in f.methods)
    return hits[0] if hits else None


def _cache_files(tree: SourceTree, classes: dict[str, ClassFact], markers: dict[str, Any]) -> tuple[SourceFile, ...]:
    """Files that hand tensors to entries."""
    return tuple(tree.containing(rf"\.{markers['tensor_setter']}\s*\(")) if "cache_entry" in classes else ()


def _zeroes_caches(files: tuple[SourceFile, ...], markers: dict[str, Any]) -> bool | None:
    """Whether fresh cache memory is zeroed: looks at the functions that allocate and hand over, and their
    helpers.
    """
    calls: set[str] = set()
    for file in files:
        functions = {n.name: n for n in ast.walk(file.tree) if isinstance(n, ast.FunctionDef)}
        todo = [f for f in functions.values() if markers["tensor_setter"] in _called(f)]
        seen: set[str] = set()
        while todo:
            function = todo.pop()
            if function.name in seen:
                continue
            seen.add(function.name)
            names = set(_called(function))
            calls |= names
            todo.extend(functions[n] for n in names if n in functions)
    if calls & set(markers["zeroing_calls"]):
        return True
    return False if calls & set(markers["allocating_calls"]) else None


def _called(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.func.id


def _literal_keys(tree: SourceTree, name: str) -> tuple[str, ...]:
    """String keys or elements of a module-level dict, set, list or tuple with this name."""
    for file in tree.containing(rf"^{name}\b[^\n]*="):
        for stmt in module_statements(file.tree.body):
            targets = stmt.targets if isinstance(stmt, ast.Assign) else []
            if isinstance(stmt, ast.AnnAssign):
                targets = [stmt.target]
            if not any(isinstance(t, ast.Name) and t.id == name for t in targets):
                continue
            value = getattr(stmt, "value", None)
            items = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
            return tuple(i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str))
    return ()


def _broken(exc: InputError) -> Diagnostic:
    first = exc.findings[0]
    return Diagnostic(
        "KV065",
        Severity.ERROR,
        f"The target's own source cannot be read. {first.fact}",
        "Repair or restore this file of the target repository.",
        first.span,
    )
