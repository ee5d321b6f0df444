"""The matrix: template x geometry x block size x batch shape, from `kvskill/data/template_matrix.yaml`.

A case is a plain dict with an `id` that names its values, so that the ledger's figures can be repeated one by one.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from itertools import product
from typing import Any

import yaml

__all__ = ["SLICES", "all_cases", "slice_of", "templates_of"]

SLICES = 40  # a slice runs about one case in forty, and at least one of each template
Case = dict[str, Any]


def all_cases() -> list[Case]:
    """Every case, in a fixed order."""
    text = resources.files("kvskill").joinpath("data/template_matrix.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    out: list[Case] = []
    for group in data["groups"]:
        axes = {name: _choices(data, name, chosen) for name, chosen in group["axes"].items()}
        for combination in product(*axes.values()):
            case: Case = {"kind": group["kind"], "templates": group["templates"], "skip": False}
            names = []
            for axis, (name, values) in zip(axes, combination, strict=True):
                case.update(values if isinstance(values, dict) else {axis: values})
                names.append(name)
            if not _excluded(case, group.get("except", [])):
                case["id"] = "/".join([group["name"], *names])
                out.append(case)
    return out


def _choices(data: dict[str, Any], axis: str, chosen: list[Any]) -> list[tuple[str, Any]]:
    """(name, values): by name from the file's table of that axis, else the value itself."""
    table = data["axes"].get(axis, {})
    return [(str(c), table[c]) if c in table else (f"{axis}={c}", c) for c in chosen]


def _excluded(case: Case, rules: list[dict[str, Any]]) -> bool:
    return any(all(case.get(k) in v for k, v in rule.items()) for rule in rules)


def templates_of(cases: list[Case]) -> list[str]:
    """Names of the templates that the cases exercise."""
    return sorted({t for case in cases for t in case["templates"]})


def slice_of(cases: list[Case], text: str) -> list[Case]:
    """The cases whose turn it is for `text` (a commit hash): other commits run others. Never empty for a template."""

    def rank(case: Case) -> int:
        return int.from_bytes(hashlib.sha256(f"{text}:{case['id']}".encode()).digest()[:8], "big")

    chosen = [c for c in cases if rank(c) % SLICES == 0]
    for template in templates_of(cases):
        if not any(template in c["templates"] for c in chosen):
            chosen.append(min((c for c in cases if template in c["templates"]), key=rank))
    return chosen
