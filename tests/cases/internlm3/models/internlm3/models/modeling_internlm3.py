"""InternLM3 with one projection for queries, keys and values, in groups of a key head."""
import functools

import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_internlm3 import InternLM3Config


def rope_tables(config, length):
    inv = config.rope_base ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angle = torch.arange(length).float()[:, None] * inv[None, :]
    angle = torch.cat([angle, angle], dim=1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * y.type_as(x)


class ContiguousKV:
    """Mixin: the key and value memory of one layer."""

    def declare_kv(self, heads, width):
        self.k_cache, self.v_cache = torch.Tensor([]), torch.Tensor([])
        self.cache_unit = (heads * width,)

    def store_kv(self, keys, values, at):
        for memory, fresh in ((self.k_cache, keys), (self.v_cache, values)):
            torch_npu.scatter_update_(memory, at, fresh, -2)


class GroupedAttention(ContiguousKV, nn.Module):
    def __init__(self, config: InternLM3Config, infer_config: InferenceConfig):
        super().__init__()
        tp = infer_config.parallel_config.attn_tp_size
        self.width = config.head_dim
        self.n_q = config.num_attention_heads // tp
        self.n_kv = max(config.num_key_value_heads // tp, 1)
        self.per_group = self.n_q // self.n_kv
        self.wqkv = nn.Linear(config.hidden_size, (self.n_q + 2 * self.n_kv) * self.width, bias=config.qkv_bias)
        self.wo = nn.Linear(self.n_q * self.width, config.hidden_size, bias=config.bias)
        self.declare_kv(self.n_kv, self.width)
        self.attend = functools.partial(
            torch_npu.npu_fused_infer_attention_score,
            num_heads=self.n_q, num_key_value_heads=self.n_kv, input_layout="BSH", scale=self.width ** -0.5,
        )

    def project(self, x):
        rows, cols, _ = x.shape
        qkv = self.wqkv(x).view(rows, cols, self.n_kv, self.per_group + 2, self.width)
        q = qkv[..., : self.per_group, :].reshape(rows, cols, self.n_q, self.width)
        return q, qkv[..., -2, :], qkv[..., -1, :]

    def forward(self, x, cos, sin, meta: ForwardMetaData, at):
        q, k, v = self.project(x)
        q, k = rotate(q, cos, sin).flatten(2), rotate(k, cos, sin).flatten(2)
        v = v.flatten(2)
        self.store_kv(k, v, at)
        options = {"sparse_mode": 3, "atten_mask": meta.attention_mask}
        if not meta.is_prefill:
            k, v = self.k_cache, self.v_cache
            options = {"sparse_mode": 0, "actual_seq_lengths_kv": meta.actual_seq_lengths_kv}
        out, _ = self.attend(q, k, v, **options)
        return self.wo(out)


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.attention = GroupedAttention(config, infer_config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, *step):
        x = x + self.attention(self.attention_norm(x), *step)
        return x + self.feed_forward(self.ffn_norm(x))


class InternLM3Model(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.rows = infer_config.scheduler_config.batch_size_per_dp_rank
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, infer_config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rope_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens, positions, meta: ForwardMetaData):
        tokens, positions = tokens.view(self.rows, -1), positions.view(self.rows, -1)
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        at = tokens.new_zeros(self.rows) if meta.is_prefill else meta.kv_len
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, meta, at)
        x = x[:, -1:] if meta.is_prefill else x
        return self.norm(x)


class InternLM3ForCausalLM(nn.Module):
    def __init__(self, config: InternLM3Config, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = InternLM3Model(config, infer_config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        return self.output(self.model(input_ids, position_ids, forward_metadata)).float()

    def load_weights(self, weights):
        names = {"embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "mlp": "feed_forward",
                 "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "lm_head": "output"}
        params = dict(self.named_parameters())
        parts, done = {}, set()
        for name, tensor in weights:
            if ".self_attn.q_proj" in name or ".self_attn.k_proj" in name or ".self_attn.v_proj" in name:
                head, _, tail = name.partition(".self_attn.")
                which, _, kind = tail.partition("_proj.")
                parts.setdefault(f"{head}.attention.wqkv.{kind}", {})[which] = tensor
                continue
            for old, new in names.items():
                name = name.replace(old, new)
            default_weight_loader(params[name], tensor)
            done.add(name)
        attention = self.model.layers[0].attention
        for name, part in parts.items():
            shape = (attention.n_kv, -1, attention.width) + part["q"].shape[1:]
            fused = torch.cat([part[which].view(shape) for which in "qkv"], dim=1)
            default_weight_loader(params[name], fused.flatten(0, 2))
            done.add(name)
        return done
