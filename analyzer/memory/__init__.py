"""The memory plan: bytes per rank, Legacy against Paged, from the framework's own formulas."""

from kvskill.analyzer.memory.formulas import Formulas, newest_formulas, read_formulas
from kvskill.analyzer.memory.plan import CacheGeometry, parse_what_if, plan_memory

__all__ = ["CacheGeometry", "Formulas", "newest_formulas", "parse_what_if", "plan_memory", "read_formulas"]
