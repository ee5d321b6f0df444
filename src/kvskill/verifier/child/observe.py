"""What the fused attention calls of one forward pass show: window, blocks, tables, lengths, by layer.

These are the facts that turn "logits differ" into a cause. They are taken from the calls themselves (arguments
and shapes) and from the framework's block manager, never from the source code.
"""

from __future__ import annotations

from typing import Any

from kvskill.verifier.child.caches import Caches

__all__ = ["Observer"]

_ATTENTION = "npu_fused_infer_attention_score"
_FAR = 2147483647


def _first(arguments: dict[str, Any], *names: str) -> Any:
    for name in names:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


class Observer:
    """Collects findings (first occurrence and count per layer and kind) and the call form per layer and phase."""

    def __init__(self, caches: Caches, layer_groups: dict[int, str], windows: dict[int, int | None]) -> None:
        self.caches, self.layer_groups, self.windows = caches, layer_groups, windows
        self.findings: dict[tuple[str, int], dict[str, Any]] = {}
        self.forms: dict[str, dict[str, Any]] = {}

    def see(self, calls: list[tuple[int | None, Any]], metadata: Any, requests: list[tuple[int, int, int]]) -> None:
        """Judge one forward pass.

        `calls`: (layer, CallRecord). `requests`: (request number, framework id, prompt length) by batch row.
        """
        tables = getattr(metadata, "block_table", None) or {}
        by_pointer = {t.data_ptr(): key for key, t in tables.items()}
        phase = "prefill" if metadata.is_prefill else "decode"
        for layer, call in calls:
            if not call.op.startswith(_ATTENTION) or layer is None:
                continue
            args = call.arguments
            group = self.layer_groups.get(layer)
            self.forms.setdefault(f"{layer}.{phase}", self._form(args))
            table = args.get("block_table")
            used = by_pointer.get(table.data_ptr) if table is not None and hasattr(table, "data_ptr") else None
            if used is not None and group is not None and used != group:
                self._note("wrong-table", layer, {"group": group, "used": used, "phase": phase})
            if phase == "decode":
                self._decode(layer, group, used, args, tables, metadata, requests)

    def _form(self, args: dict[str, Any]) -> dict[str, Any]:
        return {
            "layout": args.get("input_layout"),
            "sparse_mode": args.get("sparse_mode"),
            "pre_tokens": args.get("pre_tokens"),
            "scale": _first(args, "softmax_scale", "scale"),
            "q_heads": _first(args, "num_query_heads", "num_heads"),
            "kv_heads": args.get("num_key_value_heads"),
            "paged": args.get("block_table") is not None,
            "sinks": args.get("learnable_sink") is not None,
        }

    def _decode(
        self,
        layer: int,
        group: str | None,
        used: str | None,
        args: dict[str, Any],
        tables: dict[str, Any],
        metadata: Any,
        requests: list[tuple[int, int, int]],
    ) -> None:
        lengths = _first(args, "actual_seq_kvlen", "actual_seq_lengths_kv")
        if not isinstance(lengths, list):
            return
        expected = metadata.actual_seq_lengths_kv.tolist()
        mode, pre = args.get("sparse_mode"), int(args.get("pre_tokens") or 0)
        banded = mode == 4 or (args.get("input_layout") == "BSH" and pre not in (0, _FAR))
        window = self.windows.get(layer)
        for row, (request, framework_id, _) in enumerate(requests):
            if row >= len(lengths) or row >= len(expected):
                break
            length = int(lengths[row])
            if length != int(expected[row]):
                self._note("kv-length", layer, {"request": request, "passed": length, "expected": int(expected[row])})
            if not banded:
                visible = length
            elif mode == 4:
                visible = min(length, pre + 1)
            else:
                visible = min(length, pre)
            position = int(expected[row]) - 1
            if window is not None and visible != min(length, window):
                facts = {
                    "request": request,
                    "position": position,
                    "visible": visible,
                    "window": window,
                    "group": group,
                }
                self._note("window", layer, facts)
            if used is None or used not in self.caches.managers:
                continue
            self._blocks(layer, used, tables[used][row].tolist(), length, visible, (request, framework_id, position))

    def _blocks(
        self, layer: int, key: str, table: list[int], length: int, visible: int, who: tuple[int, int, int]
    ) -> None:
        single = self.caches.managers[key]
        size, null = single.block_size, single.block_pool.get_null_block()
        owned = set(self.caches.owned(key, who[1]))
        for block in range(max(0, length - visible) // size, (length - 1) // size + 1):
            if block >= len(table):
                break
            physical = table[block]
            if physical == null or physical not in owned:
                facts = {
                    "request": who[0],
                    "position": who[2],
                    "group": key,
                    "block": block,
                    "physical": physical,
                    "key_position": max(block * size, length - visible),
                }
                self._note("freed-block", layer, facts)

    def _note(self, kind: str, layer: int, facts: dict[str, Any]) -> None:
        found = self.findings.setdefault((kind, layer), {"kind": kind, "layer": layer, "count": 0, **facts})
        found["count"] += 1

    def to_json(self) -> dict[str, Any]:
        """Findings in order of layer, and call forms."""
        return {
            "findings": [v for _, v in sorted(self.findings.items(), key=lambda i: i[0][1])],
            "forms": self.forms,
        }
