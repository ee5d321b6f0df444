"""Runs the converted skeleton runner and wrong variants of it in one process; prints one JSON object.

python traps_child.py CONVERTED ORIGINAL CONFIG WORK
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

RUNNER, MODEL = "runner_skel.py", "models/modeling_skel.py"
PREFILL = "forward_metadata.actual_seq_lengths_cu_kv, None, 0"
BACK = "        # back to padded rows"
LAST = "values[torch.arange(values.shape[0], device=values.device), self.last_index]"
LENGTHS_OF_DECODE = "lengths = kv_len + 1\n        counts = lengths.tolist()"
TABLE = (
    "        if not forward_metadata.is_prefill:\n            # decode",
    "        if True:\n            # decode",
)
STEPS, LENGTHS = 24, (5, 2, 3, 17)
BSH = """        if forward_metadata.is_prefill:
            paged_bsh, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
                query_states.flatten(2), key_states.flatten(2), value_states.flatten(2),
                num_query_heads=self.num_heads, num_key_value_heads=self.num_key_value_heads,
                softmax_scale=self.scaling, input_layout="BSH", sparse_mode=3,
                atten_mask=forward_metadata.attention_mask,
                actual_seq_kvlen=forward_metadata.actual_seq_lengths_kv,
            )
            return self.o_proj(paged_bsh)
        # back to padded rows"""
# name -> [(file, old, new), ...]; the numbers are items of the operator sheet's section 16
VARIANTS: dict[str, list[tuple[str, str, str]]] = {
    "good": [],
    "good: prefill through the table": [(MODEL, *TABLE)],
    "3 four-dim cache": [(MODEL, ".view(*paged_key_cache.shape[:2], -1)", "")],
    "10 prompt length is max(cumsum) + 1": [
        (RUNNER, "lengths = real.sum(dim=-1)", "lengths = real.long().cumsum(dim=-1).max(dim=-1).values + 1")
    ],
    "11 decode length without the new token": [
        (RUNNER, LENGTHS_OF_DECODE, LENGTHS_OF_DECODE.replace("= lengths", "= kv_len"))
    ],
    "12 cumulative lengths with a table": [
        (MODEL, *TABLE),
        (MODEL, "paged_kv_lengths = forward_metadata.actual_seq_lengths_kv", "pass"),
    ],
    "13 plain lengths without a table": [(MODEL, PREFILL, PREFILL.replace("_cu_kv", "_kv"))],
    "14 stride is max_seq_len": [(RUNNER, "(self.blocks_per_row * self.block_size)", "self.max_seq_len")],
    "14 blocks rounded down": [(RUNNER, "(max_seq_len + block_size - 1) // block_size", "max_seq_len // block_size")],
    "15 TND_NTD": [(MODEL, 'input_layout="TND"', 'input_layout="TND_NTD"')],
    "15 no mask": [(MODEL, "            atten_mask=forward_metadata.attention_mask,\n", "")],
    "16 BSH with key lengths only": [(MODEL, "        # back to padded rows", BSH)],
    "28 query lengths not cumulative": [(RUNNER, "list(range(1, len(counts) + 1))", "[1] * len(counts)")],
    "kv_len counted on by a layer": [
        (MODEL, BACK, f"        forward_metadata.slot_mapping += 1\n{BACK}")
    ],
    "last column is the last token": [(RUNNER, LAST, "values[:, -1]")],
}


def main() -> None:
    converted, original, config_file, work = map(Path, sys.argv[1:5])
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    from kvskill.verifier.backend import OpContext, install
    from kvskill.verifier.child.target import _alias_dtype, _transformers_without_npu

    _transformers_without_npu()
    install("table", context=OpContext(dtype="bfloat16", block_size=128, null_slots=0))
    import torch
    import transformers

    torch.set_num_threads(1)
    _alias_dtype()
    from kvskill.verifier.standalone.tokens import StubTokenizer

    generator = torch.Generator().manual_seed(5)
    prompts = {
        f"#{i}": torch.randint(3, 300, (n,), generator=generator).tolist() for i, n in enumerate(LENGTHS)
    }
    tokenizer = StubTokenizer(prompts, "right")
    transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *a, **k: tokenizer)
    ckpt = work / "ckpt"
    ckpt.mkdir()
    shutil.copy(config_file, ckpt / "config.json")
    _checkpoint(original, ckpt)
    want: list[Any] = []
    for name in prompts:
        rows, _ = _run(original, ckpt, tokenizer, [name])
        want += rows
    out: dict[str, Any] = {}
    for number, (name, changes) in enumerate(VARIANTS.items()):
        folder = work / f"v{number}"
        shutil.copytree(converted, folder, ignore=shutil.ignore_patterns(".kvskill", "__pycache__"))
        for file, old, new in changes:
            text = (folder / file).read_text(encoding="utf-8")
            assert old in text, (name, old)
            (folder / file).write_text(text.replace(old, new), encoding="utf-8")
        out[name] = _measure(folder, ckpt, tokenizer, list(prompts), want)
    out["overflow"] = _measure(converted, ckpt, tokenizer, list(prompts), want, length=max(LENGTHS) + STEPS - 2)
    tokenizer.padding_side = "left"
    out["good: padded left"] = _measure(converted, ckpt, tokenizer, list(prompts), want)
    tokenizer.padding_side = "right"
    out["graph"] = _graph(converted, ckpt, list(prompts))
    print("RESULT " + json.dumps(out))


def _measure(folder: Path, ckpt: Path, tokenizer: Any, names: list[str], want: list[Any], length: int = 0) -> Any:
    try:
        rows, problems = _run(folder, ckpt, tokenizer, names, length)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    worst, tokens = 0.0, True
    for (logits, picked), (ref, ref_picked) in zip(rows, want, strict=True):
        steps = min(len(logits), len(ref))
        worst = max(worst, float(abs(logits[:steps] - ref[:steps]).max() / abs(ref).max()))
        tokens = tokens and list(picked[:steps]) == list(ref_picked[:steps])
    return {"worst": worst, "tokens": bool(tokens), "problems": problems}


def _graph(folder: Path, ckpt: Path, names: list[str]) -> Any:
    """Decode as one graph for all steps: does it compile whole, once, and give the same tokens?"""
    import torch
    from torch._dynamo.utils import counters

    def outputs(name: str, shapes: Any) -> None:
        torch.library.register_fake(f"npu::{name}", shapes)

    outputs("npu_rms_norm", lambda x, gamma, epsilon=1e-6: (torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))))
    outputs("npu_scatter_nd_update_", lambda cache, indices, updates: cache)
    outputs("npu_fused_infer_attention_score_v2", lambda q, k, v, **rest: (torch.empty_like(q), q.new_empty(0)))
    torch.accelerator.is_available = lambda: False  # the stand-in names a device that this torch was not built for
    torch.accelerator.current_accelerator = lambda *a, **k: None
    module = _modules(folder)
    runner = module.SkelRunner(_settings(ckpt, max(LENGTHS) + STEPS - 1))
    eager = runner.model
    want = runner.model_generate(names)
    compiled = torch.compile(eager, dynamic=True, fullgraph=True, backend="eager")
    runner.model = lambda **kwargs: (eager if kwargs["is_prefill"] else compiled)(**kwargs)
    got = runner.model_generate(names)
    return {"same": bool((got == want).all()), "graphs": counters["stats"]["unique_graphs"]}


def _modules(folder: Path) -> Any:
    for name in [n for n in sys.modules if n.split(".")[0] in ("models", "runner_skel")]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module("runner_skel")
    finally:
        sys.path.remove(str(folder))


def _checkpoint(folder: Path, ckpt: Path) -> None:
    from safetensors.torch import save_file

    from kvskill.verifier.child.weights import fill_named

    module = _modules(folder)
    model = module.SkelForCausalLM(module.SkelConfig.from_pretrained(str(ckpt)))
    fill_named(dict(model.named_parameters()), 7)
    save_file(model.state_dict(), str(ckpt / "model.safetensors"))


def _run(folder: Path, ckpt: Path, tokenizer: Any, names: list[str], length: int = 0) -> Any:
    from kvskill.verifier.standalone.watch import Watch

    module = _modules(folder)
    runner = module.SkelRunner(_settings(ckpt, length or max(LENGTHS) + STEPS - 1))
    watch = Watch(type(runner.model), tokenizer)
    watch.start()
    runner.model_generate(names)
    return watch.rows(), list(dict.fromkeys(watch.problems))


def _settings(ckpt: Path, length: int) -> dict[str, Any]:
    return {
        "model_name": "skel",
        "model_config": {
            "model_path": str(ckpt),
            "max_seq_len": length,  # the longest row fills it to the end
            "pa_block_size": 16,
        },
        "data_config": {"input_truncated_len": max(LENGTHS)},
        "scheduler_config": {"max_new_tokens": STEPS},
    }


if __name__ == "__main__":
    main()
