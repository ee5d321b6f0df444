"""The modeling code of a folder as the view that the selection uses. Built on `kvskill.analyzer.modeling`."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from kvskill.analyzer.resolve import Place
from kvskill.analyzer.selection.code import CodeView
from kvskill.analyzer.target import Registered
from kvskill.manifest import ModelRef
from kvskill.source import read_source

__all__ = ["read_code"]


def read_code(place: Place, registered: Sequence[Registered]) -> CodeView:
    """Read the modeling files. Raises InputError for broken source, Refusal when no attention class is found."""
    # INTERIM: until analyzer.modeling.read_model lands
    state = "none"
    files = []
    root = place.model_dir / "models" if (place.model_dir / "models").is_dir() else place.model_dir
    for path in sorted(root.rglob("*.py")):
        src = read_source(path, path.relative_to(place.root).as_posix())
        names = {n.name for n in ast.walk(src.tree) if isinstance(n, ast.FunctionDef)}
        attrs = {n.attr for n in ast.walk(src.tree) if isinstance(n, ast.Attribute)}
        if "get_cache_info" in names:
            state = "paged"
            files.append(src.shown)
        elif "cache_unit" in attrs or "scatter_update_" in attrs or "k_cache" in attrs:
            state = "legacy" if state == "none" else state
            files.append(src.shown)
    cfg = next((c for r in registered for _, c in reversed(r.classes) if c.endswith("Config")), None)
    return CodeView(
        ModelRef(name=place.name, folder=place.folder, modeling=tuple(files), state=state),
        config_class=cfg,  # type: ignore[arg-type]
    )
