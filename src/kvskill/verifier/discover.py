"""Find the target repository, the model folder and the classes that run, without running or importing them.

Sources, in this order: `model:` of kv_manifest.yaml, the registry file of the target (support_models.py),
then a scan of the folder's modeling files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvskill.analyzer.target.classes import SourceTree
from kvskill.analyzer.target.registry import read_registry
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.manifest import MANIFEST_NAME, Manifest, load_manifest
from kvskill.source import SourceFile, read_source

__all__ = ["ModelUnderTest", "find_folder", "find_model", "find_target", "resolve_model"]

ORIGINALS = Path(".kvskill") / "originals"


@dataclass(frozen=True)
class ModelUnderTest:
    """The classes to run. Module names are dotted and importable from `root`.

    `registered` is the registry key (also the YAML's model_name), None when the target does not list the model.
    `group_names` are the communication groups that the code registers for sizes above one, as "name@function".
    """

    root: Path
    folder: Path
    name: str
    modeling_module: str
    causal_lm: str
    config_module: str | None
    config_class: str | None
    mtp: str | None = None
    registered: str | None = None
    group_names: tuple[str, ...] = ()
    has_cache_info: bool = False
    literals: frozenset[int] = frozenset()
    originals: Path | None = None
    manifest: Manifest | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The modeling file as findings print it: relative to the repository."""
        return self.modeling_module.replace(".", "/") + ".py"


def find_target(start: Path) -> Path | None:
    """The nearest folder at or above `start` that carries the framework (executor/core)."""
    for folder in (start, *start.parents):
        if (folder / "executor" / "core").is_dir():
            return folder
    return None


def find_folder(model: Path, repo: Path | None) -> Path:
    """The folder of MODEL: a folder, or a name under models/ of the repository or of a folder at or above this one.

    Raises InputError KV430.
    """
    if model.is_dir():
        return model.resolve()
    here = Path.cwd().resolve()
    for base in (repo,) if repo is not None else (find_target(here), here, *here.parents):
        if base is not None and (base / "models" / model).is_dir():
            return (base / "models" / model).resolve()
    raise _error("KV430", f"There is no model folder `{model}`.", "Give a folder, or a name and --repo.", model)


def find_model(model: Path, repo: Path | None) -> ModelUnderTest:
    """Resolve MODEL (a folder, or a name under models/). Raises InputError KV430, KV431."""
    folder = find_folder(model, repo)
    root = repo or find_target(folder)
    if root is None or not (root / "executor" / "core").is_dir():
        raise _error(
            "KV430",
            "No folder at or above the model carries the framework (executor/core).",
            "Give the target repository with --repo.",
            model,
        )
    return resolve_model(root.resolve(), folder)


def resolve_model(root: Path, folder: Path) -> ModelUnderTest:
    """The classes of a model folder (both paths resolved). Raises InputError KV430, KV431."""
    if not folder.is_relative_to(root):
        raise _error("KV430", f"The model folder is not inside {root.name}.", "Move it or change --repo.", folder)
    return _resolve(root, folder)


def _resolve(root: Path, folder: Path) -> ModelUnderTest:
    manifest_path = folder / MANIFEST_NAME
    manifest = load_manifest(manifest_path, str(manifest_path.relative_to(root))) if manifest_path.is_file() else None
    sources = [read_source(p, str(p.relative_to(root))) for p in _python_files(folder)]
    listed = read_registry(SourceTree(root, "executor")).for_folder(folder.relative_to(root).as_posix())
    entries = sorted(listed, key=lambda e: e.key.replace("-", "_") != folder.name)  # the folder's own name first
    causal = config = mtp = None
    registered = None
    if manifest is not None and manifest.model.causal_lm:
        causal = _locate(root, sources, manifest.model.causal_lm)
        config = _locate(root, sources, manifest.model.config_class)
        mtp = _locate(root, sources, manifest.model.mtp)
        registered = next((e.key for e in entries if any(c == manifest.model.causal_lm for _, c in e.classes)), None)
    if causal is None and entries:
        registered, classes = entries[0].key, entries[0].classes
        causal, config = classes[0], classes[-1]
        mtp = classes[1] if len(classes) == 3 else None
    if causal is None:
        causal = _scan(root, sources, "ForCausalLM", exclude="MTP")
    if config is None:
        config = _scan(root, sources, "Config", exclude="Quant", base="Config")
    if mtp is None:
        mtp = _scan(root, sources, "MTP", base="ForCausalLM")
    if causal is None:
        raise _error(
            "KV431",
            "No class of the folder's modeling files is named *ForCausalLM, and the registry lists none.",
            "Run `kvskill analyze` first, or name the class in the registry.",
            folder.relative_to(root),
        )
    originals = folder / ORIGINALS
    return ModelUnderTest(
        root=root,
        folder=folder,
        name=folder.name,
        modeling_module=causal[0],
        causal_lm=causal[1],
        config_module=config[0] if config else None,
        config_class=config[1] if config else None,
        mtp=mtp[1] if mtp else None,
        registered=registered,
        group_names=tuple(sorted(set(_conditional_groups(sources)))),
        has_cache_info=_defines(sources, "get_cache_info"),
        literals=frozenset(_literals(sources)),
        originals=originals if originals.is_dir() else None,
        manifest=manifest,
    )


def _python_files(folder: Path) -> list[Path]:
    """Modeling and configuration files: the folder's own and those of its models/ subfolder."""
    here = [*folder.glob("*.py"), *(folder / "models").glob("*.py")]
    return sorted(p for p in here if p.is_file())


def _dotted(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts)


def _classes(source: SourceFile) -> Iterator[ast.ClassDef]:
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef):
            yield node


def _locate(root: Path, sources: list[SourceFile], name: str | None) -> tuple[str, str] | None:
    for source in sources:
        if any(c.name == name for c in _classes(source)):
            return _dotted(root, source.path), str(name)
    return None


def _scan(
    root: Path, sources: list[SourceFile], suffix: str, exclude: str = "\0", base: str = ""
) -> tuple[str, str] | None:
    """The last class named *suffix (with a base named *base*): later classes build on earlier ones."""
    found = None
    for source in sources:
        for node in _classes(source):
            bases = [ast.unparse(b) for b in node.bases]
            if node.name.endswith(suffix) and exclude not in node.name and (not base or any(base in b for b in bases)):
                found = (_dotted(root, source.path), node.name)
    return found


def _conditional_groups(sources: list[SourceFile]) -> Iterator[str]:
    """Groups that are registered only for sizes above one, as "name@function".

    At world size 1 such a group does not exist although deployments have it. A registration that merely stands in
    the source is not enough: its function must have run, which is decided at run time.
    """
    for source in sources:
        for function in ast.walk(source.tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.If) and _asks_for_more_than_one(node.test):
                    for name in _registrations(node.body):
                        yield f"{name}@{function.name}"


def _asks_for_more_than_one(test: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Gt)
        and isinstance(node.comparators[0], ast.Constant)
        and node.comparators[0].value == 1
        for node in ast.walk(test)
    )


def _registrations(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "register_group":
                    first = [k.value for k in node.keywords if k.arg == "name"] + list(node.args[:1])
                    if first and isinstance(first[0], ast.Constant):
                        yield str(first[0].value)


def _defines(sources: list[SourceFile], method: str) -> bool:
    return any(
        isinstance(item, ast.FunctionDef) and item.name == method
        for source in sources
        for node in _classes(source)
        for item in node.body
    )


def _literals(sources: list[SourceFile]) -> Iterator[int]:
    """Integer literals of the modeling code: a window that stands there as a number cannot be shrunk."""
    for source in sources:
        if source.path.name.startswith("configuration"):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and type(node.value) is int:
                yield node.value


def _error(code: str, fact: str, todo: str, where: Path) -> InputError:
    return InputError(Diagnostic(code, Severity.ERROR, fact, todo, Span(str(where))))
