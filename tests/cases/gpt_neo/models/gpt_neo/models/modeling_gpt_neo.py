# coding=utf-8
"""PyTorch GPT Neo model, adapted for the executor."""

import torch
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_gpt_neo import GPTNeoConfig


class GPTNeoSelfAttention(nn.Module):
    def __init__(self, config, attention_type, layer_id=None):
        super().__init__()
        max_positions = config.max_position_embeddings
        bias = torch.tril(torch.ones((max_positions, max_positions), dtype=torch.bool)).view(
            1, 1, max_positions, max_positions
        )
        # local causal self attention is a sliding window where each token can only attend to the previous window_size
        # tokens. This is implemented by updating the causal mask.
        self.attention_type = attention_type
        if attention_type == "local":
            bias = torch.bitwise_xor(bias, torch.tril(bias, -config.window_size))
        self.register_buffer("bias", bias, persistent=False)
        self.layer_id = layer_id
        self.config = config
        self.embed_dim = config.hidden_size
        self.num_heads = config.num_heads
        self.head_dim = self.embed_dim // self.num_heads
        self.k_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=False)
        self.v_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=False)
        self.q_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=False)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=True)
        self.k_cache = None
        self.v_cache = None

    def _split_heads(self, tensor, num_heads, attn_head_size):
        new_shape = tensor.size()[:-1] + (num_heads, attn_head_size)
        tensor = tensor.view(new_shape)
        return tensor.permute(0, 2, 1, 3)  # (batch, head, seq_length, head_features)

    def _merge_heads(self, tensor, num_heads, attn_head_size):
        tensor = tensor.permute(0, 2, 1, 3).contiguous()
        new_shape = tensor.size()[:-2] + (num_heads * attn_head_size,)
        return tensor.view(new_shape)

    def _attn(self, query, key, value):
        # Keep the attention weights computation in fp32 to avoid overflow issues
        query = query.to(torch.float32)
        key = key.to(torch.float32)
        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        query_length, key_length = query.size(-2), key.size(-2)
        causal_mask = self.bias[:, :, key_length - query_length : key_length, :key_length]
        mask_value = torch.finfo(attn_weights.dtype).min
        mask_value = torch.tensor(mask_value, dtype=attn_weights.dtype, device=attn_weights.device)
        attn_weights = torch.where(causal_mask, attn_weights, mask_value)
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_weights = attn_weights.to(value.dtype)
        attn_output = torch.matmul(attn_weights, value)
        return attn_output, attn_weights

    def forward(self, hidden_states, kv_len=None, kv_end=None, is_prefill=None):
        query = self.q_proj(hidden_states)
        key = self.k_proj(hidden_states)
        value = self.v_proj(hidden_states)
        query = self._split_heads(query, self.num_heads, self.head_dim)
        key = self._split_heads(key, self.num_heads, self.head_dim)
        value = self._split_heads(value, self.num_heads, self.head_dim)

        if is_prefill:
            self.k_cache[:, :, : key.shape[2]] = key
            self.v_cache[:, :, : key.shape[2]] = value
        else:
            rows = torch.arange(key.shape[0], device=key.device)
            self.k_cache[rows, :, kv_len] = key.squeeze(2)
            self.v_cache[rows, :, kv_len] = value.squeeze(2)
            key, value = self.k_cache[:, :, :kv_end], self.v_cache[:, :, :kv_end]

        attn_output, attn_weights = self._attn(query, key, value)
        attn_output = self._merge_heads(attn_output, self.num_heads, self.head_dim)
        attn_output = self.out_proj(attn_output)
        return attn_output, attn_weights


class GPTNeoAttention(nn.Module):
    def __init__(self, config, layer_id=0):
        super().__init__()
        self.layer_id = layer_id
        self.attention_layers = config.attention_layers
        self.attention_type = self.attention_layers[layer_id]
        if self.attention_type in ["global", "local"]:
            self.attention = GPTNeoSelfAttention(config, self.attention_type, layer_id)
        else:
            raise NotImplementedError(f"attention type {self.attention_type}")

    def forward(self, hidden_states, **kwargs):
        return self.attention(hidden_states, **kwargs)


class GPTNeoMLP(nn.Module):
    def __init__(self, intermediate_size, config):
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, intermediate_size)
        self.c_proj = nn.Linear(intermediate_size, config.hidden_size)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden_states):
        return self.c_proj(self.act(self.c_fc(hidden_states)))


class GPTNeoBlock(nn.Module):
    def __init__(self, config, layer_id):
        super().__init__()
        inner_dim = config.intermediate_size if config.intermediate_size is not None else 4 * config.hidden_size
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = GPTNeoAttention(config, layer_id)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPTNeoMLP(inner_dim, config)

    def forward(self, hidden_states, **kwargs):
        attn_outputs = self.attn(self.ln_1(hidden_states), **kwargs)
        hidden_states = attn_outputs[0] + hidden_states
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class GPTNeoModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList([GPTNeoBlock(config, layer_id=i) for i in range(config.num_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, input_ids, position_ids, forward_metadata):
        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        step = dict(kv_len=forward_metadata.kv_len, is_prefill=forward_metadata.is_prefill)
        step["kv_end"] = int(forward_metadata.actual_seq_lengths_kv.max())
        for block in self.h:
            hidden_states = block(hidden_states, **step)
        return self.ln_f(hidden_states)


class GPTNeoForCausalLM(nn.Module):
    def __init__(self, config: GPTNeoConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.transformer = GPTNeoModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        rows = self.infer_config.scheduler_config.batch_size_per_dp_rank
        size = self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens
        for block in self.transformer.h:
            attn = block.attn.attention
            shape = (rows, attn.num_heads, size, attn.head_dim)
            attn.k_cache = torch.zeros(shape, dtype=self.lm_head.weight.dtype, device=device)
            attn.v_cache = torch.zeros(shape, dtype=self.lm_head.weight.dtype, device=device)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        rows = self.infer_config.scheduler_config.batch_size_per_dp_rank
        hidden_states = self.transformer(input_ids.view(rows, -1), position_ids.view(rows, -1), forward_metadata)
        lm_logits = self.lm_head(hidden_states[:, -1, :].unsqueeze(1))
        return lm_logits.float()

    def load_weights(self, weights):
        slots = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "transformer.wte.weight":
                default_weight_loader(slots["lm_head.weight"], tensor)
            default_weight_loader(slots[name], tensor)
        return set(slots)
