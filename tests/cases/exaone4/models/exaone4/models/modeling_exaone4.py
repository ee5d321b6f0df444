# coding=utf-8
# Adapted for the NPU executor from the Hugging Face EXAONE 4.0 implementation.
# KV cache: Legacy (contiguous, heads first). Attention: eager.
import math
from typing import Dict, Iterable, Optional, Tuple

import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_exaone4 import Exaone4Config


class Exaone4RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def llama3_inv_freq(inv_freq, rope):
    """Llama-3 style scaling: long wavelengths are stretched, short ones kept, smooth in between."""
    factor = rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    old_len = rope["original_max_position_embeddings"]
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > old_len / low, inv_freq / factor, inv_freq)
    smooth = (old_len / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    is_medium = ~(wavelen < old_len / high) * ~(wavelen > old_len / low)
    return torch.where(is_medium, smoothed, scaled)


class Exaone4RotaryEmbedding(nn.Module):
    inv_freq: torch.Tensor

    def __init__(self, config: Exaone4Config):
        super().__init__()
        rope = config.rope_settings
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq = 1.0 / (rope["rope_theta"] ** exponent)
        if rope["rope_type"] == "llama3":
            inv_freq = llama3_inv_freq(inv_freq, rope)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.float()
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


class Exaone4Attention(nn.Module):
    def __init__(self, config: Exaone4Config, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        tp_size = infer_config.parallel_config.attn_tp_size
        self.num_heads = config.num_attention_heads // tp_size
        self.num_kv_heads = max(config.num_key_value_heads // tp_size, 1)
        self.hidden_size = config.hidden_size
        self.head_dim = config.head_dim
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.scaling = self.head_dim**-0.5
        self.sliding_window = config.sliding_window
        self.is_sliding = config.layer_types[layer_idx] == "sliding_attention"

        self.q_proj = nn.Linear(self.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, self.hidden_size, bias=False)

        self.q_norm = Exaone4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Exaone4RMSNorm(self.head_dim, eps=config.rms_norm_eps)

        # set by Exaone4ForCausalLM.init_cache: [B, N, S, D]
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads, self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        kv_len: torch.Tensor,
        total_len: int,
        is_prefill: bool,
    ) -> torch.Tensor:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        # We use QK-norm
        query_states = self.q_norm(query_states)
        key_states = self.k_norm(key_states)

        cos, sin = position_embeddings
        # We use global NoPE for hybrid attention model
        if self.sliding_window is None or self.is_sliding:
            query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        torch_npu.scatter_update_(self.k_cache, kv_len, key_states, -2)
        torch_npu.scatter_update_(self.v_cache, kv_len, value_states, -2)
        if not is_prefill:
            key_states = self.k_cache[:, :, :total_len]
            value_states = self.v_cache[:, :, :total_len]

        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)

        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        attn_weights = attn_weights + attention_mask
        # upcast attention to fp32
        attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_output = torch.matmul(attn_weights, value_states)

        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.reshape(*input_shape, -1)
        return self.o_proj(attn_output)


class Exaone4MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Exaone4DecoderLayer(nn.Module):
    def __init__(self, config: Exaone4Config, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Exaone4Attention(config, infer_config, layer_idx)
        self.mlp = Exaone4MLP(config)
        self.post_attention_layernorm = Exaone4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Exaone4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, attention_mask, kv_len, total_len, is_prefill):
        residual = hidden_states
        hidden_states = self.self_attn(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            kv_len=kv_len,
            total_len=total_len,
            is_prefill=is_prefill,
        )
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states

        # Fully Connected
        residual = hidden_states
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class Exaone4Model(nn.Module):
    def __init__(self, config: Exaone4Config, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [Exaone4DecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = Exaone4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Exaone4RotaryEmbedding(config)

    def _build_masks(self, position_ids, total_len, dtype) -> Dict[str, torch.Tensor]:
        """Additive masks [B, 1, q, total_len], one per layer type."""
        kv_pos = torch.arange(total_len, device=position_ids.device)
        q_pos = position_ids[:, None, :, None]
        hidden = kv_pos > q_pos
        min_value = torch.finfo(dtype).min
        masks = {"full_attention": torch.zeros(hidden.shape, dtype=dtype).to(hidden.device).masked_fill(hidden, min_value)}
        if "sliding_attention" in self.config.layer_types:
            # a query sees itself and the window - 1 tokens before it
            too_old = kv_pos <= q_pos - self.config.sliding_window
            masks["sliding_attention"] = masks["full_attention"].masked_fill(too_old, min_value)
        return masks

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        bsz, q_len = input_ids.shape
        if forward_metadata.is_prefill:
            kv_len = torch.zeros(bsz, dtype=torch.int64, device=input_ids.device)
            total_len = q_len
        else:
            kv_len = forward_metadata.kv_len
            total_len = int(kv_len.max()) + 1

        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        causal_mask_mapping = self._build_masks(position_ids, total_len, hidden_states.dtype)

        for i, decoder_layer in enumerate(self.layers):
            layer_type = self.config.layer_types[i]
            hidden_states = decoder_layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=causal_mask_mapping[layer_type],
                kv_len=kv_len,
                total_len=total_len,
                is_prefill=forward_metadata.is_prefill,
            )
        return self.norm(hidden_states)


class Exaone4ForCausalLM(nn.Module):
    def __init__(
        self,
        config: Exaone4Config,
        infer_config: InferenceConfig,
        comm_manager: Optional[CommManager] = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = Exaone4Model(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        batch_size = self.infer_config.scheduler_config.batch_size_per_dp_rank
        cache_seq_len = (
            self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens
        )
        dtype = self.lm_head.weight.dtype
        for layer in self.model.layers:
            attn = layer.self_attn
            cache_shape = (batch_size, attn.num_kv_heads, cache_seq_len, attn.head_dim)
            attn.k_cache = torch.zeros(cache_shape, dtype=dtype, device=device)
            attn.v_cache = torch.zeros(cache_shape, dtype=dtype, device=device)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ) -> torch.Tensor:
        batch_size = self.infer_config.scheduler_config.batch_size_per_dp_rank
        hidden_states = self.model(
            input_ids.view(batch_size, -1), position_ids.view(batch_size, -1), forward_metadata
        )
        # equal-length prompts, no padding: the last column is the last token
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        for name, loaded_weight in weights:
            if name not in params_dict:
                # rotary_emb.inv_freq of old checkpoints
                continue
            default_weight_loader(params_dict[name], loaded_weight)
            loaded_params.add(name)
        return loaded_params
