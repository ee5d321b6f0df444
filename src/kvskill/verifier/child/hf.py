"""The HF oracle: makes the checkpoint, then runs every request in one forward pass.

Decode tokens are forced, so one pass over prompt and forced tokens gives the logits of every step. That is an
independent definition: no cache, no blocks, the model's own masks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvskill.verifier.child.standins import block

__all__ = ["run_hf"]



def run_hf(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the checkpoint to job["ckpt"], then logits (and hidden states by layer) to arrays.npz."""
    block("torch_npu")  # an installed wheel without CANN breaks the import of transformers
    result["phase"] = "import"
    import torch

    torch.set_num_threads(int(job["threads"]))
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import __version__ as version

    result["versions"] = {"torch": torch.__version__, "transformers": version}
    text = Path(job["config"]).read_text(encoding="utf-8")
    values = json.loads(text)
    result["phase"] = "build"
    try:
        config = AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})
        inner = config.get_text_config() if hasattr(config, "get_text_config") else config
        model = _build(AutoModelForCausalLM, config, inner)
    except (KeyError, ValueError) as error:
        reason = " ".join(str(error).split()).split(" Should contain")[0][:160]
        result["unsupported"] = f"transformers {version} does not build {values['model_type']!r} ({reason})"
        return
    from kvskill.verifier.child.weights import fill

    model = model.float().eval()
    fill(model, int(job["seed"]))
    if job["dtype"] == "bf16":  # the weights that the target holds; HF still computes in float32
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
    model.tie_weights()
    result["phase"] = "checkpoint"
    _save(model, Path(job["ckpt"]), text)  # the text: HF changes nested values in place
    result["attention"] = _attention_facts(model)
    result["phase"] = "run"
    np.savez(Path(job["out"]) / "arrays.npz", **_run(model, job))


def _build(auto: Any, config: Any, inner: Any) -> Any:
    import torch

    for kwargs in ({"dtype": torch.float32}, {"torch_dtype": torch.float32}):
        try:
            return auto.from_config(config, attn_implementation="eager", **kwargs)
        except TypeError:
            continue
    return auto.from_config(inner, attn_implementation="eager")


def _save(model: Any, ckpt: Path, config_text: str) -> None:
    """Save as HF does, keep the config as it was made, then mark the checkpoint as complete."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(ckpt, safe_serialization=True, max_shard_size="100GB")
    (ckpt / "config.json").write_text(config_text, encoding="utf-8")
    (ckpt / "READY").write_text("hf", encoding="utf-8")


def _attention_facts(model: Any) -> dict[str, Any]:
    """Per layer: the scale and window of HF's own attention module, to name causes."""
    out: dict[str, Any] = {}
    for name, module in model.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("self_attn", "attn", "attention") and ".layers." in f".{name}":
            index = name.split("layers.")[-1].split(".")[0]
            if not index.isdigit():
                continue
            scale = getattr(module, "scaling", None)
            out[index] = {
                "scale": float(scale) if isinstance(scale, (int, float)) else None,
                "window": getattr(module, "sliding_window", None),
                "sinks": hasattr(module, "sinks"),
            }
    return out


def _run(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from kvskill.verifier.child.hidden import LayerTap

    work = job["workload"]
    arrays: dict[str, Any] = {}
    with LayerTap(model) as tap, torch.no_grad():
        for request, tokens in enumerate(work["tokens"]):
            last = int(work["prompts"][request]) - 1
            tap.clear()
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, last:]
            arrays[f"logits/{request}"] = logits.float().numpy()
            arrays[f"positions/{request}"] = np.arange(last, last + logits.shape[0])
            for key, tensors in tap.rows().items():
                arrays[f"hidden/{request}/{key}"] = np.stack([t[last:].float().numpy() for t in tensors])
    return arrays
