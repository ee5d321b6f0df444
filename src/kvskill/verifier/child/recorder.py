"""Stands between the engine and the model: records true logits, then makes the forced token win.

The engine samples greedily. Each forward pass's logits are kept, and the engine gets logits whose argmax is the
next token of the workload instead, so every party decodes the same tokens in every era, with or without MTP.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["Recorder"]


class Recorder:
    """Wraps the workers of one engine. `requests` maps framework request ids to workload numbers."""

    def __init__(self, target: Any, job: dict[str, Any], tap: Any, observer: Any, caches: Any) -> None:
        self.target, self.tap, self.observer, self.caches = target, tap, observer, caches
        self.tokens: list[list[int]] = job["tokens"]
        self.prompts: list[int] = job["prompts"]
        self.next_n = int(job["next_n"])
        self.requests: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.rows: list[int] = []
        self.recording = False
        self.keep_hidden = False
        self.logits: dict[int, dict[int, Any]] = {}
        self.draft: dict[int, dict[int, Any]] = {}
        self.first_draft: dict[int, dict[int, Any]] = {}
        self.hidden: dict[int, dict[str, dict[int, Any]]] = {}
        self.problems: list[dict[str, Any]] = []
        self.first_decode: dict[int, int] = {}
        self.draft_step = 0
        engine = target.engine
        forward = engine.forward_batch

        def forward_batch(batch: Any) -> Any:
            self.rows = [self.requests.get(r.request_id, -1) for r in batch.requests]
            self.ids = [r.request_id for r in batch.requests]
            return forward(batch)

        engine.forward_batch = forward_batch
        self._wrap(engine.main_worker, draft=False)
        if engine.mtp_worker is not None:
            self._wrap(engine.mtp_worker.mtp_model_worker, draft=True)

    def begin(self, keep_hidden: bool) -> None:
        """Start an empty record."""
        self.logits, self.draft, self.hidden, self.first_decode = {}, {}, {}, {}
        self.recording, self.keep_hidden = True, keep_hidden

    def _wrap(self, worker: Any, draft: bool) -> None:
        inference = worker.inference

        def run(model_inputs: Any, is_prefill: bool, *args: Any, **kwargs: Any) -> Any:
            if not self.recording:
                return inference(model_inputs, is_prefill, *args, **kwargs)
            self.caches.before_forward()
            self.tap.clear()
            with self.tap.calls(self.keep_hidden and not draft) as calls:
                output, seconds = inference(model_inputs, is_prefill, *args, **kwargs)
            metadata = model_inputs["forward_metadata"]
            self.draft_step = self.draft_step + 1 if draft else 0
            if not draft:
                self._observe(metadata, calls)
            logits = output[0] if isinstance(output, tuple) else output
            forced = self._take(logits, model_inputs, is_prefill, draft)
            output = (forced, *output[1:]) if isinstance(output, tuple) else forced
            return output, seconds

        worker.inference = run

    def _observe(self, metadata: Any, calls: list[Any]) -> None:
        who = [(r, i, self.prompts[r]) for r, i in zip(self.rows, self.ids, strict=True)]
        self.observer.see(calls, metadata, who)
        if not metadata.is_prefill:
            for row, request in enumerate(self.rows):
                self.first_decode.setdefault(request, int(metadata.actual_seq_lengths_kv[row]))

    def _take(self, logits: Any, inputs: Any, is_prefill: bool, draft: bool) -> Any:
        count = len(self.rows)
        if logits.dim() != 3 or logits.shape[0] < count:
            self._problem("logits-shape", f"{tuple(logits.shape)} for {count} requests")
        rows = logits.shape[1]
        if is_prefill:
            positions = [[self.prompts[r] - 1] for r in self.rows]
            inputs_ok = [[True] for _ in self.rows]
            if logits.shape[0] != count and not self.target.padded:
                self._problem("logits-shape", f"prefill logits {tuple(logits.shape)} for {count} requests")
            if rows != 1 and not self.target.padded:
                self._problem("logits-shape", f"prefill logits {tuple(logits.shape)}, expected [{count}, 1, V]")
            taken = logits[:, -1:, :]
        else:
            width = max(1, inputs["position_ids"].numel() // logits.shape[0])
            all_positions = inputs["position_ids"].reshape(-1, width)[:count].tolist()
            ids = inputs["input_ids"].reshape(-1, width)[:count].tolist()
            positions = all_positions
            inputs_ok = [self._as_forced(r, p, t, draft) for r, p, t in zip(self.rows, positions, ids, strict=True)]
            if rows != width:
                self._problem("logits-shape", f"decode logits {tuple(logits.shape)} for {width} query tokens")
            taken = logits
        forced = torch.zeros_like(logits)
        for row, request in enumerate(self.rows):
            for column, position in enumerate(positions[row][: taken.shape[1]]):
                at = column if not is_prefill else -1
                # later draft steps build on the draft's own hidden states, which no other run repeats
                if inputs_ok[row][column] and self.draft_step <= 1:
                    self._store(request, position, taken[row, column], draft)
                forced[row, at, self._next(request, position, draft)] = 1.0
        if not draft and self.keep_hidden:
            self._store_hidden(positions, inputs_ok, is_prefill)
        return forced

    def _as_forced(self, request: int, positions: list[int], ids: list[int], draft: bool) -> list[bool]:
        """Which query tokens of a row have the workload's tokens up to themselves (a rejected draft has not)."""
        shift = 1 if draft else 0
        known, out, good = self.tokens[request], [], True
        for position, token in zip(positions, ids, strict=True):
            at = position + shift
            good = good and at < len(known) and known[at] == token
            out.append(good)
        return out

    def _next(self, request: int, position: int, draft: bool) -> int:
        """The token that must win. Every third draft is made wrong, so that rejection is exercised too."""
        known = self.tokens[request]
        at = position + (2 if draft else 1)
        token = known[at] if at < len(known) else known[-1]
        if draft and (request + position) % 3 == 2:
            return 3 if token != 3 else 4
        return token

    def _store(self, request: int, position: int, values: Any, draft: bool) -> None:
        book = self.draft if draft else self.logits
        book.setdefault(request, {})[position] = values.detach().float().cpu().numpy().copy()

    def _store_hidden(self, positions: list[list[int]], ok: list[list[bool]], is_prefill: bool) -> None:
        """Hidden rows: prefill packs prompts one after the other; only each prompt's last token is kept."""
        ends: list[list[int]] = []
        start = 0
        for row, request in enumerate(self.rows):
            if is_prefill:
                start += self.prompts[request] if not self.target.padded else 0
                ends.append([start - 1 if not self.target.padded else self.prompts[request] - 1])
            else:
                width = len(positions[row])
                ends.append([row * width + c for c in range(width)])
        for key, candidates in self.tap.rows().items():
            for row, request in enumerate(self.rows):
                for column, position in enumerate(positions[row]):
                    index = ends[row][column]
                    if ok[row][column] and index < candidates[0].shape[0]:
                        kept = np.stack([c[index].float().cpu().numpy() for c in candidates])
                        self.hidden.setdefault(request, {}).setdefault(key, {})[position] = kept

    def _problem(self, kind: str, text: str) -> None:
        if not any(p["kind"] == kind and p["text"] == text for p in self.problems):
            self.problems.append({"kind": kind, "text": text})

    def arrays(self, prefix: str = "") -> dict[str, Any]:
        """Everything recorded since `begin`, for arrays.npz."""
        out: dict[str, Any] = {}
        for name, book in (("logits", self.logits), ("draft", self.draft)):
            for request, found in book.items():
                at = sorted(found)
                out[f"{prefix}{name}/{request}"] = np.stack([found[p] for p in at])
                where = "positions" if name == "logits" else "draft_positions"
                out[f"{prefix}{where}/{request}"] = np.array(at)
        for request, layers in self.hidden.items():
            for key, found in layers.items():
                at = sorted(found)
                out[f"{prefix}hidden/{request}/{key}"] = np.stack([found[p] for p in at], axis=1)
                out[f"{prefix}hidden_positions/{request}/{key}"] = np.array(at)
        return out
