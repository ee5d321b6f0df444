"""progress.md: read for what earlier stages said, appended to with the stage-2 decisions."""

from kvskill.analyzer.progress.facts import ProgressFacts, Said, read_facts
from kvskill.analyzer.progress.record import Record, record_decisions
from kvskill.analyzer.progress.text import ProgressText, find_progress, read_progress_text

__all__ = [
    "ProgressFacts",
    "ProgressText",
    "Record",
    "Said",
    "find_progress",
    "read_facts",
    "read_progress_text",
    "record_decisions",
]
