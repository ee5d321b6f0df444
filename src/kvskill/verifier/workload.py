"""The tokens that every party sees: prompts, forced decode tokens, and the waves they run in.

Everything follows from one seed, so a failure can be repeated. Decode tokens are forced: otherwise one flipped
argmax ends the comparison. Token 0 (padding in old eras) and the special ids 1 and 2 are never used.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvskill.verifier.modelconfig import SmallConfig
from kvskill.verifier.options import DEFAULT_PROMPTS, VerifyOptions

__all__ = ["Workload", "make_workload"]

FIRST_TOKEN = 3


@dataclass(frozen=True)
class Workload:
    """`tokens[r]` is request r's whole sequence (prompt and forced tokens); `prompts[r]` its prompt length.

    `steps` decode steps follow each prefill. `waves` lists request numbers, at most `batch_size` in each.
    """

    prompts: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    steps: int
    block_size: int
    batch_size: int
    waves: tuple[tuple[int, ...], ...]
    seed: int
    window: int | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values for a child's job file."""
        return {
            "prompts": list(self.prompts),
            "tokens": [list(t) for t in self.tokens],
            "steps": self.steps,
            "block_size": self.block_size,
            "batch_size": self.batch_size,
            "waves": [list(w) for w in self.waves],
            "seed": self.seed,
            "window": self.window,
        }


def make_workload(options: VerifyOptions, small: SmallConfig) -> Workload:
    """Prompts, tokens and waves for these options and this config."""
    block, window = options.block_size, small.window
    prompts = list(options.prompts or DEFAULT_PROMPTS)
    notes = []
    if options.long:
        prompts.append(3 * (window or block) + 2 * block + 3)
    elif window is not None and options.prompts is None:
        prompts.append(window + 2 * block + 5)  # two blocks left of the window share the null block
    if window is not None and max(prompts) + options.decode_steps <= window:
        notes.append(f"no request is longer than the window ({window}): the window was not tested")
    if max(prompts) + options.decode_steps <= block:
        notes.append(f"no request is longer than one block ({block}): block boundaries were not tested")
    vocab = int(_inner(small.values)["vocab_size"])
    rng = random.Random(options.seed)
    tokens = tuple(
        tuple(rng.randrange(FIRST_TOKEN, vocab) for _ in range(length + options.decode_steps + options.mtp + 1))
        for length in prompts
    )
    size = options.batch_size
    waves = tuple(tuple(range(i, min(i + size, len(prompts)))) for i in range(0, len(prompts), size))
    return Workload(
        prompts=tuple(prompts),
        tokens=tokens,
        steps=options.decode_steps,
        block_size=block,
        batch_size=size,
        waves=waves,
        seed=options.seed,
        window=window,
        notes=tuple(notes),
    )


def _inner(values: dict[str, Any]) -> dict[str, Any]:
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(values.get(key), dict) and "vocab_size" in values[key]:
            return dict(values[key])
    return values
