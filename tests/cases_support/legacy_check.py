"""Is the Legacy form of each case right? Run it, and transformers, with the same weights.

    python tests/cases_support/legacy_check.py [case ...] [--tp 2] [--era old|new] [--root DIR] [--json]

For each case: random float32 weights are made with transformers, saved as a checkpoint, and read back through
the model's own `load_weights`. The model is then driven as the framework drives Legacy mode, one prompt at a
time: packed prefill (`kv_len` holds flat slots), then decode steps with forced tokens. Its caches start full of
NaN (a model with paged entries gets blocks of NaN in a permuted order). Every logit row is compared with
transformers' full forward over the same tokens: max |a - b| / max |b|, at most 1e-5. A case whose
`legacy.right_until` names a position must agree before it and disagree after it. Exit 0: all as stated; 1: not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import mini_executor
import npu_standin
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from loader import CASES, Case, load_cases

TOLERANCE = 1e-5
SEED = 20240607


def prompts_of(case: Case, config: Any) -> list[tuple[int, int]]:
    """(prompt length, decode steps) per request: short ones, and past three windows if there are any."""
    runs = [(max(case.legacy.min_prompt, 1), 4), (5, 3), (17, 6)]
    # the number in the file, also where the configuration class drops it: an inert window must stay inert
    stated = json.loads(case.config.read_text(encoding="utf-8")).get("sliding_window")
    windows = [w for w in (stated, getattr(config, "sliding_window", None)) if w and w <= 256]
    if windows:
        window = max(windows)
        runs += [(window - 3, 9), (3 * window + 5, window // 2)]
    return runs


def random_weights(model: torch.nn.Module) -> None:
    """Weights large enough that norms, biases, sinks and masks all show in the logits."""
    generator = torch.Generator().manual_seed(SEED)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, param in model.named_parameters():
            if "embed" in name or name.startswith("lm_head"):
                param.copy_(noise(param) * 0.5)
            elif name.endswith("norm.weight") or "layernorm" in name:
                centre = param.mean().round()  # 1, or 0 where the class computes 1 + weight
                param.copy_(centre + 0.2 * noise(param))
            elif param.dim() == 1:
                param.copy_(0.3 * noise(param) + (1.0 if "scale" in name else 0.0))
            else:
                param.copy_(noise(param) * 1.4 / param.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * noise(buffer))


def import_transformers() -> Any:
    """transformers asks for torch_npu when it is installed; the wheel cannot be imported without CANN."""
    if sys.modules.get("torch_npu") is None:
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
        from transformers.utils import is_torch_npu_available

        assert not is_torch_npu_available()  # and it remembers the answer
        del sys.modules["torch_npu"]
    import transformers

    return transformers


def build_reference(case: Case, folder: Path) -> tuple[Any, torch.nn.Module]:
    """transformers' model of config.json in float32, its checkpoint written to `folder`."""
    transformers = import_transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(case.path)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(SEED)
    model = getattr(transformers, case.hf_architecture)(config).float().eval()
    random_weights(model)
    model.save_pretrained(folder)
    return config, model


def checkpoint(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [item for file in sorted(folder.glob("*.safetensors")) for item in sorted(load_file(file).items())]


def own_class(module: Any, ending: str) -> Any:
    """The class that `module` itself defines and whose name ends so."""
    own = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    (found,) = [v for v in own if isinstance(v, type) and v.__name__.endswith(ending)]
    return found


def build_legacy(case: Case, weights: Path, rank: int, world: int, era: str, lengths: tuple[int, int]) -> Any:
    """The case's own model with the checkpoint loaded through its own `load_weights`."""
    mini_executor.install()
    npu_standin.install()
    if str(case.path) not in sys.path:
        sys.path.insert(0, str(case.path))
    base = f"models.{case.name}.models"
    modeling = importlib.import_module(f"{base}.modeling_{case.name}")
    configuration = importlib.import_module(f"{base}.configuration_{case.name}")
    model_cls = next(
        v for k, v in vars(modeling).items() if k.endswith("ForCausalLM") and v.__module__ == modeling.__name__
    )
    config_cls = next(
        v
        for k, v in vars(configuration).items()
        if k.endswith("Config") and getattr(v, "__module__", "") == configuration.__name__
    )
    settings = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in case.yaml_files]
    same_width = [s for s in settings if (s.get("parallel_config") or {}).get("world_size", 1) == world]
    sections = [*same_width, *settings][0]
    infer_config = mini_executor.make_config(sections, rank, world, *lengths)
    config = config_cls.from_pretrained(
        str(case.path), low_cpu_mem_usage=True, ignore_mismatched_sizes=True, runner_settings=infer_config
    )
    comm = mini_executor.CommManager(infer_config.parallel_config, precreated=era == "old")
    model = model_cls(config, infer_config, comm_manager=comm)
    for param in model.parameters():
        param.data.fill_(float("nan"))
    model.load_weights(iter(checkpoint(weights)))
    missing = {name for name, param in model.named_parameters() if param.isnan().any()}
    if missing:
        raise RuntimeError(f"{case.name}: not loaded: {sorted(missing)}")
    if hasattr(model, "process_weights_after_loading"):
        model.process_weights_after_loading()
    return model.eval(), infer_config


def allocate(model: Any, infer_config: Any) -> None:
    """As the framework does for Legacy, but NaN everywhere: what was not written must not count."""
    length = infer_config.data_config.input_truncated_len + infer_config.scheduler_config.max_new_tokens
    if hasattr(model, "init_cache"):
        model.init_cache(torch.device("cpu"))
    for module in model.modules():
        if not (hasattr(module, "k_cache") and hasattr(module, "v_cache")):
            continue
        if not hasattr(model, "init_cache"):
            module.k_cache = torch.empty((1, length, *module.cache_unit))
            module.v_cache = torch.empty((1, length, *module.cache_unit))
        module.k_cache.fill_(float("nan"))
        module.v_cache.fill_(float("nan"))


class Blocks:
    """Paged entries of one request: blocks in an order of their own, NaN in every slot. Block 0 is the null block."""

    def __init__(self, model: Any, infer_config: Any) -> None:
        size = infer_config.scheduler_config.block_size
        length = infer_config.data_config.input_truncated_len + infer_config.scheduler_config.max_new_tokens
        self.size, count = size, -(-length // size)
        self.table = torch.randperm(count, generator=torch.Generator().manual_seed(SEED)).int() + 1
        self.keys: set[str] = set()
        for layer in model.get_cache_info().layer_infos:
            for entry in layer.caches:
                dims = entry.dim if isinstance(entry.dim, list) else [entry.dim]
                entry.tensor_setter(torch.full((count + 1, size, entry.num_head, *dims), float("nan")))
                self.keys.add(entry.manager_key or entry.attn_type)

    def fields(self, positions: torch.Tensor) -> dict[str, Any]:
        """block_table and slot_mapping of a step that writes `positions`."""
        slots = self.table[positions // self.size].long() * self.size + positions % self.size
        return {
            "block_table": dict.fromkeys(self.keys, self.table[None]),
            "slot_mapping": dict.fromkeys(self.keys, slots),
        }


def drive(model: Any, infer_config: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logit rows for positions prompt-1 .. len(tokens)-1, [n, vocab]."""
    blocks = Blocks(model, infer_config) if hasattr(model, "get_cache_info") else None
    if blocks is None:
        allocate(model, infer_config)
    mask = ~torch.tril(torch.ones((2048, 2048), dtype=torch.bool))
    lengths = torch.tensor([prompt])
    metadata = mini_executor.ForwardMetaData(
        is_prefill=True,
        attention_mask=mask,
        kv_len=torch.arange(prompt),
        actual_seq_lengths_kv=lengths,
        actual_seq_lengths_q=lengths.clone(),
        actual_seq_lengths_cu_kv=lengths.cumsum(0),
        actual_seq_lengths_cu_q=lengths.cumsum(0),
        prompt_tokens=prompt,
        **(blocks.fields(torch.arange(prompt)) if blocks else {}),
    )
    set_metadata = sys.modules["executor.utils.forward_metadata"].__dict__["set_forward_metadata"]
    set_metadata(**vars(metadata))
    rows = []
    with torch.no_grad():
        out = model(
            input_ids=tokens[:prompt].contiguous(),
            position_ids=torch.arange(prompt),
            forward_metadata=metadata,
            **({} if blocks else {"request_offset": 0}),
        )
        rows.append(out[:, -1:, :].reshape(-1))
        for position in range(prompt, len(tokens)):
            kv_len = torch.tensor([position])
            metadata = mini_executor.ForwardMetaData(
                is_prefill=False,
                attention_mask=mask,
                kv_len=kv_len,
                actual_seq_lengths_kv=kv_len + 1,
                actual_seq_lengths_q=torch.ones(1, dtype=torch.long),
                actual_seq_lengths_cu_kv=(kv_len + 1).cumsum(0),
                actual_seq_lengths_cu_q=torch.ones(1, dtype=torch.long),
                **(blocks.fields(kv_len) if blocks else {}),
            )
            set_metadata(**vars(metadata))
            out = model(
                input_ids=tokens[position : position + 1].contiguous(),
                position_ids=kv_len.clone(),
                forward_metadata=metadata,
            )
            if out.dim() != 3 or out.shape[:2] != (1, 1):
                raise RuntimeError(f"decode logits are {tuple(out.shape)}, not [1, 1, V]")
            rows.append(out.reshape(-1))
    return torch.stack(rows).float()


def worker(rank: int, world: int, case: Case, weights: str, era: str, runs: list[Any], out: str) -> None:
    """One rank; rank 0 writes its logit rows to `out`.

    A rank of several ends without teardown: what a process group does there (threads, its store's file) may abort a
    rank whose rows are complete.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers 5 on older config spellings
    if world > 1:
        # a file, since a port may be taken by another check that runs beside this one
        dist.init_process_group("gloo", init_method=f"file://{out}.rendezvous", rank=rank, world_size=world)
    longest = max(len(tokens) for tokens, _ in runs)
    model, infer_config = build_legacy(case, Path(weights), rank, world, era, (longest, 8))
    rows = [drive(model, infer_config, tokens, prompt) for tokens, prompt in runs]
    if rank == 0:
        torch.save(rows, out)
    if world > 1:
        dist.barrier()  # no rank leaves while another still communicates
        sys.stderr.flush()
        os._exit(0)


def spawn(world: int, arguments: tuple[Any, ...]) -> None:
    """Run the ranks; a rank that a signal ended (gloo aborts now and then on a busy machine) is given one more try."""
    try:
        mp.spawn(worker, arguments, nprocs=world)
    except mp.ProcessExitedException as error:
        if error.signal_name is None:
            raise
        print(f"once more, since {error}", file=sys.stderr, flush=True)
        Path(f"{arguments[-1]}.rendezvous").unlink(missing_ok=True)
        mp.spawn(worker, arguments, nprocs=world)


def check(case: Case, world: int, era: str) -> dict[str, Any]:
    """Figures of one case: worst relative error where it must agree, and whether it is as stated."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config, reference = build_reference(case, folder)
        generator = torch.Generator().manual_seed(SEED + 1)
        runs = []
        for prompt, steps in prompts_of(case, config):
            # where later tokens change earlier logits, only the prompt's last row has a counterpart
            steps = 0 if case.ground == "non-causal" else steps
            runs.append((torch.randint(3, config.vocab_size, (prompt + steps,), generator=generator), prompt))
        out = str(folder / "rows.pt")
        if world == 1:
            worker(0, 1, case, temporary, era, runs, out)
        else:
            spawn(world, (world, case, temporary, era, runs, out))
        got = torch.load(out)
    worst, late = 0.0, 0.0
    agreed = True
    for (tokens, prompt), rows in zip(runs, got, strict=True):
        with torch.no_grad():
            want = reference(tokens[None]).logits[0, prompt - 1 :].float()
        error = (rows - want).abs().amax(-1) / want.abs().max()
        error = torch.where(error.isnan(), torch.inf, error)
        positions = torch.arange(prompt - 1, len(tokens))
        limit = case.legacy.right_until
        early = positions < limit if limit is not None else torch.ones_like(positions, dtype=torch.bool)
        worst = max([worst, *error[early].tolist()])
        late = max([late, *error[~early].tolist()])
    agreed = worst <= TOLERANCE and (case.legacy.right_until is None or late > 100 * TOLERANCE)
    return {"case": case.name, "tp": world, "worst": worst, "past_right_until": late, "ok": agreed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--tp", type=int, default=1, help="only the cases that state this width")
    parser.add_argument("--era", choices=("old", "new"), default="new", help="who makes communication groups")
    parser.add_argument("--root", type=Path, default=CASES, help="folder that holds the case folders")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for case in load_cases(tuple(args.cases), args.root):
        if args.tp not in case.tp:
            continue
        try:
            results.append(check(case, args.tp, args.era))
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error} ({Path(line.filename).name}:{line.lineno})"
            results.append({"case": case.name, "tp": args.tp, "ok": False, "error": why})
        if not args.json:
            r = results[-1]
            if "error" in r:
                print(f"BAD {r['case']:14} tp={r['tp']} {r['error']}", flush=True)
                continue
            late = f"  after: {r['past_right_until']:.1e}" if r["past_right_until"] else ""
            print(
                f"{'ok ' if r['ok'] else 'BAD'} {r['case']:14} tp={r['tp']} {r['worst']:.1e}{late}",
                flush=True,
            )
    if args.json:
        print(json.dumps(results))
    return 0 if results and all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
