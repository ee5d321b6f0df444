"""Child process: a Legacy model of an embedded tree against transformers, one prompt at a time.

Usage: run_legacy.py REPO MODEL PROMPTS STEPS. Prints one JSON line: the largest relative logit difference and
the number of compared rows. Random weights go through a safetensors checkpoint, so loading is tested too.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

repo, name, prompts, steps = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.modules["torch_npu"] = None  # transformers must not look at an installed wheel
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)
values = json.loads((Path(repo) / "models" / name / "config.json").read_text(encoding="utf-8"))
values.pop("torch_dtype")
config = transformers.AutoConfig.for_model(**values)
oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
torch.manual_seed(0)
for parameter in oracle.parameters():
    with torch.no_grad():
        noise = torch.randn_like(parameter)
        parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.2 * noise)
del sys.modules["torch_npu"]

from kvskill.verifier.backend import OpContext, install  # noqa: E402

install("table", context=OpContext(dtype="bfloat16", block_size=128))
torch.bfloat16 = torch.float32  # the name models use; float32 separates errors from rounding


class Tokenizer:
    """Prompts are token ids in text form."""

    eos_token_id = None
    pad_token_id = 0

    def __call__(self, text, max_length=None, padding=None, **_):
        ids = [int(word) for word in text.split()]
        if padding == "max_length":
            ids += [self.pad_token_id] * (max_length - len(ids))
        return SimpleNamespace(input_ids=torch.tensor([ids]))


transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *args, **kwargs: Tokenizer())
sys.path.insert(0, repo)
core = importlib.import_module("executor.core")
try:
    registry = importlib.import_module("executor.core.support_models").load_model_classes(name)
except ModuleNotFoundError:
    registry = importlib.import_module("executor.core.entrypoints.support_models").model_dict[name]

longest = max(prompts)
with tempfile.TemporaryDirectory() as folder:
    oracle.save_pretrained(folder)
    (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
    settings = {
        "model_config": {"model_name": name, "model_path": folder, "packed_sequence": False},
        "data_config": {"input_truncated_len": longest},
        "parallel_config": {},
        "scheduler_config": {
            "batch_size": 1,
            "max_new_tokens": steps,
            "input_max_len": longest,
            "block_size": 16,
        },
    }
    infer_config = core.InferenceConfig.from_dict(settings, global_rank=0, local_rank=0)
    engine = core.ExecutionEngine(infer_config)
    (getattr(engine, "load_model", None) or engine.init)(registry[-1], registry[0])
engine.warm_up()
scheduler = core.Scheduler(engine.tokenizer, infer_config.scheduler_config)

worst, rows, logits = 0.0, 0, []
forward = engine.forward_batch
engine.forward_batch = lambda batch: keep(forward(batch))


def keep(output):
    """Remember the last position of every step."""
    logits.append(output["logits"][:, -1].clone())
    return output


for length in prompts:
    scheduler.reset()
    logits.clear()
    ids = torch.randint(3, config.vocab_size, (length,))
    request_id = scheduler.add_request(" ".join(map(str, ids.tolist())))
    while scheduler.has_work():
        if not scheduler.run_step(engine):
            raise RuntimeError("the scheduler has work but ran no batch")
    request = scheduler.finished_requests[request_id]
    with torch.no_grad():
        sequence = torch.cat([ids, torch.tensor(request.output_id_list[:-1])])
        want = oracle(sequence[None]).logits[0, length - 1 :]
    got = torch.cat(logits)
    if got.shape != want.shape:
        raise RuntimeError(f"{tuple(got.shape)} rows against {tuple(want.shape)}")
    worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    rows += got.shape[0]
print(json.dumps({"worst": worst, "rows": rows}))
