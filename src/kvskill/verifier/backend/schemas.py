"""Operator schemas of released torch_npu versions, from `verifier/data/op_schemas.json`. Imports no torch.

The table was derived from the released wheels by `scripts/derive_op_schemas.py`; it holds the operators that a
KV-cache rewrite can emit or meet. Keyed by full release: schemas follow the release train, not the torch minor.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["SchemaTable", "load_table", "release_key"]

_HEAD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)?")


@dataclass(frozen=True)
class SchemaTable:
    """`releases` in ascending order; `operators`: every operator looked for (absent from a release = not in it)."""

    raw: dict[str, Any]

    @property
    def releases(self) -> tuple[str, ...]:
        """All releases in the table, oldest torch line first."""
        return tuple(sorted(self.raw["releases"], key=release_key))

    @property
    def operators(self) -> tuple[str, ...]:
        """Names looked for in every wheel."""
        return tuple(self.raw["operators"])

    def schemas(self, release: str) -> dict[str, str]:
        """`{"npu_rms_norm": schema, "npu_grouped_matmul.List": schema, ...}` of a release, verbatim.

        Raises KeyError, naming the nearest releases, when the release is not in the table.
        """
        if release not in self.raw["releases"]:
            near = [r for r in self.releases if r.split(".post")[0] == release.split(".post")[0]]
            hint = ", ".join(near or self.releases[-3:])
            raise KeyError(f"torch_npu {release} is not in the schema table; the nearest releases are: {hint}")
        indices = self.raw["sets"][self.raw["releases"][release]["set"]]
        texts = [self.raw["schemas"][i] for i in indices]
        return {overload_name(t): t for t in texts}

    def facts(self, release: str) -> dict[str, Any]:
        """Build date, torch pin and release train of a release."""
        return dict(self.raw["releases"][release])

    def newest_for_torch(self, torch_version: str) -> str:
        """The last release built for this torch (2.8.0 -> 2.8.0.post5), else the newest release of all."""
        base = torch_version.split("+")[0]
        same = [r for r in self.releases if r.split(".post")[0] == base]
        return same[-1] if same else max(self.releases, key=release_key)


def overload_name(schema: str) -> str:
    """`npu_grouped_matmul.List` of a schema string."""
    match = _HEAD.match(schema)
    if match is None:
        raise ValueError(f"not a schema: {schema!r}")
    return match.group()


def release_key(release: str) -> tuple[int, ...]:
    """Sort key of a release name; finals before their posts."""
    return tuple(int(p) for p in re.findall(r"\d+", release))


@functools.cache
def load_table() -> SchemaTable:
    """The table that ships with kvskill."""
    text = resources.files("kvskill.verifier").joinpath("data/op_schemas.json").read_text(encoding="utf-8")
    return SchemaTable(json.loads(text))
