# coding=utf-8
# Adapted from https://github.com/huggingface/transformers (gpt_oss), Apache-2.0.
# Inference only. KV cache in Legacy mode, attention in plain PyTorch.

import math
from typing import Dict, Iterable, Optional, Set, Tuple

import torch
from torch import nn
import torch.distributed as dist
import torch_npu

from executor.core.config import InferenceConfig, CommManager
from executor.utils.forward_metadata import ForwardMetaData
from executor.model_loader.weight_utils import default_weight_loader
from .configuration_gptoss import GptOssConfig


class GptOssRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden_states).to(input_dtype)  # main diff with Llama


class GptOssExperts(nn.Module):
    """All experts on all tokens; the router scores zero out what was not chosen."""

    def __init__(self, config: GptOssConfig, infer_config: InferenceConfig):
        super().__init__()
        self.moe_tp_size = infer_config.parallel_config.moe_tp_size
        self.num_experts = config.num_local_experts
        self.hidden_size = config.hidden_size
        self.expert_dim = config.intermediate_size // self.moe_tp_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_size, 2 * self.expert_dim))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(self.num_experts, 2 * self.expert_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.expert_dim, self.hidden_size))
        self.down_proj_bias = nn.Parameter(torch.empty(self.num_experts, self.hidden_size))
        self.alpha = 1.702
        self.limit = config.swiglu_limit

    def forward(self, hidden_states: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        batch_size = hidden_states.shape[0]
        hidden_states = hidden_states.reshape(-1, self.hidden_size)
        hidden_states = hidden_states.repeat(self.num_experts, 1).view(self.num_experts, -1, self.hidden_size)

        gate_up = torch.bmm(hidden_states, self.gate_up_proj) + self.gate_up_proj_bias[:, None, :]
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        glu = gate * torch.sigmoid(gate * self.alpha)
        next_states = torch.bmm((up + 1) * glu, self.down_proj) + self.down_proj_bias[:, None, :]

        # [E, T, H] * [E, T, 1]
        next_states = next_states.view(self.num_experts, batch_size, -1, self.hidden_size)
        next_states = next_states * routing_weights.transpose(0, 1).view(self.num_experts, batch_size, -1)[..., None]
        next_states = next_states.sum(dim=0)
        if self.moe_tp_size > 1:
            dist.all_reduce(next_states)
        return next_states


class GptOssTopKRouter(nn.Module):
    def __init__(self, config: GptOssConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.hidden_dim = config.hidden_size
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_local_experts))

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = nn.functional.linear(hidden_states, self.weight, self.bias)
        top_value, top_index = torch.topk(router_logits, self.top_k, dim=-1)
        top_value = torch.softmax(top_value, dim=1, dtype=top_value.dtype)
        return torch.zeros_like(router_logits).scatter_(1, top_index, top_value)


class GptOssMLP(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.router = GptOssTopKRouter(config)
        self.experts = GptOssExperts(config, infer_config)

    def forward(self, hidden_states):
        router_scores = self.router(hidden_states)  # (tokens, num_experts)
        return self.experts(hidden_states, router_scores)


class YarnRotaryEmbedding(nn.Module):
    def __init__(self, config: GptOssConfig):
        super().__init__()
        dim, base, yarn = config.head_dim, config.rope_theta, config.yarn
        factor, old_len = yarn["factor"], yarn["original_max_position_embeddings"]

        def correction_dim(num_rotations):
            return dim * math.log(old_len / (num_rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = correction_dim(yarn["beta_fast"]), correction_dim(yarn["beta_slow"])
        if yarn.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)

        pos_freqs = base ** (torch.arange(0, dim, 2).float() / dim)
        inv_freq = (1.0 / (factor * pos_freqs)) * ramp + (1.0 / pos_freqs) * (1 - ramp)
        self.attention_scaling = 0.1 * math.log(factor) + 1.0
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        cos = freqs.cos() * self.attention_scaling
        sin = freqs.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def _apply_rotary_emb(x, cos, sin):
    first_half, second_half = torch.chunk(x, 2, dim=-1)
    first_ = first_half * cos - second_half * sin
    second_ = second_half * cos + first_half * sin
    return torch.cat((first_, second_), dim=-1)


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    batch, num_kv, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None].expand(batch, num_kv, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_kv * n_rep, slen, head_dim)


def eager_attention_forward(module, query, key, value, attention_mask, scaling):
    """query [B, N, Sq, D], key/value [B, Nkv, Skv, D], additive mask [B, 1, Sq, Skv]"""
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    attn_weights = attn_weights + attention_mask

    # the sink takes part in the softmax and is dropped afterwards
    sinks = module.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    combined_logits = torch.cat([attn_weights, sinks], dim=-1)
    combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
    probs = nn.functional.softmax(combined_logits, dim=-1, dtype=torch.float32)
    scores = probs[..., :-1].to(value.dtype)

    attn_output = torch.matmul(scores, value)
    return attn_output.transpose(1, 2).contiguous()


class GptOssAttention(nn.Module):
    """Multi-headed attention from 'Attention Is All You Need' paper"""

    def __init__(self, config: GptOssConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        self.num_heads_per_rank = config.num_attention_heads // self.tp_size
        self.num_kv_heads_per_rank = max(config.num_key_value_heads // self.tp_size, 1)
        self.num_key_value_groups = self.num_heads_per_rank // self.num_kv_heads_per_rank
        self.scaling = self.head_dim ** -0.5
        self.attention_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.attention_type == "sliding_attention" else None

        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads_per_rank * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads_per_rank * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads_per_rank * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads_per_rank * self.head_dim, config.hidden_size, bias=bias)
        self.sinks = nn.Parameter(torch.empty(self.num_heads_per_rank))

        self.k_cache = torch.Tensor([])  # bound by ModelWorker.init_kvcache
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.head_dim * self.num_kv_heads_per_rank,)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        forward_metadata: ForwardMetaData,
        write_index: torch.Tensor,
        **kwargs,
    ):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        cos, sin = position_embeddings
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        query_states = _apply_rotary_emb(query_states, cos, sin)
        key_states = _apply_rotary_emb(key_states, cos, sin)

        k_cache, v_cache = self.k_cache, self.v_cache
        flat_shape = (*input_shape, -1)
        torch_npu.scatter_update_(k_cache, write_index, key_states.transpose(1, 2).reshape(flat_shape), -2)
        torch_npu.scatter_update_(v_cache, write_index, value_states.transpose(1, 2).reshape(flat_shape), -2)

        if not forward_metadata.is_prefill:
            kv_seq_len = attention_mask.shape[-1]
            cache_shape = (input_shape[0], kv_seq_len, -1, self.head_dim)
            key_states = k_cache[:, :kv_seq_len].view(cache_shape).transpose(1, 2)
            value_states = v_cache[:, :kv_seq_len].view(cache_shape).transpose(1, 2)

        attn_output = eager_attention_forward(
            self, query_states, key_states, value_states, attention_mask, scaling=self.scaling
        )
        attn_output = attn_output.reshape(*input_shape, -1)
        attn_output = self.o_proj(attn_output)
        if self.tp_size > 1:
            dist.all_reduce(attn_output)
        return attn_output


class GptOssDecoderLayer(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.self_attn = GptOssAttention(config, infer_config, layer_idx)
        self.mlp = GptOssMLP(config, infer_config)
        self.input_layernorm = GptOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GptOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_type = config.layer_types[layer_idx]

    def forward(self, hidden_states, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = residual + self.self_attn(hidden_states=hidden_states, **kwargs)

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class GptOssModel(nn.Module):
    def __init__(self, config: GptOssConfig, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [GptOssDecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = GptOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = YarnRotaryEmbedding(config)

    def _build_masks(self, position_ids, forward_metadata, dtype) -> Dict[str, torch.Tensor]:
        """One additive mask per layer type: [B, 1, Sq, Skv], 0 = visible."""
        if forward_metadata.is_prefill:
            kv_seq_len = position_ids.shape[1]
        else:
            kv_seq_len = int(forward_metadata.actual_seq_lengths_kv.max())
        q_idx = position_ids[:, None, :, None]
        kv_idx = torch.arange(kv_seq_len, device=position_ids.device)[None, None, None, :]
        visible = {"full_attention": kv_idx <= q_idx}
        visible["sliding_attention"] = visible["full_attention"] & (kv_idx > q_idx - self.config.sliding_window)
        min_value = torch.finfo(dtype).min
        return {
            name: torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, min_value)
            for name, keep in visible.items()
        }

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        causal_mask_mapping = self._build_masks(position_ids, forward_metadata, hidden_states.dtype)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        # first slot written in this step: 0 for a prompt, kv_len in decode
        write_index = position_ids[:, 0].to(torch.int32)

        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=causal_mask_mapping[decoder_layer.attention_type],
                position_embeddings=position_embeddings,
                forward_metadata=forward_metadata,
                write_index=write_index,
                **kwargs,
            )
        return self.norm(hidden_states)


class GptOssForCausalLM(nn.Module):
    def __init__(
        self, config: GptOssConfig, infer_config: InferenceConfig, comm_manager: CommManager = None, prefix: str = ""
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.moe_tp_size = infer_config.parallel_config.moe_tp_size
        self.model = GptOssModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        slot_mapping=None,
        block_table=None,
        **kwargs,
    ):
        if input_ids.dim() == 1:
            # packed -> [B, S]
            batch_size = self.infer_config.scheduler_config.batch_size_per_dp_rank
            input_ids = input_ids.view(batch_size, -1)
            position_ids = position_ids.view(batch_size, -1)
        hidden_states = self.model(
            input_ids=input_ids, position_ids=position_ids, forward_metadata=forward_metadata, **kwargs
        )
        logits = self.lm_head(hidden_states[:, -1:, :])
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
        attn_rank = dist.get_rank() if self.attn_tp_size > 1 else 0
        moe_rank = dist.get_rank() if self.moe_tp_size > 1 else 0
        params_dict = dict(self.named_parameters())
        loaded_params: Set[str] = set()
        for name, weight in weights:
            if name not in params_dict:
                continue
            param = params_dict[name]
            if ".self_attn." in name and self.attn_tp_size > 1:
                if "o_proj.weight" in name:
                    weight = weight.chunk(self.attn_tp_size, dim=1)[attn_rank]
                elif "o_proj.bias" in name:
                    # added once in the all-reduce sum
                    weight = weight if attn_rank == 0 else torch.zeros_like(weight)
                else:
                    # q/k/v weights and biases, sinks: rows of this rank (k/v rows may be shared by ranks)
                    shards = weight.shape[0] // param.shape[0]
                    start = attn_rank * shards // self.attn_tp_size * param.shape[0]
                    weight = weight.narrow(0, start, param.shape[0])
            elif ".experts." in name and self.moe_tp_size > 1:
                if name.endswith("down_proj_bias"):
                    weight = weight if moe_rank == 0 else torch.zeros_like(weight)
                else:
                    # gate and up columns interleave, so one slice holds both
                    dim = 1 if name.endswith("down_proj") else -1
                    weight = weight.chunk(self.moe_tp_size, dim=dim)[moe_rank]
            default_weight_loader(param, weight.contiguous())
            loaded_params.add(name)
        return loaded_params


__all__ = ["GptOssForCausalLM", "GptOssModel"]
