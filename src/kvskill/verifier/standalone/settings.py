"""The settings that a runner is driven with: the folder's own YAML, the test's sizes in every key that holds one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.verifier.discover import ModelUnderTest
from kvskill.verifier.plan import TP_KEYS

__all__ = ["Sizes", "folder_settings", "runner_settings"]

_KINDS = ("attn", "moe", "embed", "lmhead", "dense", "o_proj")


@dataclass(frozen=True)
class Sizes:
    """What a run needs: prompts of at most `longest` tokens in `rows` rows, `steps` new tokens, ranks.

    The cache is exactly as long as the longest row gets (prompt and all but the last new token, which is not cached),
    so that the run fills it to the end; `short` takes positions away from it.
    """

    longest: int
    rows: int
    steps: int
    block_size: int
    tp: int = 1
    short: int = 0

    @property
    def length(self) -> int:
        """Positions of a row of the cache."""
        return self.longest + self.steps - 1 - self.short


def folder_settings(model: ModelUnderTest) -> dict[str, Any]:
    """The first YAML of the folder with a `model_config`; empty where none has one. Raises InputError KV435."""
    for path in sorted(model.folder.rglob("*.y*ml")):
        if ".kvskill" in path.parts:
            continue
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as exc:
            line = getattr(getattr(exc, "problem_mark", None), "line", 0) + 1
            fact = f"A YAML file of the model cannot be read ({' '.join(str(exc).split())[:120]})."
            where = Span(path.relative_to(model.root).as_posix(), line)
            raise InputError(
                Diagnostic("KV435", Severity.ERROR, fact, "Correct it: runners take their settings from it.", where)
            ) from None
        if isinstance(loaded, dict) and isinstance(loaded.get("model_config"), dict):
            return loaded
    return {}


def runner_settings(
    data: dict[str, Any], name: str, sizes: Sizes, ckpt: Path, named: bool = False
) -> dict[str, Any]:
    """`data` (of `folder_settings`) with the test's sizes. `named`: there is no checkpoint to load."""
    length, rows, tp = sizes.length, sizes.rows, sizes.tp
    out = {"model_name": name, **data, "model_path": str(ckpt), "world_size": tp, "exe_mode": "eager"}
    sections: dict[str, dict[str, Any]] = {}
    for section in ("model_config", "data_config", "parallel_config", "scheduler_config"):
        found = data.get(section)
        sections[section] = dict(found) if isinstance(found, dict) else {}
    sections["model_config"].update(
        model_path=str(ckpt),
        model_name=name,
        with_ckpt=not named,
        exe_mode="eager",
        enable_profiler=False,
        enable_cache_compile=False,
        enable_online_split_weight=True,
        enable_weight_nz=False,
        max_seq_len=length,
        pa_max_length=length,
        pa_block_size=sizes.block_size,
    )
    sections["data_config"].update(
        dataset="default",
        input_max_len=sizes.longest,
        input_truncated_len=sizes.longest,
        max_new_tokens=sizes.steps,
        batch_size=rows,
        batch_size_per_rank=rows,
        max_position_embeddings=length,
    )
    sections["scheduler_config"].update(
        batch_size=rows, max_new_tokens=sizes.steps, max_prefill_tokens=sizes.longest * rows
    )
    parallel = dict.fromkeys(sections["parallel_config"], 1)
    parallel.update({f"{kind}_{way}_size": 1 for kind in _KINDS for way in ("tp", "dp")})
    parallel.update({"moe_ep_size": 1, "world_size": tp}, **dict.fromkeys(TP_KEYS, tp))
    sections["parallel_config"] = parallel
    return {**out, **sections}
