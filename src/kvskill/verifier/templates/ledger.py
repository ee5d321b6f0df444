"""The evidence ledger `templates/verification.json`: what each template's present text was verified against.

Figures are the largest relative error of a case, rounded up to one digit, so that a re-run elsewhere can be held
against them. There are no timestamps: equal evidence gives equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.opsinfo.templates import list_templates

__all__ = ["LEDGER_NAME", "Ledger", "read_ledger", "round_up", "stale_entries", "template_hashes"]

LEDGER_NAME = "verification.json"
SCHEMA = 1


@dataclass
class Ledger:
    """`templates[name]` holds the evidence of one template; `cases[id]` the figure of one case."""

    tool: dict[str, Any] = field(default_factory=dict)
    templates: dict[str, dict[str, Any]] = field(default_factory=dict)
    cases: dict[str, float] = field(default_factory=dict)

    def dump(self) -> str:
        """JSON text; equal ledgers give equal text."""
        data = {"schema": SCHEMA, "tool": self.tool, "templates": self.templates, "cases": self.cases}
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def default_path() -> Path:
    """The ledger beside the templates that are in use."""
    return Path(str(resources.files("kvskill").joinpath("templates"))) / LEDGER_NAME


def read_ledger(path: Path) -> Ledger:
    """Read a ledger; an absent one is empty. Raises InputError KV442 for a broken one."""
    if not path.is_file():
        return Ledger()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Ledger(dict(data["tool"]), dict(data["templates"]), dict(data["cases"]))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InputError(
            Diagnostic(
                "KV442",
                Severity.ERROR,
                f"The evidence ledger cannot be read ({exc}).",
                "Write it anew: `kvskill verify --templates`.",
                Span(str(path)),
            )
        ) from None


def template_hashes() -> dict[str, str]:
    """sha256 of each packaged template's text, by name."""
    root = resources.files("kvskill").joinpath("templates")
    out = {}
    for name, info in list_templates().items():
        data = root.joinpath(*info.file.split("/")).read_bytes().replace(b"\r\n", b"\n")
        out[name] = hashlib.sha256(data).hexdigest()
    return out


def stale_entries(ledger: Ledger) -> list[str]:
    """What the ledger does not vouch for: templates that are new, changed or gone, and cases not in the matrix."""
    from kvskill.verifier.templates.cases import all_cases

    now = template_hashes()
    out = [f"{name} is not in the ledger" for name in sorted(set(now) - set(ledger.templates))]
    out += [f"{name} is in the ledger but not among the templates" for name in sorted(set(ledger.templates) - set(now))]
    for name in sorted(set(now) & set(ledger.templates)):
        if ledger.templates[name].get("sha256") != now[name]:
            out.append(f"{name} has changed since it was verified")
    ids = {case["id"] for case in all_cases()}
    out += [f"case {i} has no figure" for i in sorted(ids - set(ledger.cases))]
    out += [f"case {i} is no longer in the matrix" for i in sorted(set(ledger.cases) - ids)]
    return out


def round_up(value: float) -> float:
    """One significant digit, upwards: 3.4e-7 becomes 4e-7."""
    if value <= 0 or not math.isfinite(value):
        return value
    exponent = math.floor(math.log10(value))
    return float(f"{math.ceil(value / 10**exponent - 1e-9)}e{exponent}")
