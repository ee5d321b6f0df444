"""Template verification: every code template against an independent reference, with a ledger of the evidence."""

from __future__ import annotations

from kvskill.verifier.templates.ledger import LEDGER_NAME, Ledger, read_ledger, stale_entries
from kvskill.verifier.templates.run import TemplateOptions, TemplateReport, verify_templates

__all__ = [
    "LEDGER_NAME",
    "Ledger",
    "TemplateOptions",
    "TemplateReport",
    "read_ledger",
    "stale_entries",
    "verify_templates",
]
