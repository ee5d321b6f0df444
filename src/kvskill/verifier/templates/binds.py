"""Does the code of a template bind to the operator schemas of a release? Static; every release of the table."""

from __future__ import annotations

from typing import Any

from kvskill.opsinfo.calls import check_calls
from kvskill.verifier.backend.schemas import load_table
from kvskill.verifier.templates.render import variants

__all__ = ["binding_releases"]


def binding_releases(template: str) -> dict[str, Any]:
    """`{"variants": {"fa_version=2": [releases]}, ...}`; "any" where the code calls no operator."""
    table = load_table()
    out: dict[str, Any] = {}
    for title, code in variants(template):
        if ".npu_" not in code and ".scatter_update_" not in code:
            out[title] = "any"
            continue
        good = [r for r in table.releases if not check_calls(code, table.schemas(r).values())]
        out[title] = "all" if len(good) == len(table.releases) else good
    return out
