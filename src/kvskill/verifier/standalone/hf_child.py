"""The HF oracle of a standalone verification: writes the checkpoint, then decodes greedily without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvskill.verifier.child.standins import block

__all__ = ["run_hf_greedy"]


def run_hf_greedy(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Checkpoint to job["ckpt"] and, per request, logits [steps, vocab] and tokens [steps] to arrays.npz."""
    block("torch_npu")
    result["phase"] = "import"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import __version__ as version
    from transformers.utils import logging

    from kvskill.verifier.child.weights import fill

    torch.set_num_threads(1)
    result["versions"] = {"torch": torch.__version__, "transformers": version}
    text = Path(job["config"]).read_text(encoding="utf-8")
    values = json.loads(text)
    result["phase"] = "build"
    try:
        config = AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    except (KeyError, ValueError) as error:
        reason = " ".join(str(error).split()).split(" Should contain")[0][:160]
        result["unsupported"] = f"transformers {version} does not build {values['model_type']!r} ({reason})"
        return
    fill(model, int(job["seed"]))
    model.tie_weights()
    result["phase"] = "checkpoint"
    ckpt = Path(job["ckpt"])
    logging.disable_progress_bar()
    model.save_pretrained(ckpt, safe_serialization=True, max_shard_size="100GB")
    (ckpt / "config.json").write_text(text, encoding="utf-8")
    result["phase"] = "run"
    arrays: dict[str, Any] = {}
    with torch.no_grad():
        for request, prompt in enumerate(job["prompt_ids"]):
            tokens, rows = list(prompt), []
            for _ in range(int(job["steps"])):
                row = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
                rows.append(row.numpy())
                tokens.append(int(row.argmax()))
            arrays[f"logits/{request}"] = np.stack(rows)
            arrays[f"tokens/{request}"] = np.array(tokens[len(prompt) :])
    np.savez(Path(job["out"]) / "arrays.npz", **arrays)
