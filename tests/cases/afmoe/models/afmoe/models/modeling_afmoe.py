"""AFMoE: local layers with rotary positions, global ones without; gated attention output."""
from abc import abstractmethod
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_afmoe import AfmoeConfig


class Norm(nn.RMSNorm):
    """RMS norm whose statistics are float32."""

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


def rotary(x, table):
    cos, sin = table
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second.neg(), first), -1) * sin


class CachedAttention(nn.Module):
    """What local and global layers share: projections, cache, attention over it, gate."""

    window = None

    def __init__(self, config: AfmoeConfig, infer_config: InferenceConfig):
        super().__init__()
        tp_size = infer_config.parallel_config.attn_tp_size
        self.num_heads = config.num_attention_heads // tp_size
        self.num_kv_heads = max(config.num_key_value_heads // tp_size, 1)
        self.head_dim = config.head_dim
        self.scale = config.head_dim ** -0.5
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.gate_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Norm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Norm(self.head_dim, eps=config.rms_norm_eps)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads, self.head_dim)

    @abstractmethod
    def positions(self, q, k, table):
        ...

    def remember(self, cache, fresh, meta):
        if meta.is_prefill:
            cache[:, : fresh.size(1)] = fresh
            return fresh
        cache[torch.arange(fresh.size(0), device=fresh.device), meta.kv_len] = fresh.squeeze(1)
        return cache.nan_to_num()

    def forward(self, x, table, masks, meta):
        lead = x.shape[:-1]
        q = self.q_norm(self.q_proj(x).view(*lead, -1, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(*lead, -1, self.head_dim))
        v = self.v_proj(x).view(*lead, -1, self.head_dim)
        q, k = self.positions(q, k, table)
        k_all, v_all = self.remember(self.k_cache, k, meta), self.remember(self.v_cache, v, meta)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k_all.transpose(1, 2), v_all.transpose(1, 2),
            attn_mask=masks[self.window], scale=self.scale, enable_gqa=True,
        )
        y = y.transpose(1, 2).flatten(-2)
        return self.o_proj(y * self.gate_proj(x).sigmoid())


class LocalAttention(CachedAttention):
    def __init__(self, config, infer_config):
        super().__init__(config, infer_config)
        self.window = config.sliding_window

    def positions(self, q, k, table):
        return rotary(q, table), rotary(k, table)


class GlobalAttention(CachedAttention):
    def positions(self, q, k, table):
        return q, k


ATTENTION = {"sliding_attention": LocalAttention, "full_attention": GlobalAttention}


class MLP(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.k, self.scale = config.num_experts_per_tok, config.route_scale
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def forward(self, tokens, bias):
        scores = self.gate(tokens).float().sigmoid()
        picked = (scores + bias).topk(self.k, dim=1)[1]
        weight = scores.gather(1, picked)
        return picked, weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.scale


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.router = Router(config)
        self.shared_experts = MLP(hidden, inner * config.num_shared_experts)
        self.expert_bias = nn.Parameter(torch.zeros(count), requires_grad=False)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x):
        batch, length, hidden = x.shape
        tokens = x.reshape(batch * length, hidden)
        picked, weight = self.router(tokens, self.expert_bias)
        dense = torch.zeros(batch * length, self.gate_up.shape[0], device=x.device).scatter(1, picked, weight)
        gate, up = torch.einsum("th,eih->tei", tokens, self.gate_up).chunk(2, dim=-1)
        each = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.down)
        routed = (each * dense.unsqueeze(-1)).sum(1).to(x.dtype)
        return (routed + self.shared_experts(tokens)).reshape(batch, length, hidden)


class Block(nn.Module):
    def __init__(self, config, infer_config, index):
        super().__init__()
        self.kind = config.layer_types[index]
        self.self_attn = ATTENTION[self.kind](config, infer_config)
        self.mlp = MoE(config) if index >= config.num_dense_layers else MLP(config.hidden_size, config.intermediate_size)
        for name in ("input", "post_attention", "pre_mlp", "post_mlp"):
            setattr(self, f"{name}_layernorm", Norm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, x, table, masks, meta):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), table, masks, meta))
        return x + self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(x)))


class Model(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.register_buffer("frequencies", config.base ** -half, persistent=False)

    def visible(self, meta, length, capacity):
        """Masks by window; a global layer's window is None."""
        if meta.is_prefill:
            now, key = torch.arange(length)[:, None], torch.arange(length)[None]
        else:
            now, key = meta.kv_len.view(-1, 1, 1, 1), torch.arange(capacity).view(1, 1, 1, -1)
        causal = key <= now
        window = self.config.sliding_window
        return OrderedDict([(None, causal), (window, causal & (now - key < window))])

    def forward(self, ids, positions, meta):
        x = self.embed_tokens(ids)
        if self.config.mup_enabled:
            x = x * self.config.hidden_size ** 0.5
        angle = positions.float().unsqueeze(-1) * self.frequencies
        angle = torch.cat((angle, angle), -1).unsqueeze(-2)
        table = angle.cos(), angle.sin()
        masks = self.visible(meta, ids.shape[1], self.layers[0].self_attn.k_cache.shape[1])
        for block in self.layers:
            x = block(x, table, masks, meta)
        return self.norm(x)


class AfmoeForCausalLM(nn.Module):
    def __init__(self, config: AfmoeConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.infer_config = infer_config
        self.model = Model(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @torch.inference_mode()
    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        count = len(forward_metadata.actual_seq_lengths_q)
        x = self.model(input_ids.unflatten(0, (count, -1)), position_ids.unflatten(0, (count, -1)), forward_metadata)
        return self.lm_head(x[:, -1:]).float()

    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        done = set()
        for name, tensor in weights:
            head, _, tail = name.partition(".experts.")
            if not tail:
                default_weight_loader(mine[name], tensor)
                done.add(name)
                continue
            parts = tail.split(".")
            if parts[0].isdigit():
                expert, part = int(parts[0]), parts[1]
                target = f"{head}.down" if part == "down_proj" else f"{head}.gate_up"
                rows = mine[target].data[expert]
                if part != "down_proj":
                    rows = rows.chunk(2)[part == "up_proj"]
                rows.copy_(tensor)
            else:
                target = f"{head}.down" if parts[0] == "down_proj" else f"{head}.gate_up"
                mine[target].data.copy_(tensor)
            done.add(target)
        return done
