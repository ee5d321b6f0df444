# coding=utf-8
# Adapted from the Hugging Face Gemma4 text decoder (Apache-2.0). Vision and audio towers are not part of this port.

from typing import Iterable, Optional, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_gemma4_text import Gemma4TextConfig


class Gemma4RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, with_scale=True):
        super().__init__()
        self.eps = eps
        if with_scale:
            self.weight = nn.Parameter(torch.ones(dim))
        else:
            self.weight = None

    def forward(self, hidden_states):
        normed = hidden_states.float()
        normed = normed * torch.pow(normed.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        if self.weight is not None:
            normed = normed * self.weight.float()
        return normed.type_as(hidden_states)


class Gemma4RotaryEmbedding(nn.Module):
    """cos/sin of one layer type, [B, S, 1, head_dim]; dims that do not rotate get frequency 0."""

    def __init__(self, head_dim, rope_theta, partial_rotary_factor=1.0, **unused):
        super().__init__()
        rotated = int(partial_rotary_factor * head_dim // 2)
        inv_freq = torch.zeros(head_dim // 2)
        inv_freq[:rotated] = 1.0 / (rope_theta ** (torch.arange(0, 2 * rotated, 2).float() / head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, hidden_states, position_ids):
        freqs = position_ids[:, :, None].float() * self.inv_freq
        emb = torch.cat([freqs, freqs], dim=-1).unsqueeze(2)
        return emb.cos().to(hidden_states.dtype), emb.sin().to(hidden_states.dtype)


def apply_rope(x, cos_sin):
    cos, sin = cos_sin
    half = x.size(-1) // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + rotated * sin


class Gemma4MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Gemma4Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k_experts
        self.norm = Gemma4RMSNorm(config.hidden_size, config.rms_norm_eps, with_scale=False)
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))
        self.root = config.hidden_size ** -0.5

    def forward(self, x):
        scores = self.proj(self.norm(x) * self.scale * self.root)
        weight, index = torch.softmax(scores, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        return weight * self.per_expert_scale[index], index


class Gemma4Experts(nn.Module):
    """权重按 topk 索引聚合后批量计算，适合 token 数较少的场景"""

    def __init__(self, config):
        super().__init__()
        inner = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * inner, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, inner))

    def forward(self, x, weight, index):
        # x: [T, H], index: [T, K]
        gate, up = torch.einsum("th,tkih->tki", x, self.gate_up_proj[index]).chunk(2, dim=-1)
        inner = F.gelu(gate, approximate="tanh") * up
        out = torch.einsum("tki,tkhi->tkh", inner, self.down_proj[index])
        return torch.einsum("tkh,tk->th", out, weight.to(out.dtype))


class Gemma4Attention(nn.Module):
    def __init__(self, config: Gemma4TextConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.is_sliding = self.layer_type == "sliding_attention"
        self.sliding_window = config.sliding_window if self.is_sliding else None
        self.head_dim = config.head_dim if self.is_sliding else config.global_head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads if self.is_sliding else config.num_global_key_value_heads
        self.k_eq_v = config.attention_k_eq_v and not self.is_sliding
        self.scaling = 1.0  # QK norm 之后不再缩放

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        if not self.k_eq_v:
            self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = Gemma4RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Gemma4RMSNorm(self.head_dim, config.rms_norm_eps)
        self.v_norm = Gemma4RMSNorm(self.head_dim, config.rms_norm_eps, with_scale=False)

        # KV cache is bound by ModelWorker; its width differs between the two layer types
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads * self.head_dim,)

    def forward(self, hidden_states, cos_sin, attn_mask, kv_len, forward_metadata: ForwardMetaData, **kwargs):
        bsz, q_len, _ = hidden_states.size()

        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)
        if self.k_eq_v:
            value_states = key_states.clone()
        else:
            value_states = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)

        query_states = apply_rope(self.q_norm(query_states), cos_sin)
        key_states = apply_rope(self.k_norm(key_states), cos_sin)
        value_states = self.v_norm(value_states)

        torch_npu.scatter_update_(self.k_cache, kv_len, key_states.view(bsz, q_len, -1), -2)
        torch_npu.scatter_update_(self.v_cache, kv_len, value_states.view(bsz, q_len, -1), -2)

        if forward_metadata.is_prefill:
            keys, values = key_states, value_states
        else:
            past_len = attn_mask.shape[-1]
            keys = self.k_cache[:, :past_len].view(bsz, past_len, self.num_kv_heads, self.head_dim)
            values = self.v_cache[:, :past_len].view(bsz, past_len, self.num_kv_heads, self.head_dim)

        attn_output = F.scaled_dot_product_attention(
            query_states.transpose(1, 2),
            keys.transpose(1, 2).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1),
            values.transpose(1, 2).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1),
            attn_mask=attn_mask,
            scale=self.scaling,
        )
        attn_output = attn_output.transpose(1, 2).contiguous().view(bsz, q_len, -1)
        return self.o_proj(attn_output)


class Gemma4DecoderLayer(nn.Module):
    def __init__(self, config: Gemma4TextConfig, layer_idx: int):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.layer_type = config.layer_types[layer_idx]
        self.self_attn = Gemma4Attention(config, layer_idx)
        self.mlp = Gemma4MLP(config)
        self.enable_moe_block = config.enable_moe_block

        def norm():
            return Gemma4RMSNorm(config.hidden_size, config.rms_norm_eps)

        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        if self.enable_moe_block:
            self.router = Gemma4Router(config)
            self.experts = Gemma4Experts(config)
            self.post_feedforward_layernorm_1 = norm()
            self.post_feedforward_layernorm_2 = norm()
            self.pre_feedforward_layernorm_2 = norm()
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden_states, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, **kwargs)
        hidden_states = residual + self.post_attention_layernorm(hidden_states)

        residual = hidden_states
        hidden_states = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        if self.enable_moe_block:
            # dense MLP and experts both start from the residual stream
            batch_size, seq_len, hidden_dim = residual.shape
            flat = residual.view(batch_size * seq_len, hidden_dim)
            topk_weight, topk_index = self.router(flat)
            moe_out = self.experts(self.pre_feedforward_layernorm_2(flat), topk_weight, topk_index)
            moe_out = moe_out.view(batch_size, seq_len, hidden_dim)
            hidden_states = self.post_feedforward_layernorm_1(hidden_states)
            hidden_states = hidden_states + self.post_feedforward_layernorm_2(moe_out)
        hidden_states = residual + self.post_feedforward_layernorm(hidden_states)
        return hidden_states * self.layer_scalar


class Gemma4TextModel(nn.Module):
    def __init__(self, config: Gemma4TextConfig, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        self.batch_size_per_dp_rank = infer_config.scheduler_config.batch_size_per_dp_rank
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_scale = config.hidden_size ** 0.5
        self.layers = nn.ModuleList(
            [Gemma4DecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = Gemma4RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = nn.ModuleDict({
            "sliding_attention": Gemma4RotaryEmbedding(config.head_dim, **config.layer_rope["sliding_attention"]),
            "full_attention": Gemma4RotaryEmbedding(config.global_head_dim, **config.layer_rope["full_attention"]),
        })

    def _attention_masks(self, position_ids, total):
        query = position_ids.unsqueeze(1).unsqueeze(-1)  # [B, 1, Sq, 1]
        key = torch.arange(total, device=position_ids.device).view(1, 1, 1, total)
        causal = key <= query
        return {
            "full_attention": causal,
            "sliding_attention": causal & (key > query - self.config.sliding_window),
        }

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        # BSND shim: framework input is packed 1-D, equal-length batch assumed
        if input_ids.dim() == 1:
            input_ids = input_ids.view(self.batch_size_per_dp_rank, -1)
            position_ids = position_ids.view(self.batch_size_per_dp_rank, -1)
        if forward_metadata.is_prefill:
            kv_len = torch.zeros_like(position_ids[:, 0])
            total = input_ids.shape[1]
        else:
            kv_len = forward_metadata.kv_len
            total = int(forward_metadata.actual_seq_lengths_kv.max())

        hidden_states = self.embed_tokens(input_ids) * torch.tensor(self.embed_scale, dtype=self.embed_tokens.weight.dtype)
        masks = self._attention_masks(position_ids, total)
        cos_sin = {name: rotary(hidden_states, position_ids) for name, rotary in self.rotary_emb.items()}

        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                cos_sin=cos_sin[decoder_layer.layer_type],
                attn_mask=masks[decoder_layer.layer_type],
                kv_len=kv_len,
                forward_metadata=forward_metadata,
            )

        if forward_metadata.is_prefill:
            # norm 是逐 token 的，先取末位 token 再做
            last = forward_metadata.actual_seq_lengths_cu_q - 1
            hidden_states = hidden_states.flatten(0, 1).index_select(0, last).unsqueeze(1)
        return self.norm(hidden_states)


class Gemma4ForCausalLM(nn.Module):
    def __init__(self, config: Gemma4TextConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = Gemma4TextModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.LongTensor, position_ids: Optional[torch.LongTensor] = None,
                forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        logits = self.lm_head(hidden_states).float()
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> set:
        targets = dict(self.named_parameters())
        targets.update({name: buf for name, buf in self.named_buffers() if name.endswith("layer_scalar")})
        loaded = set()
        for name, weight in weights:
            name = name.replace("model.language_model.", "model.")
            if name not in targets:
                continue  # vision / audio towers
            default_weight_loader(targets[name], weight)
            loaded.add(name)
            if name == "model.embed_tokens.weight" and self.config.tie_word_embeddings:
                default_weight_loader(self.lm_head.weight, weight)
                loaded.add("lm_head.weight")
        return loaded
