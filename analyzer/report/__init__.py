"""What analyze prints: a summary that a person can check in a minute, and the same as one JSON object."""

from kvskill.analyzer.report.record import decision_rows
from kvskill.analyzer.report.summary import render, to_json

__all__ = ["decision_rows", "render", "to_json"]
