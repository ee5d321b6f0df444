"""Stand-ins for what the target imports and a CPU host lacks: packages of other code paths, other models.

Only listed packages are replaced, and only where they are not installed: a wrong import in the model's own code
must still fail.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["block", "install_registry", "install_standins"]

_LIST = Path(__file__).resolve().parents[2] / "data" / "import_standins.json"


class _Meta(type):
    """Any attribute of a stand-in class is another stand-in class, so module-level uses do not fail."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make(f"{cls.__name__}.{name}")


def _make(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} is a stand-in of kvskill verify: this path needs the real package")

    return _Meta(name, (), {"__init__": refuse, "__module__": "kvskill.standin"})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _make(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname not in self.names and fullname.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def install_standins() -> list[str]:
    """Serve the listed packages that are not installed; returns their names."""
    listed = json.loads(_LIST.read_text(encoding="utf-8"))
    names = [n for n in (*listed["packages"], *listed["removed_modules"]) if _absent(n)]
    sys.meta_path.append(_Finder(frozenset(names)))
    return names


def _absent(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def block(*names: str) -> None:
    """Make `import name` fail as if the package were not installed."""
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]


def install_registry(name: str, classes: Any) -> None:
    """An own registry under both names it has had: the real one may import every model of the tree.

    `classes` is called when the registry is asked, and returns the tuple (model, [mtp,] config).
    """
    for module_name in ("executor.core.entrypoints.support_models", "executor.core.support_models"):
        module = types.ModuleType(module_name)

        class Lazy(dict):  # type: ignore[type-arg]
            def __missing__(self, key: str) -> Any:
                return classes()

            def __contains__(self, key: object) -> bool:
                return True

        module.model_dict = Lazy()  # type: ignore[attr-defined]
        module.load_model_classes = lambda key: classes()  # type: ignore[attr-defined]
        sys.modules[module_name] = module
