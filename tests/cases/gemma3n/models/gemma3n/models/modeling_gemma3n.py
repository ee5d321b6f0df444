# coding=utf-8
"""Gemma 3n (text part). The upper layers have no keys and values of their own."""
import math
from typing import Dict, Iterable, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_gemma3n import NanoConfig


def gelu(x):
    return F.gelu(x, approximate="tanh")


class NanoRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, with_scale=True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if with_scale else None

    def forward(self, x):
        out = x.float() * torch.pow(x.float().pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        if self.weight is not None:
            out = out * self.weight.float()
        return out.type_as(x)


class NanoScaledEmbedding(nn.Embedding):
    def __init__(self, num_embeddings, embedding_dim, scale):
        super().__init__(num_embeddings, embedding_dim)
        self.scale = scale

    def forward(self, input_ids):
        return super().forward(input_ids) * self.scale


class NanoLaurelBlock(nn.Module):
    def __init__(self, config: NanoConfig):
        super().__init__()
        self.linear_left = nn.Linear(config.hidden_size, config.laurel_rank, bias=False)
        self.linear_right = nn.Linear(config.laurel_rank, config.hidden_size, bias=False)
        self.post_laurel_norm = NanoRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x):
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class NanoMLP(nn.Module):
    def __init__(self, config: NanoConfig, layer_idx: int):
        super().__init__()
        size = config.intermediate_size[layer_idx]
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)
        sparsity = config.activation_sparsity_pattern[layer_idx]
        # keep what lies above the quantile of a normal distribution
        self.std_multiplier = None
        if sparsity > 0.0:
            normal = torch.distributions.normal.Normal(0, 1)
            self.std_multiplier = float(normal.icdf(torch.tensor(sparsity, dtype=torch.float32)))

    def forward(self, x):
        gate = self.gate_proj(x)
        if self.std_multiplier is not None:
            mean = gate.mean(dim=-1, keepdim=True)
            std = gate.std(dim=-1, keepdim=True, unbiased=False)
            gate = F.relu(gate - (mean + std * self.std_multiplier))
        return self.down_proj(gelu(gate) * self.up_proj(x))


class NanoAltUp(nn.Module):
    """Four parallel streams; a layer works on one of them, the others are predicted and corrected."""

    def __init__(self, config: NanoConfig):
        super().__init__()
        self.active = config.altup_active_idx
        self.n = config.altup_num_inputs
        self.correct_output_scale = nn.Parameter(torch.zeros(config.hidden_size))
        self.correction_coefs = nn.Linear(self.n, self.n, bias=False)
        self.prediction_coefs = nn.Linear(self.n, self.n ** 2, bias=False)
        self.modality_router = nn.Linear(config.hidden_size, self.n, bias=False)
        self.router_norm = NanoRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.router_input_scale = config.hidden_size ** -1.0

    def route(self, x):
        return torch.tanh(self.modality_router(self.router_norm(x) * self.router_input_scale).float()).type_as(x)

    def predict(self, streams):
        coefs = self.prediction_coefs(self.route(streams[self.active]))
        coefs = coefs.reshape(*coefs.shape[:-1], self.n, self.n).transpose(-1, -2)
        predictions = torch.matmul(streams.permute(1, 2, 3, 0), coefs).permute(3, 0, 1, 2)
        return (predictions + streams).contiguous()

    def correct(self, predictions, activated):
        coefs = self.correction_coefs(self.route(activated)) + 1.0
        innovation = activated - predictions[self.active]
        return predictions + innovation[None] * coefs.permute(2, 0, 1).unsqueeze(-1)


def apply_rope(x, cos, sin):
    """x: [B, S, N, D]"""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class NanoAttention(nn.Module):
    def __init__(self, config: NanoConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads

        first_shared = config.num_hidden_layers - config.num_kv_shared_layers
        self.is_kv_shared_layer = layer_idx >= first_shared > 0
        last_own = first_shared - 1 - config.layer_types[:first_shared][::-1].index(self.layer_type)
        self.store_kv = not self.is_kv_shared_layer and layer_idx == last_own

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.q_norm = NanoRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        if not self.is_kv_shared_layer:
            self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
            self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
            self.k_norm = NanoRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.v_norm = NanoRMSNorm(self.head_dim, eps=config.rms_norm_eps, with_scale=False)
            self.k_cache = torch.Tensor([])
            self.v_cache = torch.Tensor([])
            self.cache_unit = (self.num_kv_heads, self.head_dim)

    def forward(self, hidden_states, position_embeddings, attention_mask, shared_kv_states, kv_len, total_len):
        bsz, q_len, _ = hidden_states.shape
        cos, sin = position_embeddings
        query = self.q_norm(self.q_proj(hidden_states).view(bsz, q_len, -1, self.head_dim))
        query = apply_rope(query, cos, sin)

        if self.is_kv_shared_layer:
            keys, values = shared_kv_states[self.layer_type]
        else:
            key = self.k_norm(self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim))
            value = self.v_norm(self.v_proj(hidden_states).view(bsz, q_len, -1, self.head_dim))
            torch_npu.scatter_update_(self.k_cache, kv_len, apply_rope(key, cos, sin), 1)
            torch_npu.scatter_update_(self.v_cache, kv_len, value, 1)
            keys, values = self.k_cache[:, :total_len], self.v_cache[:, :total_len]
        if self.store_kv:
            shared_kv_states[self.layer_type] = keys, values

        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
            attn_mask=attention_mask, scale=1.0, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(bsz, q_len, -1))


class NanoDecoderLayer(nn.Module):
    def __init__(self, config: NanoConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.active = config.altup_active_idx
        self.altup_correct_scale = config.altup_correct_scale
        self.self_attn = NanoAttention(config, infer_config, layer_idx)
        self.mlp = NanoMLP(config, layer_idx)
        self.input_layernorm = NanoRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = NanoRMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = NanoRMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = NanoRMSNorm(hidden, eps=eps)
        self.altup = NanoAltUp(config)
        self.laurel = NanoLaurelBlock(config)
        self.per_layer_input_gate = nn.Linear(hidden, config.hidden_size_per_layer_input, bias=False)
        self.per_layer_projection = nn.Linear(config.hidden_size_per_layer_input, hidden, bias=False)
        self.post_per_layer_input_norm = NanoRMSNorm(hidden, eps=eps)

    def forward(self, streams, per_layer_input, **attn_kwargs):
        predictions = self.altup.predict(streams)
        active = predictions[self.active]
        normed = self.input_layernorm(active)
        laurel = self.laurel(normed)
        attn = self.post_attention_layernorm(self.self_attn(normed, **attn_kwargs))
        hidden = (active + attn + laurel) / math.sqrt(2)
        ffw = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        corrected = self.altup.correct(predictions, hidden + ffw)

        first = corrected[self.active].clone()
        if self.altup_correct_scale:
            first = first * self.altup.correct_output_scale
        first = gelu(self.per_layer_input_gate(first)) * per_layer_input
        corrected[1:] += self.post_per_layer_input_norm(self.per_layer_projection(first))
        return corrected


class NanoModel(nn.Module):
    def __init__(self, config: NanoConfig, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        hidden, per_layer = config.hidden_size, config.hidden_size_per_layer_input
        self.embed_tokens = NanoScaledEmbedding(config.vocab_size, hidden, hidden ** 0.5)
        self.embed_tokens_per_layer = NanoScaledEmbedding(
            config.vocab_size_per_layer_input, config.num_hidden_layers * per_layer, per_layer ** 0.5)
        self.per_layer_model_projection = nn.Linear(hidden, config.num_hidden_layers * per_layer, bias=False)
        self.per_layer_projection_norm = NanoRMSNorm(per_layer, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            [NanoDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = NanoRMSNorm(hidden, eps=config.rms_norm_eps)
        extra = config.altup_num_inputs - 1
        self.altup_projections = nn.ModuleList([nn.Linear(hidden, hidden, bias=False) for _ in range(extra)])
        self.altup_unembed_projections = nn.ModuleList([nn.Linear(hidden, hidden, bias=False) for _ in range(extra)])

    def _per_layer_inputs(self, input_ids, inputs_embeds):
        cfg = self.config
        shape = (*input_ids.shape, cfg.num_hidden_layers, cfg.hidden_size_per_layer_input)
        known = torch.where(input_ids < cfg.vocab_size_per_layer_input, input_ids, 0)
        looked_up = self.embed_tokens_per_layer(known).reshape(shape)
        projected = self.per_layer_model_projection(inputs_embeds) * cfg.hidden_size ** -0.5
        projected = self.per_layer_projection_norm(projected.reshape(shape))
        return (projected + looked_up) * 2.0 ** -0.5

    @staticmethod
    def _same_magnitude(x, target):
        magnitude = torch.sqrt(torch.mean(x ** 2, dim=-1, keepdim=True).clamp(min=1e-5))
        return x * target / magnitude

    def _masks(self, position_ids, total_len) -> Dict[str, torch.Tensor]:
        kv_pos = torch.arange(total_len, device=position_ids.device)
        q_pos = position_ids[:, None, :, None]
        causal = kv_pos <= q_pos
        return {
            "full_attention": causal,
            "sliding_attention": causal & (kv_pos > q_pos - self.config.sliding_window),
        }

    def _rope(self, position_ids, dtype):
        tables = {}
        dim = self.config.head_dim
        for layer_type, base in self.config.rope_bases.items():
            inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float, device=position_ids.device) / dim))
            freqs = position_ids[..., None].float() * inv_freq
            emb = torch.cat((freqs, freqs), dim=-1)
            tables[layer_type] = (emb.cos().to(dtype), emb.sin().to(dtype))
        return tables

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        bsz, q_len = input_ids.shape
        if forward_metadata.is_prefill:
            kv_len, total_len = torch.zeros(bsz, dtype=torch.long, device=input_ids.device), q_len
        else:
            kv_len, total_len = forward_metadata.kv_len, int(forward_metadata.kv_len.max()) + 1

        inputs_embeds = self.embed_tokens(input_ids)
        per_layer_inputs = self._per_layer_inputs(input_ids, inputs_embeds)
        target = torch.mean(inputs_embeds ** 2, dim=-1, keepdim=True) ** 0.5
        streams = torch.stack(
            [inputs_embeds] + [self._same_magnitude(proj(inputs_embeds), target) for proj in self.altup_projections])

        masks = self._masks(position_ids, total_len)
        position_embeddings = self._rope(position_ids, inputs_embeds.dtype)
        shared_kv_states: Dict[str, Tuple[torch.Tensor, torch.Tensor]] = {}
        for i, layer in enumerate(self.layers):
            layer_type = self.config.layer_types[i]
            streams = layer(
                streams,
                per_layer_inputs[:, :, i],
                position_embeddings=position_embeddings[layer_type],
                attention_mask=masks[layer_type],
                shared_kv_states=shared_kv_states,
                kv_len=kv_len,
                total_len=total_len,
            )

        target = torch.mean(streams[0] ** 2, dim=-1, keepdim=True) ** 0.5
        outputs = [streams[0]]
        for stream, proj in zip(streams[1:], self.altup_unembed_projections):
            outputs.append(self._same_magnitude(proj(stream), target))
        return self.norm(torch.stack(outputs).mean(dim=0))


class Gemma3nForCausalLM(nn.Module):
    def __init__(self, config: NanoConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.model = NanoModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = self.model(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        logits = self.lm_head(hidden_states[:, -1:]).float()
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name not in params or name == "lm_head.weight":
                continue  # k/v weights of shared layers, tied head
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        self.lm_head.weight = self.model.embed_tokens.weight
        loaded.add("lm_head.weight")
        return loaded
