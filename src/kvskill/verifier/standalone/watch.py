"""Watches the model that a runner drives: logits of each step, the tokens fed back, and the paged metadata."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from kvskill.analyzer.runner.walkrun import CACHES

__all__ = ["Watch"]


class Watch:
    """Wraps the forward of the model class; `start` begins a run, `rows` gives its figures by prompt.

    A run may go through its prompts in several batches (one prompt each, in the extreme): prefill after decode begins
    the next batch.
    """

    def __init__(self, cls: type, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.steps: list[dict[str, Any]] = []  # of the present batch
        self.done: list[list[dict[str, Any]]] = []  # batches of the run before it
        self.problems: list[tuple[str, str]] = []  # (slots, lengths or tokens; what is wrong)
        self.facts: dict[str, Any] = {"steps": 0}
        self.storage: Any = None
        original = cls.forward  # type: ignore[attr-defined]
        signature = inspect.signature(original)

        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(model, *args, **kwargs)
            self._seen(dict(signature.bind(model, *args, **kwargs).arguments), out)
            return out

        cls.forward = forward  # type: ignore[attr-defined]

    def start(self) -> None:
        """Forget the steps of the last run."""
        self.steps, self.done = [], []
        self.tokenizer.batches.clear()

    def _seen(self, kwargs: dict[str, Any], out: Any) -> None:
        logits = out.logits if hasattr(out, "logits") else out[0] if isinstance(out, tuple) else out
        ids: Any = kwargs["input_ids"]
        prefill = self._is_prefill(ids, kwargs)  # several prefill calls are mini-batches of one prompt batch
        if prefill and len(self.steps) > 1:
            self.done.append(self.steps)
            self.steps = []
        row = len(self.steps[0]["tokens"]) if prefill and self.steps else 0
        mask: Any = self.tokenizer.mask_of(ids, row) if prefill else None
        if logits.dim() == 2:
            picked = logits
        elif logits.shape[1] == 1 or not prefill:
            picked = logits[:, -1]
        else:
            columns = mask * np.arange(mask.shape[1])
            picked = logits[range(logits.shape[0]), columns.argmax(dim=1)]
        picked = picked.float().cpu().numpy()
        fed = ids.cpu().numpy()
        if not prefill:
            want = self.steps[-1]["tokens"]
            if fed.shape != (len(want), 1) or (fed[:, 0] != want).any():
                self.problems.append(
                    ("tokens", f"step {len(self.steps)} gets other tokens than the last step's best ones")
                )
        meta = kwargs.get("forward_metadata")
        if meta is not None:
            self._metadata(meta, kwargs, mask if prefill else None, row)
        step = {"logits": picked, "tokens": picked.argmax(axis=-1)}
        if prefill and row:
            self.steps[0] = {k: np.concatenate([self.steps[0][k], step[k]]) for k in step}
        else:
            self.steps.append(step)

    def _is_prefill(self, ids: Any, kwargs: dict[str, Any]) -> bool:
        said = kwargs.get("is_prefill", getattr(kwargs.get("forward_metadata"), "is_prefill", None))
        return said if isinstance(said, bool) else not self.steps or ids.shape[1] > 1

    def _metadata(self, meta: Any, kwargs: dict[str, Any], mask: Any, row: int) -> None:
        """Slots against the block table, lengths against positions: recomputed here, element by element.

        `mask` is the padding mask of a prefill call (None: decode), `row` the first row of its mini-batch.
        """
        pairs: Any = next((kwargs[k] for k in CACHES if k in kwargs), None)
        size = int(pairs[0][0].shape[1])
        table = meta.block_table.tolist()
        before = self.facts.get("lengths", [])
        lengths = [n + 1 for n in before] if mask is None else [int(m.sum()) for m in mask]
        slots = []
        for b, length in enumerate(lengths):
            for p in range(length - 1 if mask is None else 0, length):
                slots.append(table[b][p // size] * size + p % size)
        if slots != meta.slot_mapping.tolist():
            self.problems.append(
                ("slots", "slots are not block_table[row, position // size] * size + position % size")
            )
        if list(map(int, meta.actual_seq_lengths_kv)) != lengths:
            self.problems.append(("lengths", f"key lengths {list(meta.actual_seq_lengths_kv)} are not {lengths}"))
        if meta.kv_len.tolist() != lengths:
            self.problems.append(("lengths", "kv_len is not the number of tokens in the cache"))
        if mask is None and len(self.steps) == 1:
            self.facts["first_decode"] = (self.facts["first_decode"] if self.done else []) + lengths
            self.facts["batch"] = max(self.facts["batch"] if self.done else 0, len(lengths))
        self.facts["lengths"] = lengths if mask is None else before[:row] + lengths
        self.facts["steps"] += 1
        self.facts["cache_shapes"] = [list(t.shape) for t in pairs[0]]
        if mask is None:
            self.facts["table"] = [len(table), len(table[0])]
        self.facts["table_dtype"] = str(meta.block_table.dtype)
        self.facts["storages"] = len({t.data_ptr() for pair in pairs for t in pair})
        self.facts["layers"] = len(pairs)

    def rows(self) -> list[tuple[Any, Any]]:
        """(logits [steps, vocab], tokens [steps]) by prompt."""
        out: list[tuple[Any, Any]] = []
        for steps in filter(None, [*self.done, self.steps]):
            logits = np.stack([s["logits"] for s in steps])
            tokens = np.stack([s["tokens"] for s in steps])
            out += [(logits[:, b], tokens[:, b]) for b in range(logits.shape[1])]
        return out
