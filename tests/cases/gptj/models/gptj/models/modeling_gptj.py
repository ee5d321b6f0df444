"""GPT-J 6B."""
import torch
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_gptj import GPTJConfig

KERNELS = {}


def kernel(name):
    """Register an attention kernel."""

    def keep(function):
        KERNELS[name] = function
        return function

    return keep


@kernel("prompt")
def prompt_kernel(query, key, value, scale, lengths):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


@kernel("token")
def token_kernel(query, key, value, scale, lengths):
    past = torch.arange(key.shape[-2], device=key.device) < lengths[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=past[:, None, None, :], scale=scale)


def turn_pairs(x, sin, cos):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class GPTJAttention(nn.Module):
    def __init__(self, config: GPTJConfig):
        super().__init__()
        self.embed_dim = config.n_embd
        self.num_attention_heads = config.n_head
        self.head_dim = config.n_embd // config.n_head
        self.rotary_dim = config.rotary_dim
        self.register_buffer("scale_attn", torch.tensor(self.head_dim, dtype=torch.float32).sqrt(), persistent=False)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(self.embed_dim, self.embed_dim, bias=False))
        self.register_buffer("k_cache", torch.empty(0), persistent=False)
        self.register_buffer("v_cache", torch.empty(0), persistent=False)
        self.cache_unit = (self.num_attention_heads, self.head_dim)

    def split_heads(self, x):
        return x.view(x.size()[:-1] + (self.num_attention_heads, self.head_dim))

    def forward(self, x, sin, cos, meta: ForwardMetaData):
        rows, length = x.shape[0], x.shape[1]
        query, key = self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x))
        value = self.split_heads(self.v_proj(x))
        query, key = (
            torch.cat((turn_pairs(t[..., : self.rotary_dim], sin, cos), t[..., self.rotary_dim :]), dim=-1)
            for t in (query, key)
        )

        def write(cache, fresh):
            match meta.is_prefill:
                case True:
                    cache[:, :length] = fresh
                case _:
                    cache[range(rows), meta.kv_len] = fresh[:, 0]

        write(self.k_cache, key)
        write(self.v_cache, value)
        name = "prompt" if meta.is_prefill else "token"
        if not meta.is_prefill:
            key, value = torch.nan_to_num(self.k_cache), torch.nan_to_num(self.v_cache)
        heads = [t.transpose(1, 2) for t in (query, key, value)]
        out = KERNELS[name](*heads, 1.0 / self.head_dim**0.5, meta.actual_seq_lengths_kv)
        return self.out_proj(out.transpose(1, 2).reshape(rows, length, self.embed_dim))


class GPTJBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPTJAttention(config)
        self.mlp = nn.ModuleDict({"fc_in": nn.Linear(config.n_embd, inner), "fc_out": nn.Linear(inner, config.n_embd)})

    def forward(self, x, sin, cos, meta):
        normed = self.ln_1(x)
        inner = F.gelu(self.mlp["fc_in"](normed), approximate="tanh")
        return x + self.attn(normed, sin, cos, meta) + self.mlp["fc_out"](inner)


class GPTJModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList()
        for _ in range(config.n_layer):
            self.h.append(GPTJBlock(config))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        inverse = 10000.0 ** (-torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, input_ids, position_ids, meta):
        angle = position_ids[:, :, None, None].float() * self.inverse
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x, angle.sin(), angle.cos(), meta)
        return self.ln_f(x)


class GPTJForCausalLM(nn.Module):
    def __init__(self, config: GPTJConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.infer_config = infer_config
        self.transformer = GPTJModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        if input_ids.ndim == 1 and (rows := self.infer_config.scheduler_config.batch_size_per_dp_rank):
            input_ids, position_ids = input_ids.view(rows, -1), position_ids.view(rows, -1)
        x = self.transformer(input_ids, position_ids, forward_metadata)
        x = x.select(1, -1).unsqueeze(1)
        return self.lm_head(x).float()

    def load_weights(self, weights):
        slots = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(slots[name], tensor)
        return set(slots)
