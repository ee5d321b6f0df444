"""Facts about the Ascend operators: schemas by release, limits and evidence, and a static check of calls."""

from kvskill.opsinfo.calls import CallProblem, check_calls
from kvskill.opsinfo.facts import Fact, OperatorFacts, load_operators, reference_data
from kvskill.opsinfo.schema import Argument, Schema, parse_schema

__all__ = [
    "Argument",
    "CallProblem",
    "Fact",
    "OperatorFacts",
    "Schema",
    "check_calls",
    "load_operators",
    "parse_schema",
    "reference_data",
]
