# LongCat-Flash: every layer has two attention sublayers, two dense MLPs and one MoE that runs beside the second half.
from typing import Optional

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor, nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_longcat import LongcatConfig


class LongcatRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor):
        return torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]


class LongcatRotaryEmbedding(nn.Module):
    def __init__(self, config: LongcatConfig):
        super().__init__()
        dim = config.qk_rope_head_dim
        steps = torch.arange(0, dim, 2, dtype=torch.float) / dim
        self.register_buffer("inv_freq", config.rope_theta ** -steps, persistent=False)

    def forward(self, position_ids: Tensor, dtype):
        freqs = position_ids.unsqueeze(-1).float() * self.inv_freq
        emb = torch.cat([freqs, freqs], dim=-1)
        return emb.cos().to(dtype), emb.sin().to(dtype)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([-x2, x1], dim=-1)


def interleaved_rope(x, cos, sin):
    """x [B, S, N, D]; pairs become halves, then halves are rotated"""
    b, s, n, d = x.shape
    x = x.view(b, s, n, d // 2, 2).transpose(-1, -2).reshape(b, s, n, d)
    return x * cos[:, :, None, :] + rotate_half(x) * sin[:, :, None, :]


class LongcatMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size, has_down=True):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LongcatRouter(nn.Module):
    def __init__(self, config: LongcatConfig):
        super().__init__()
        experts = config.n_routed_experts + config.zero_expert_num
        self.classifier = nn.Linear(config.hidden_size, experts, bias=False)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts))


class LongcatMoE(nn.Module):
    def __init__(self, config: LongcatConfig):
        super().__init__()
        self.n_routed_experts = config.n_routed_experts
        self.top_k = config.moe_topk
        self.routed_scaling_factor = config.routed_scaling_factor
        self.router = LongcatRouter(config)
        self.experts = nn.ModuleList([
            LongcatMLP(config.hidden_size, config.expert_ffn_hidden_size) for _ in range(config.n_routed_experts)])

    def forward(self, hidden_states):
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = F.linear(tokens.float(), self.router.classifier.weight.float()).softmax(dim=-1)
        _, chosen = torch.topk(scores + self.router.e_score_correction_bias, self.top_k, dim=-1, sorted=False)
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen) * self.routed_scaling_factor)
        weights = weights.to(tokens.dtype)
        # the experts past n_routed_experts give their input back
        out = tokens * weights[:, self.n_routed_experts:].sum(dim=-1, keepdim=True)
        for i, expert in enumerate(self.experts):
            out = out + expert(tokens) * weights[:, i, None]
        return out.reshape(hidden_states.shape)


class LongcatMLA(nn.Module):
    def __init__(self, config: LongcatConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = LongcatRMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = LongcatRMSNorm(config.kv_lora_rank)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, self.num_heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, config.hidden_size, bias=False)
        self.mla_scale_q_lora = (config.hidden_size / config.q_lora_rank) ** 0.5
        self.mla_scale_kv_lora = (config.hidden_size / config.kv_lora_rank) ** 0.5
        self.scaling = self.qk_head_dim ** -0.5

        # values are padded to the size of the keys
        self.cache_unit = (self.num_heads, self.qk_head_dim)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])

    def forward(self, hidden_states, position_embeddings, attention_mask=None, forward_metadata=None):
        cfg = self.config
        bsz, q_len, _ = hidden_states.shape
        cos, sin = position_embeddings

        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(bsz, q_len, self.num_heads, self.qk_head_dim) * self.mla_scale_q_lora
        q_pass, q_rot = query.split([cfg.qk_nope_head_dim, cfg.qk_rope_head_dim], dim=-1)

        kv_pass, k_rot = torch.split(
            self.kv_a_proj_with_mqa(hidden_states), [cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
        kv_pass = self.kv_a_layernorm(kv_pass) * self.mla_scale_kv_lora
        q_rot = interleaved_rope(q_rot, cos, sin)
        k_rot = interleaved_rope(k_rot[:, :, None, :], cos, sin)

        kv = self.kv_b_proj(kv_pass).view(bsz, q_len, self.num_heads, -1)
        k_pass, value = kv.split([cfg.qk_nope_head_dim, cfg.v_head_dim], dim=-1)
        key = torch.cat((k_pass, k_rot.expand(-1, -1, self.num_heads, -1)), dim=-1)
        query = torch.cat((q_pass, q_rot), dim=-1)
        value = F.pad(value, [0, self.qk_head_dim - self.v_head_dim])

        kv_len = forward_metadata.kv_len
        if forward_metadata.is_prefill:
            kv_len = torch.zeros_like(forward_metadata.actual_seq_lengths_kv)
        torch_npu.scatter_update_(self.k_cache, kv_len, key, 1)
        torch_npu.scatter_update_(self.v_cache, kv_len, value, 1)
        end = q_len if forward_metadata.is_prefill else int(forward_metadata.actual_seq_lengths_kv.max().item())
        key, value = self.k_cache[:, :end], self.v_cache[:, :end]

        attn_weights = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * self.scaling
        if attention_mask is not None:
            attn_weights = attn_weights + attention_mask
        attn_weights = torch.softmax(attn_weights.float(), dim=-1).to(query.dtype)
        attn_output = torch.matmul(attn_weights, value.transpose(1, 2)).transpose(1, 2)
        attn_output = attn_output[..., :self.v_head_dim].reshape(bsz, q_len, -1)
        return self.o_proj(attn_output), attn_weights


class LongcatDecoderLayer(nn.Module):
    def __init__(self, config: LongcatConfig, layer_idx: int):
        super().__init__()
        self.mlp = LongcatMoE(config)
        self.self_attn = nn.ModuleList([LongcatMLA(config, layer_idx * 2 + i) for i in range(2)])
        self.mlps = nn.ModuleList([LongcatMLP(config.hidden_size, config.ffn_hidden_size) for _ in range(2)])
        self.input_layernorm = nn.ModuleList(
            [LongcatRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)])
        self.post_attention_layernorm = nn.ModuleList(
            [LongcatRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)])

    def forward(self, hidden_states, position_embeddings, attention_mask, forward_metadata):
        attn, _ = self.self_attn[0](
            hidden_states=self.input_layernorm[0](hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            forward_metadata=forward_metadata,
        )
        hidden_states = hidden_states + attn
        normed = self.post_attention_layernorm[0](hidden_states)
        shortcut = self.mlp(normed)
        hidden_states = hidden_states + self.mlps[0](normed)

        attn, _ = self.self_attn[1](
            hidden_states=self.input_layernorm[1](hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            forward_metadata=forward_metadata,
        )
        hidden_states = hidden_states + attn
        normed = self.post_attention_layernorm[1](hidden_states)
        return hidden_states + self.mlps[1](normed) + shortcut


class LongcatModel(nn.Module):
    def __init__(self, config: LongcatConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LongcatDecoderLayer(config, i) for i in range(config.num_layers)])
        self.norm = LongcatRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LongcatRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, forward_metadata):
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(position_ids, hidden_states.dtype)
        attention_mask = None
        if forward_metadata.is_prefill:
            q_len = input_ids.shape[1]
            attention_mask = torch.zeros(q_len, q_len, dtype=torch.float32, device=input_ids.device)
            attention_mask = attention_mask.masked_fill(
                forward_metadata.attention_mask[:q_len, :q_len], torch.finfo(torch.float32).min)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, attention_mask, forward_metadata)
        return self.norm(hidden_states)


class LongcatForCausalLM(nn.Module):
    def __init__(self, config: LongcatConfig, infer_config: InferenceConfig,
                 comm_manager: Optional[CommManager] = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = LongcatModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        batch = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = self.model(
            input_ids.view(batch, -1), position_ids.view(batch, -1), forward_metadata)
        if forward_metadata.is_prefill:
            index = forward_metadata.actual_seq_lengths_q - 1
            hidden_states = hidden_states[torch.arange(batch, device=index.device), index].unsqueeze(1)
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name not in params:  # projections of identity experts
                continue
            default_weight_loader(params[name], weight)
            loaded.add(name)
        return loaded
