# coding=utf-8
# MiniMax-M2: GQA with QK norm over all heads at once, half of each head rotated, 256 sigmoid-routed experts.
from typing import Iterable, List, Optional, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_minimax_m2 import M2Config


class M2RMSNorm(nn.Module):
    """norm(x), or (norm(x + residual), x + residual) when a residual comes along."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states, *args):
        if len(args) == 0:
            return torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]
        residual = args[0]
        if residual is None:
            return torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0], hidden_states
        result, _, total = torch_npu.npu_add_rms_norm(residual, hidden_states, self.weight, self.variance_epsilon)
        return result, total


class M2Expert(nn.Module):
    def __init__(self, config: M2Config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class M2SparseMoeBlock(nn.Module):
    def __init__(self, config: M2Config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_local_experts
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        self.experts = nn.ModuleList([M2Expert(config) for _ in range(self.num_experts)])
        self.e_score_correction_bias = nn.Parameter(torch.zeros(self.num_experts), requires_grad=False)

    def route(self, hidden_states):
        router_logits = self.gate(hidden_states)
        routing_weights = torch.sigmoid(router_logits.float())
        # the bias only takes part in the choice
        scores_for_choice = routing_weights + self.e_score_correction_bias
        _, top_k_index = torch.topk(scores_for_choice, self.top_k, dim=-1, sorted=False)
        top_k_weights = routing_weights.gather(1, top_k_index)
        return top_k_index, top_k_weights / top_k_weights.sum(dim=-1, keepdim=True)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        top_k_index, top_k_weights = self.route(hidden_states)

        final_hidden_states = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(top_k_index, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            position, token = torch.where(expert_mask[expert_idx])
            if token.numel() == 0:
                continue
            current = self.experts[expert_idx](hidden_states[token]) * top_k_weights[token, position, None]
            final_hidden_states.index_add_(0, token, current.to(hidden_states.dtype))
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)


class M2RotaryEmbedding(nn.Module):
    def __init__(self, config: M2Config):
        super().__init__()
        dim = config.rotary_dim
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1)
        freqs = (inv_freq_expanded.float() @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1).unsqueeze(2)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)  # [B, S, 1, rotary_dim]


class M2Attention(nn.Module):
    def __init__(self, config: M2Config, infer_config: InferenceConfig, layer_idx: int, prefix: str = ""):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.scale = self.head_dim ** -0.5
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = M2RMSNorm(q_size, config.rms_norm_eps)
        self.k_norm = M2RMSNorm(kv_size, config.rms_norm_eps)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (kv_size,)

    def rotate_part(self, states, cos, sin):
        """[B, S, N, D]; the tail of each head passes through."""
        rotary_dim = cos.shape[-1]
        turned = torch_npu.npu_rotary_mul(states[..., :rotary_dim].contiguous(), cos, sin)
        return torch.cat([turned, states[..., rotary_dim:]], dim=-1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos_sin: Tuple[torch.Tensor, torch.Tensor],
        kv_len: torch.Tensor,
        forward_metadata: ForwardMetaData,
    ):
        bsz, q_len, _ = hidden_states.size()
        query_states = self.q_norm(self.q_proj(hidden_states))
        key_states = self.k_norm(self.k_proj(hidden_states))
        value_states = self.v_proj(hidden_states)

        cos, sin = cos_sin
        query_states = self.rotate_part(query_states.view(bsz, q_len, self.num_heads, self.head_dim), cos, sin)
        key_states = self.rotate_part(key_states.view(bsz, q_len, self.num_key_value_heads, self.head_dim), cos, sin)
        query_states = query_states.view(bsz, q_len, -1)
        key_states = key_states.view(bsz, q_len, -1)

        torch_npu.scatter_update_(self.k_cache, kv_len, key_states, -2)
        torch_npu.scatter_update_(self.v_cache, kv_len, value_states, -2)

        is_prefill = forward_metadata.is_prefill
        if not is_prefill:
            key_states, value_states = self.k_cache, self.v_cache

        attn_output, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
            query_states,
            key_states,
            value_states,
            num_query_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            input_layout="BSH",
            softmax_scale=self.scale,
            atten_mask=forward_metadata.attention_mask if is_prefill else None,
            sparse_mode=3 if is_prefill else 0,
            actual_seq_qlen=forward_metadata.actual_seq_lengths_q,
            actual_seq_kvlen=forward_metadata.actual_seq_lengths_kv,
        )
        return self.o_proj(attn_output)


class M2DecoderLayer(nn.Module):
    def __init__(self, config: M2Config, infer_config: InferenceConfig, layer_idx: int, prefix: str = ""):
        super().__init__()
        self.self_attn = M2Attention(config, infer_config, layer_idx, f"{prefix}.self_attn")
        self.block_sparse_moe = M2SparseMoeBlock(config)
        self.input_layernorm = M2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = M2RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, kv_len, forward_metadata, past_residual: Optional[torch.Tensor] = None):
        hidden_states, residual = self.input_layernorm(hidden_states, past_residual)
        hidden_states = self.self_attn(
            hidden_states=hidden_states, cos_sin=cos_sin, kv_len=kv_len, forward_metadata=forward_metadata)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.block_sparse_moe(hidden_states)
        return residual, hidden_states


class M2Model(nn.Module):
    def __init__(self, config: M2Config, infer_config: InferenceConfig, prefix: str = ""):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers: List[nn.Module] = []
        for layer_idx in range(config.num_hidden_layers):
            layers.append(M2DecoderLayer(config, infer_config, layer_idx, f"{prefix}.layers.{layer_idx}"))
        self.layers = nn.ModuleList(layers)
        self.norm = M2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = M2RotaryEmbedding(config)

    def forward(self, input_ids, position_ids, kv_len, forward_metadata: ForwardMetaData):
        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        residual = None
        for layer in self.layers:
            residual, hidden_states = layer(hidden_states, cos_sin, kv_len, forward_metadata, past_residual=residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class MiniMaxM2ForCausalLM(nn.Module):
    def __init__(self, config: M2Config, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = M2Model(config, infer_config, "model")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = self.infer_config.scheduler_config.batch_size_per_dp_rank
        input_ids, position_ids = input_ids.view(bsz, -1), position_ids.view(bsz, -1)
        kv_len = forward_metadata.kv_len
        if forward_metadata.is_prefill:
            kv_len = torch.zeros(bsz, dtype=kv_len.dtype, device=kv_len.device)

        hidden_states = self.model(input_ids, position_ids, kv_len, forward_metadata)
        if hidden_states.size(1) > 1:
            index = position_ids.max(dim=-1, keepdim=True)[0].unsqueeze(-1)
            hidden_states = torch.gather(hidden_states, 1, index.repeat(1, 1, hidden_states.size(-1)))
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name not in params_dict:
                raise KeyError(f"unexpected weight {name}")
            default_weight_loader(params_dict[name], weight)
            loaded.add(name)
        return loaded
