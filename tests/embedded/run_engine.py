"""Child process: an embedded engine drives a made-up model and prints what the model was given, as JSON.

Usage: run_engine.py REPO RUNS. RUNS (JSON): a list of settings: paged, next_n, exe_mode, batch, prompts, steps, wrong
(share of drafted tokens that are wrong, in percent). Prints a list of results. The model's next token is a table
lookup by (token, position), so what it must generate is known without attention; with `paged` it stores the position
of every token in its cache and reads it back, so slots and tables are checked for real.
"""

import importlib
import json
import os
import sys
import types

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.modules["torch_npu"] = None  # transformers must not look at an installed wheel
import torch  # noqa: E402
import transformers  # noqa: E402

transformers.AutoTokenizer  # noqa: B018  import it while torch_npu is hidden
del sys.modules["torch_npu"]
from kvskill.verifier.backend import OpContext, install  # noqa: E402

torch.set_num_threads(1)
install("table", context=OpContext(dtype="bfloat16", block_size=128))
repo, settings = sys.argv[1], {}
sys.path.insert(0, repo)

VOCAB, SPAN = 61, 512
generator = torch.Generator().manual_seed(5)
NEXT = torch.randint(3, VOCAB, (VOCAB, SPAN), generator=generator)
WRONG = torch.randint(0, 100, (VOCAB, SPAN), generator=generator)
seen = []


def expected(prompt, count):
    """Greedy continuation: `count` tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(NEXT[tokens[-1], len(tokens) - 1]))
    return tokens[len(prompt) :]


class Config:
    """Just enough of an HF config."""

    vocab_size = VOCAB
    num_attention_heads = 4
    eos_token_id = None

    @classmethod
    def from_pretrained(cls, path, **kwargs):
        return cls()


class Model(torch.nn.Module):
    """Looks the next token up; its cache holds positions."""

    draft = False

    def __init__(self, config, infer_config, comm_manager=None, prefix=""):
        super().__init__()
        self.infer_config = infer_config
        if hasattr(comm_manager, "register_group"):
            comm_manager.register_group("attn_tp_group", group_num=1, group_size=1)
        self.lm_head = torch.nn.Identity()
        self.model = types.SimpleNamespace(embed_tokens=torch.nn.Identity())
        self.k_cache = self.v_cache = torch.Tensor([])
        self.cache_unit = (4,)
        if settings["paged"]:
            self.get_cache_info = self._cache_info

    def _cache_info(self):
        info = importlib.import_module("executor.core.kv_cache.cache_info")
        size = self.infer_config.scheduler_config.block_size
        names = info.CacheEntry.__dataclass_fields__
        extra = {"block_size": size} if "block_size" in names else {}
        entry = info.CacheEntry(
            cache_name="k_cache",
            attn_type="FullAttention",
            dim=4,
            num_head=1,
            dtype=torch.float32,
            needs_block=True,
            tensor_setter=lambda t: setattr(self, "k_cache", t),
            **extra,
        )
        whole = {} if extra else {"block_size": size}
        layers = [info.LayerCacheInfo(layer_idx=0, caches=[entry])]
        return info.ModelCacheInfo(num_layers=1, layer_infos=layers, **whole)

    def load_weights(self, weights):
        return set()

    def check_cache(self, meta, positions):
        """Write each token's position to its slot; read every visible position back through the table."""
        key = "FullAttention"
        rows = self.k_cache.view(-1, 4)
        rows[meta.slot_mapping[key]] = positions[:, None].float()
        if not meta.is_prefill and meta.block_table[key].any():
            size = self.k_cache.shape[1]
            for row, length in enumerate(meta.actual_seq_lengths_kv.tolist()):
                table = meta.block_table[key][row].long()
                if not table.any():
                    continue
                places = torch.arange(length)
                read = rows[table[places // size] * size + places % size, 0]
                if not torch.equal(read, places.float()):
                    raise AssertionError(f"row {row}: the cache reads {read.tolist()}")

    def forward(self, input_ids, position_ids, forward_metadata, prev_hidden_states=None, **kwargs):
        meta = forward_metadata
        seen.append(describe(self, input_ids, position_ids, meta, kwargs))
        if settings["paged"]:
            self.check_cache(meta, position_ids)
        next_ids = NEXT[input_ids, position_ids + (1 if self.draft else 0)]
        if self.draft:
            off = WRONG[input_ids, position_ids] < settings["wrong"]
            next_ids = torch.where(off, (next_ids + 1) % VOCAB, next_ids)
        logits = torch.nn.functional.one_hot(next_ids, VOCAB).float()
        if meta.is_prefill:
            logits = logits[meta.actual_seq_lengths_cu_q - 1].unsqueeze(1)
        else:
            logits = logits.view(meta.kv_len.shape[0], -1, VOCAB)
        return (logits, torch.zeros(input_ids.shape[0], 2)) if settings["next_n"] else logits


class Draft(Model):
    """The draft model: its token i predicts what follows the main model's token at the same place."""

    draft = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lm_head = None
        self.model.embed_tokens = None


def plain(value):
    """JSON form of a metadata field."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "values": value.tolist()} if value.dim() < 2 else list(value.shape)
    if isinstance(value, dict):
        return {k: {"dtype": str(v.dtype), "values": v.tolist()} for k, v in value.items()}
    return value


def describe(model, input_ids, position_ids, meta, kwargs):
    """Everything a forward pass was given."""
    fields = {name: plain(getattr(meta, name)) for name in meta.__dataclass_fields__}
    return {
        "draft": model.draft,
        "input_ids": input_ids.tolist(),
        "position_ids": position_ids.tolist(),
        "kwargs": sorted(kwargs),
        "mask_upper": bool(meta.attention_mask[0, 1]) and not bool(meta.attention_mask[1, 0]),
        **fields,
    }


class Tokenizer:
    """Prompts are token ids in text form."""

    eos_token_id = None
    pad_token_id = 0

    def __call__(self, text, **_):
        return types.SimpleNamespace(input_ids=torch.tensor([[int(word) for word in text.split()]]))


transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *args, **kwargs: Tokenizer())
core = importlib.import_module("executor.core")
loader = importlib.import_module("executor.model_loader.dummy_loader")
loader.initialize_dummy_weights = lambda model: None


def start():
    """An engine and a scheduler with the current settings."""
    scheduler_config = {
        "batch_size": settings["batch"],
        "max_new_tokens": settings["steps"],
        "block_size": 4,
        "max_prefill_tokens": settings.get("max_prefill_tokens", 0),
    }
    config = core.InferenceConfig.from_dict(
        {
            "model_config": {"with_ckpt": False, "next_n": settings["next_n"], "exe_mode": settings["exe_mode"]},
            "data_config": {"input_truncated_len": max(map(len, settings["prompts"]))},
            "scheduler_config": scheduler_config,
        },
        global_rank=0,
        local_rank=0,
    )
    engine = core.ExecutionEngine(config)
    (getattr(engine, "load_model", None) or engine.init)(Config, Model, Draft if settings["next_n"] else None)
    engine.warm_up()
    return engine, core.Scheduler(engine.tokenizer, config.scheduler_config)


def run():
    """One run: every prompt, in waves of at most one batch."""
    engine, scheduler = start()
    warm = list(seen)
    seen.clear()
    queue, results = list(enumerate(settings["prompts"])), {}
    while queue:
        scheduler.reset()
        wave, queue = queue[: settings["batch"]], queue[settings["batch"] :]
        ids = {scheduler.add_request(" ".join(map(str, prompt))): index for index, prompt in wave}
        while scheduler.has_work():
            if not scheduler.run_step(engine):
                raise RuntimeError("the scheduler has work but ran no batch")
        for request_id, index in ids.items():
            results[index] = scheduler.finished_requests[request_id].output_id_list
    right = all(
        tokens == expected(settings["prompts"][index], len(tokens)) and len(tokens) > settings["steps"]
        for index, tokens in results.items()
    )
    managers = engine.kvcache_manager.single_type_managers if engine.kvcache_manager else ()
    free = [m.get_num_free_blocks() == m.block_pool.num_blocks - 1 for m in managers]
    return {"right": right, "free": free, "warm": warm, "seen": list(seen), "results": results}


out = []
for run_settings in json.loads(sys.argv[2]):
    settings.clear()
    settings.update(run_settings)
    seen.clear()
    out.append(run())
print(json.dumps(out))
