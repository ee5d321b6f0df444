"""Config understanding: config.json to facts about the KV cache, keys before class facts."""

from __future__ import annotations

from kvskill.analyzer.config.facts import ConfigFacts, Evidence, LayerFacts, Value

__all__ = ["ConfigFacts", "Evidence", "LayerFacts", "Value"]
