# coding=utf-8
# 参考 Hugging Face transformers 的 Olmo3 实现（Apache License 2.0）移植，
# attention 使用 BSH layout 的融合算子，KV cache 为 Legacy 连续缓存。
import math
from typing import Dict, Iterable, Optional, Tuple

import torch
from torch import nn
import torch_npu

from executor.core.config import InferenceConfig, CommManager
from executor.utils.forward_metadata import ForwardMetaData
from executor.model_loader.weight_utils import default_weight_loader
from .configuration_olmo3 import Olmo3Config


class Olmo3RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]


class Olmo3RotaryEmbedding(nn.Module):
    """cos/sin of one layer type. `yarn` is None for plain rotary."""

    def __init__(self, head_dim: int, base: float, yarn: Optional[dict] = None):
        super().__init__()
        pos_freqs = base ** (torch.arange(0, head_dim, 2).float() / head_dim)
        inv_freq = 1.0 / pos_freqs
        self.attention_scaling = 1.0
        if yarn is not None:
            original = yarn["original_max_position_embeddings"]

            def dim_of(rotations):
                return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

            low = max(math.floor(dim_of(yarn.get("beta_fast", 32))), 0)
            high = min(math.ceil(dim_of(yarn.get("beta_slow", 1))), head_dim - 1)
            if low == high:
                high += 0.001
            ramp = torch.clamp((torch.arange(head_dim // 2).float() - low) / (high - low), 0, 1)
            inv_freq = inv_freq / yarn["factor"] * ramp + inv_freq * (1 - ramp)
            self.attention_scaling = yarn.get("attention_factor") or 0.1 * math.log(yarn["factor"]) + 1.0
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids):
        freqs = position_ids.unsqueeze(-1).float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1).unsqueeze(2)
        return emb.cos() * self.attention_scaling, emb.sin() * self.attention_scaling


class Olmo3MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Olmo3Attention(nn.Module):
    def __init__(self, config: Olmo3Config, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        if self.attn_tp_size > 1:
            raise NotImplementedError("q_norm/k_norm span all heads, attention TP is not supported")
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = 1 / math.sqrt(self.head_dim)
        self.attention_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.attention_type == "sliding_attention" else None

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim,
                                bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim,
                                bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Olmo3RMSNorm(self.num_heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = Olmo3RMSNorm(self.num_key_value_heads * self.head_dim, config.rms_norm_eps)

        self.k_cache = self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_key_value_heads * self.head_dim,)

    def forward(self, hidden_states, position_embeddings: Dict[str, Tuple[torch.Tensor, torch.Tensor]], **kwargs):
        forward_metadata: ForwardMetaData = kwargs["forward_metadata"]
        start_idx = kwargs["start_idx"]
        bsz, q_len, _ = hidden_states.size()

        # 整个投影维度上做 norm，然后再拆 head
        query_states = self.q_norm(self.q_proj(hidden_states)).view(bsz, q_len, self.num_heads, self.head_dim)
        key_states = self.k_norm(self.k_proj(hidden_states)).view(bsz, q_len, self.num_key_value_heads, self.head_dim)
        value_states = self.v_proj(hidden_states)

        cos, sin = position_embeddings[self.attention_type]
        query_states = torch_npu.npu_rotary_mul(query_states, cos.to(query_states.dtype), sin.to(query_states.dtype))
        key_states = torch_npu.npu_rotary_mul(key_states, cos.to(key_states.dtype), sin.to(key_states.dtype))
        query_states = query_states.reshape(bsz, q_len, -1)
        key_states = key_states.reshape(bsz, q_len, -1)

        torch_npu.scatter_update_(self.k_cache, start_idx, key_states, -2)
        torch_npu.scatter_update_(self.v_cache, start_idx, value_states, -2)

        fa_kwargs = dict(
            num_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            input_layout="BSH",
            scale=self.scaling,
            actual_seq_lengths_kv=forward_metadata.actual_seq_lengths_kv,
        )
        if forward_metadata.is_prefill:
            sliding = self.sliding_window is not None
            attn_output = torch.ops.npu.npu_fused_infer_attention_score(
                query_states, key_states, value_states,
                actual_seq_lengths=forward_metadata.actual_seq_lengths_q,
                atten_mask=forward_metadata.attention_mask,
                sparse_mode=4 if sliding else 3,
                pre_tokens=self.sliding_window if sliding else 2147483647,
                next_tokens=0,
                **fa_kwargs,
            )[0]
        else:
            # decode 阶段 q_len 为 1，无需 mask
            attn_output = torch.ops.npu.npu_fused_infer_attention_score(
                query_states, self.k_cache, self.v_cache, atten_mask=None, sparse_mode=0, **fa_kwargs
            )[0]
        return self.o_proj(attn_output)


class Olmo3DecoderLayer(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.self_attn = Olmo3Attention(config, infer_config, layer_idx)
        self.mlp = Olmo3MLP(config)
        self.post_attention_layernorm = Olmo3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Olmo3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.post_attention_layernorm(self.self_attn(hidden_states, **kwargs))
        hidden_states = hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))
        return hidden_states


class Olmo3Model(nn.Module):
    def __init__(self, config: Olmo3Config, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [Olmo3DecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = Olmo3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        head_dim = config.hidden_size // config.num_attention_heads
        self.rotary_embs = nn.ModuleDict({
            "sliding_attention": Olmo3RotaryEmbedding(head_dim, config.rope_theta),
            "full_attention": Olmo3RotaryEmbedding(head_dim, config.rope_theta, config.full_attention_yarn),
        })

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = {name: rotary(position_ids) for name, rotary in self.rotary_embs.items()}
        start_idx = position_ids[:, 0].to(torch.int32)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                position_embeddings=position_embeddings,
                start_idx=start_idx,
                forward_metadata=forward_metadata,
                **kwargs,
            )
        return self.norm(hidden_states)


class Olmo3ForCausalLM(nn.Module):
    def __init__(self, config: Olmo3Config, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = Olmo3Model(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.LongTensor, position_ids: Optional[torch.LongTensor] = None,
                forward_metadata: ForwardMetaData = None, **kwargs):
        # packed -> [B, S]：每条 prompt 的 position 都从 0 开始；decode 每条请求 1 个 token
        if forward_metadata.is_prefill:
            batch_size = int((position_ids == 0).sum())
        else:
            batch_size = position_ids.shape[0]
        input_ids = input_ids.view(batch_size, -1)
        position_ids = position_ids.view(batch_size, -1)

        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        if forward_metadata.is_prefill:
            index = position_ids.max(dim=-1)[0].view(-1, 1, 1).expand(-1, 1, self.config.hidden_size)
            hidden_states = torch.gather(hidden_states, 1, index)
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        for name, loaded_weight in weights:
            if name in params_dict:
                default_weight_loader(params_dict[name], loaded_weight)
                loaded_params.add(name)
        return loaded_params


__all__ = ["Olmo3ForCausalLM", "Olmo3Model"]
