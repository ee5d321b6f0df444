"""Conversion: facts and manifest give a plan, the plan gives edits, one writer writes."""
