"""The target repository: its cache API, its configuration fields, and the operators of its torch_npu."""

from kvskill.analyzer.target.environment import OperatorFacts, probe_operators
from kvskill.analyzer.target.migrations import (
    FieldUse,
    Migration,
    MigrationResult,
    migrations,
    yaml_migrations,
)
from kvskill.analyzer.target.probe import ProbeResult, newest_profile, probe, probe_target
from kvskill.analyzer.target.registry import Registered, Registry

__all__ = [
    "FieldUse",
    "Migration",
    "MigrationResult",
    "OperatorFacts",
    "ProbeResult",
    "Registered",
    "Registry",
    "migrations",
    "newest_profile",
    "probe",
    "probe_operators",
    "probe_target",
    "yaml_migrations",
]
