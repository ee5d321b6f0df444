# coding=utf-8
"""BLOOM. No position embeddings: a bias on the attention scores falls off with distance (ALiBi)."""
import math

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_bloom import BigScienceConfig


def get_alibi_slopes(num_heads: int) -> torch.Tensor:
    closest = 2 ** math.floor(math.log2(num_heads))
    base = 2 ** (-(2 ** -(math.log2(closest) - 3)))
    slopes = [base ** i for i in range(1, closest + 1)]
    if closest != num_heads:
        extra = 2 ** (-(2 ** -(math.log2(2 * closest) - 3)))
        slopes += [extra ** i for i in range(1, 2 * (num_heads - closest), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


class BloomAttention(nn.Module):
    def __init__(self, config: BigScienceConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.hidden_size = config.hidden_size
        self.num_heads = config.n_head
        self.head_dim = self.hidden_size // self.num_heads
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(self.hidden_size, 3 * self.hidden_size, bias=True)
        self.dense = nn.Linear(self.hidden_size, self.hidden_size)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_heads, self.head_dim)

    def forward(self, hidden_states, residual, alibi, attention_mask, kv_len, kv_seq_len):
        batch_size, q_length, _ = hidden_states.shape
        fused_qkv = self.query_key_value(hidden_states)
        fused_qkv = fused_qkv.view(batch_size, q_length, self.num_heads, 3, self.head_dim)
        query, key, value = fused_qkv[..., 0, :], fused_qkv[..., 1, :], fused_qkv[..., 2, :]

        torch_npu.scatter_update_(self.k_cache, kv_len, key, 1)
        torch_npu.scatter_update_(self.v_cache, kv_len, value, 1)
        key = self.k_cache[:batch_size, :kv_seq_len]
        value = self.v_cache[:batch_size, :kv_seq_len]

        query = query.transpose(1, 2).reshape(batch_size * self.num_heads, q_length, self.head_dim)
        key = key.permute(0, 2, 3, 1).reshape(batch_size * self.num_heads, self.head_dim, kv_seq_len)
        value = value.transpose(1, 2).reshape(batch_size * self.num_heads, kv_seq_len, self.head_dim)

        # scores = alibi + q k^T / sqrt(d)
        scores = alibi.baddbmm(batch1=query, batch2=key, beta=1.0, alpha=self.inv_norm_factor)
        scores = scores.view(batch_size, self.num_heads, q_length, kv_seq_len)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        probs = probs.view(batch_size * self.num_heads, q_length, kv_seq_len)

        context = torch.bmm(probs, value).view(batch_size, self.num_heads, q_length, self.head_dim)
        context = context.permute(0, 2, 1, 3).reshape(batch_size, q_length, self.hidden_size)
        return residual + self.dense(context)


class BloomMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, residual):
        x = self.dense_h_to_4h(hidden_states)
        x = x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))
        return residual + self.dense_4h_to_h(x)


class BloomBlock(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.self_attention = BloomAttention(config, infer_config, layer_idx)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = BloomMLP(config)
        self.post_layernorm_residual = config.apply_residual_connection_post_layernorm

    def forward(self, hidden_states, alibi, attention_mask, kv_len, kv_seq_len):
        normed = self.input_layernorm(hidden_states)
        residual = normed if self.post_layernorm_residual else hidden_states
        hidden_states = self.self_attention(normed, residual, alibi, attention_mask, kv_len, kv_seq_len)
        normed = self.post_attention_layernorm(hidden_states)
        residual = normed if self.post_layernorm_residual else hidden_states
        return self.mlp(normed, residual)


class BloomModel(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.num_heads = config.n_head
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.h = nn.ModuleList([BloomBlock(config, infer_config, i) for i in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.register_buffer("slopes", get_alibi_slopes(config.n_head), persistent=False)

    def forward(self, input_ids, forward_metadata):
        batch_size, q_length = input_ids.shape
        attention_mask = None
        if forward_metadata.is_prefill:
            kv_len = torch.zeros(batch_size, dtype=torch.long, device=input_ids.device)
            kv_seq_len = q_length
            attention_mask = forward_metadata.attention_mask[:q_length, :q_length]
        else:
            kv_len = forward_metadata.kv_len
            kv_seq_len = int(kv_len.max()) + 1

        hidden_states = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        # [B * N, 1, kv]: distance from the first key; softmax does not mind the shift
        alibi = self.slopes[:, None] * torch.arange(kv_seq_len, device=input_ids.device)[None]
        alibi = alibi[:, None].repeat(batch_size, 1, 1).to(hidden_states.dtype)
        for block in self.h:
            hidden_states = block(hidden_states, alibi, attention_mask, kv_len, kv_seq_len)
        return self.ln_f(hidden_states)


class BloomForCausalLM(nn.Module):
    def __init__(self, config: BigScienceConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.transformer = BloomModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.transformer(input_ids.view(self.batch_size, -1), forward_metadata)
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name == "lm_head.weight":
                continue
            # the released files have no prefix
            name = name if name.startswith("transformer.") else "transformer." + name
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        self.lm_head.weight = self.transformer.word_embeddings.weight
        loaded.add("lm_head.weight")
        return loaded
