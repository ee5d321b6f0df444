"""Config understanding: config.json to facts about the KV cache, keys before class facts."""

from __future__ import annotations

from kvskill.analyzer.config.facts import ConfigFacts, Evidence, KvGroup, LayerFacts, Value
from kvskill.analyzer.config.load import read_config
from kvskill.analyzer.config.understand import understand

__all__ = ["ConfigFacts", "Evidence", "KvGroup", "LayerFacts", "Value", "read_config", "understand"]
