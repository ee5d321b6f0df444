"""BitNet b1.58 2B4T with unpacked weights."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_bitnet import BitNetConfig


@dataclass
class Step:
    """What all layers of one step share."""

    is_prefill: bool
    write_at: Tensor  # [B]
    visible: Tensor  # [B or 1, 1, S, keys]
    cos: Tensor
    sin: Tensor


def write_rows(memory: Tensor, write_at: Tensor, fresh: Tensor) -> None:
    """memory [B, N, C, D], fresh [B, N, S, D]"""
    slots = write_at[:, None] + torch.arange(fresh.shape[2], device=fresh.device)
    slots = slots[:, None, :, None].expand(-1, fresh.shape[1], -1, fresh.shape[3])
    memory.scatter_(2, slots, fresh)


def attend(step: Step, scale: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=step.visible, scale=scale)
    return out.movedim(1, 2).flatten(-2)


def apply_rope(x: Tensor, step: Step) -> Tensor:
    half = x.size(-1) // 2
    return x * step.cos + torch.cat((-x[..., half:], x[..., :half]), -1) * step.sin


class BitNetRMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class BitNetAttention(nn.Module):
    def __init__(self, cfg: BitNetConfig, runtime: InferenceConfig):
        super().__init__()
        tp = runtime.parallel_config.attn_tp_size
        self.head_dim = cfg.hidden_size // cfg.num_attention_heads
        self.heads = cfg.num_attention_heads // tp
        self.kv_heads = max(1, cfg.num_key_value_heads // tp)
        self.q_proj = nn.Linear(cfg.hidden_size, self.heads * self.head_dim, bias=cfg.attention_bias)
        self.k_proj = nn.Linear(cfg.hidden_size, self.kv_heads * self.head_dim, bias=cfg.attention_bias)
        self.v_proj = nn.Linear(cfg.hidden_size, self.kv_heads * self.head_dim, bias=cfg.attention_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, cfg.hidden_size, bias=cfg.attention_bias)
        self.attn_sub_norm = BitNetRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.scaling = self.head_dim**-0.5
        self.k_cache: Tensor = torch.empty(0)
        self.v_cache: Tensor = torch.empty(0)

    def heads_first(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, self.head_dim)).movedim(-2, 1)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        query = apply_rope(self.heads_first(self.q_proj(x), self.heads), step)
        key = apply_rope(self.heads_first(self.k_proj(x), self.kv_heads), step)
        value = self.heads_first(self.v_proj(x), self.kv_heads)
        write_rows(self.k_cache, step.write_at, key)
        write_rows(self.v_cache, step.write_at, value)
        if not step.is_prefill:
            key, value = self.k_cache.nan_to_num(), self.v_cache.nan_to_num()
        mixed = attend(step, self.scaling, query, key, value)
        return self.o_proj(self.attn_sub_norm(mixed))


class BitNetMLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)
        self.ffn_sub_norm = BitNetRMSNorm(cfg.intermediate_size, cfg.rms_norm_eps)

    def forward(self, x):
        return self.down_proj(self.ffn_sub_norm(F.relu(self.gate_proj(x)) ** 2 * self.up_proj(x)))


class BitNetBlock(nn.Module):
    def __init__(self, cfg, runtime):
        super().__init__()
        self.self_attn = BitNetAttention(cfg, runtime)
        self.mlp = BitNetMLP(cfg)
        self.input_layernorm = BitNetRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = BitNetRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x, step):
        h = x + self.self_attn(self.input_layernorm(x), step)
        return h + self.mlp(self.post_attention_layernorm(h))


class BitNetModel(nn.Module):
    def __init__(self, cfg, runtime):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList([BitNetBlock(cfg, runtime) for _ in range(cfg.num_hidden_layers)])
        self.norm = BitNetRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        dim = cfg.hidden_size // cfg.num_attention_heads
        self.register_buffer("inv_freq", cfg.rope_theta ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)

    def make_step(self, positions: Tensor, meta: ForwardMetaData) -> Step:
        freqs = positions.float()[:, None, :, None] * self.inv_freq
        angle = torch.cat((freqs, freqs), dim=-1)
        if meta.is_prefill:
            size = positions.shape[1]
            visible = meta.attention_mask[:size, :size].logical_not()[None, None]
            write_at = positions.new_zeros(positions.shape[0])
        else:
            write_at = meta.kv_len
            capacity = self.layers[0].self_attn.k_cache.shape[2]
            visible = torch.arange(capacity, device=positions.device).view(1, 1, 1, -1) <= write_at.view(-1, 1, 1, 1)
        return Step(meta.is_prefill, write_at, visible, angle.cos(), angle.sin())

    def forward(self, ids, positions, meta):
        x = self.embed_tokens(ids)
        step = self.make_step(positions, meta)
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)


class BitNetForCausalLM(nn.Module):
    def __init__(self, config: BitNetConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = BitNetModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        batch = self.infer_config.scheduler_config.batch_size_per_dp_rank
        capacity = self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens
        for layer in self.model.layers:
            attn = layer.self_attn
            shape = (batch, attn.kv_heads, capacity, attn.head_dim)
            attn.k_cache = torch.zeros(shape, dtype=attn.k_proj.weight.dtype, device=device)
            attn.v_cache = torch.zeros(shape, dtype=attn.v_proj.weight.dtype, device=device)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        batch = self.infer_config.scheduler_config.batch_size_per_dp_rank
        ids, positions = input_ids.reshape(batch, -1), position_ids.reshape(batch, -1)
        x = self.model(ids, positions, forward_metadata)
        if forward_metadata.is_prefill:
            last = positions.argmax(dim=-1)
            x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1]))
        return self.lm_head(x).float()

    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(mine[name], tensor)
        return set(mine)
