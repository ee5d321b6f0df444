"""Where things are: the model folder, the repository around it, its files, and the config that describes it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvskill.analyzer.static_config import StaticConfig, config_classes, read_defaults
from kvskill.analyzer.yamls import YamlFacts
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.source import read_source

__all__ = ["ConfigSource", "Place", "find_config", "find_model", "find_repo", "shown_path"]

PACKAGE = "executor"


@dataclass(frozen=True)
class Place:
    """A model folder and the repository around it (None: the folder stands alone). `root` is what paths are shown
    from.
    """

    model_dir: Path
    repo: Path | None

    @property
    def root(self) -> Path:
        return self.repo if self.repo is not None else self.model_dir.parent

    @property
    def name(self) -> str:
        return self.model_dir.name

    @property
    def folder(self) -> str:
        """The model folder relative to the root, with slashes."""
        return shown_path(self.model_dir, self.root)


@dataclass(frozen=True)
class ConfigSource:
    """Where the config comes from: a file, or the defaults of a configuration class."""

    kind: str  # "option" | "yaml" | "folder" | "class"
    shown: str
    path: Path | None = None
    defaults: StaticConfig | None = None
    note: str = ""


def shown_path(path: Path, root: Path) -> str:
    """A path as findings print it: relative to the root where it lies below it, else its name."""
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return path.name


def find_repo(start: Path) -> Path | None:
    """The nearest folder at or above `start` that holds the framework package."""
    for folder in (start, *start.parents):
        package = folder / PACKAGE
        if package.is_dir() and any(package.glob("**/*.py")):
            return folder
    return None


def find_model(model: str, repo: Path | None, cwd: Path | None = None) -> Place:
    """A model folder by path or by its name under `models/`.

    Raises InputError: KV013 no such folder, KV014 a link that leaves its place, KV015 `--repo` is no folder.
    """
    cwd = cwd or Path.cwd()
    if repo is not None:
        repo = repo.absolute()
        if not repo.is_dir():
            raise _error("KV015", str(repo), "--repo is no folder.", "Give the root of the target repository.")
    given = Path(model)
    candidates = [given if given.is_absolute() else cwd / given]
    if repo is not None:
        candidates.extend((repo / given, repo / "models" / given))
    else:
        around = find_repo(cwd.absolute())
        if around is not None:
            candidates.append(around / "models" / given)
    for candidate in candidates:
        if candidate.is_dir():
            folder = Path(candidate.absolute())
            found = repo if repo is not None else find_repo(folder)
            if found is not None and not folder.resolve().is_relative_to(found.resolve()):
                if folder.is_symlink() or repo is None:
                    raise _error(
                        "KV014",
                        model,
                        "The model folder is a symbolic link to a place outside the repository.",
                        "Give the folder it points to.",
                    )
            return Place(folder, found)
    if any(c.is_file() for c in candidates):
        raise _error("KV013", model, "The model is a file, not a folder.", "Give the model's folder.")
    raise _error("KV013", model, f"There is no model folder `{model}`.", _suggestion(model, repo, cwd))


def find_config(
    place: Place,
    *,
    option: Path | None,
    primary: YamlFacts | None,
    yamls: Sequence[YamlFacts],
    class_name: str | None = None,
    class_file: Path | None = None,
) -> ConfigSource | None:
    """The first that exists: `--config`, the YAML's model_path, a config.json in the folder, the class's defaults.

    Raises InputError KV016 when `--config` names nothing, and what `read_source` raises for a broken class file.
    """
    if option is not None:
        path = option / "config.json" if option.is_dir() else option
        if not path.exists() and not path.is_symlink():
            raise _error("KV016", str(option), "--config names no file.", "Give a config.json or its folder.")
        return ConfigSource("option", shown_path(path.absolute(), place.root), path)
    ordered = [y for y in (primary, *yamls) if y is not None]
    for facts in ordered:
        weights = _weights_config(facts.settings.model_path, place)
        if weights is not None:
            return ConfigSource("yaml", shown_path(weights, place.root), weights, note=facts.shown)
    own = place.model_dir / "config.json"
    if own.is_file():
        return ConfigSource("folder", shown_path(own, place.root), own)
    return _class_source(place, class_name, class_file)


def _weights_config(model_path: str, place: Place) -> Path | None:
    """`<model_path>/config.json` where it exists; relative paths count from the repository, then the model folder."""
    if not model_path or "\x00" in model_path or len(model_path) > 1000:
        return None
    for base in (place.root, place.model_dir):
        path = base / Path(model_path).expanduser() / "config.json"
        try:
            if path.is_file():
                return path
        except OSError:
            continue
    return None


def _class_source(place: Place, class_name: str | None, class_file: Path | None) -> ConfigSource | None:
    files = [class_file] if class_file is not None else []
    files.extend(p for p in sorted(place.model_dir.rglob("configuration_*.py")) if p not in files)
    best: ConfigSource | None = None
    for path in files:
        if not path.resolve().is_relative_to(place.model_dir.resolve()):
            continue
        shown = shown_path(path, place.root)
        names = config_classes(read_source(path, shown))
        wanted = class_name if class_name in names else None
        if class_name is not None and wanted is None and path != class_file:
            continue
        defaults = read_defaults(path, shown, wanted or _text_class(names))
        if defaults is not None:
            best = best or ConfigSource("class", shown, path, defaults, note=defaults.name)
            if wanted:
                return ConfigSource("class", shown, path, defaults, note=defaults.name)
    return best


def _text_class(names: Sequence[str]) -> str | None:
    """Without a named class: the one that is not for vision or audio, the last such one of the file."""
    plain = [n for n in names if not any(w in n.lower() for w in ("vision", "audio", "image"))]
    return plain[-1] if plain else (names[-1] if names else None)


def _suggestion(model: str, repo: Path | None, cwd: Path) -> str:
    root = repo if repo is not None else find_repo(cwd.absolute())
    folder = root / "models" if root is not None else None
    if folder is None or not folder.is_dir():
        return "Give a path, or run inside the target repository, or give --repo."
    names = sorted(p.name for p in folder.iterdir() if p.is_dir())
    close = difflib.get_close_matches(Path(model).name, names, n=3, cutoff=0.5)
    return f"Did you mean {', '.join(close)}?" if close else f"Models there: {', '.join(names[:12])}."


def _error(code: str, where: str, fact: str, todo: str) -> InputError:
    return InputError(Diagnostic(code, Severity.ERROR, fact, todo, Span(where)))
