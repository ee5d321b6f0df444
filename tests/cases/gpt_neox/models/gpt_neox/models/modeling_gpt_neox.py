"""
GPT-NeoX (Pythia) inference model.

Legacy KV cache, eager attention. All shapes are [batch, seq, ...] behind NeoXForCausalLM.forward.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_npu

from executor.core.config import InferenceConfig, CommManager
from executor.utils.forward_metadata import ForwardMetaData
from executor.model_loader.weight_utils import default_weight_loader

from .configuration_gpt_neox import NeoXConfig


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    """q, k: [B, S, N, D]; cos, sin: [B, S, 1, rotary_ndims]. Only the first rotary_ndims dims turn."""
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat([q_embed, q_pass], dim=-1), torch.cat([k_embed, k_pass], dim=-1)


def eager_attention_forward(module, query, key, value, attention_mask, scaling):
    # [B, S, N, D] -> [B, N, S, D]
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=module.attention_dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


class NeoXRotary(nn.Module):

    def __init__(self, config):
        super().__init__()
        head_size = config.hidden_size // config.num_attention_heads
        dim = int(head_size * config.rotary_pct)
        inv_freq = 1.0 / (config.rotary_emb_base ** (torch.arange(0, dim, 2).float() / dim))
        t = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        emb = torch.outer(t, inv_freq).repeat(1, 2)
        self.register_buffer('cos_table', emb.cos()[:, None], persistent=False)
        self.register_buffer('sin_table', emb.sin()[:, None], persistent=False)

    def forward(self, position_ids, dtype):
        return self.cos_table[position_ids].to(dtype), self.sin_table[position_ids].to(dtype)


class NeoXAttention(nn.Module):

    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads // infer_config.parallel_config.attn_tp_size
        self.head_size = config.hidden_size // config.num_attention_heads
        self.norm_factor = self.head_size ** -0.5
        self.attention_dropout = 0.0
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

        # Legacy cache, MHA: as many kv heads as query heads
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_heads, self.head_size)

    def forward(self, hidden_states, position_embeddings, kv_len, kv_seq_len, attention_mask):
        bsz, q_len, _ = hidden_states.shape

        # the checkpoint keeps q, k, v of one head side by side: [.., N, 3 * D]
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(bsz, q_len, self.num_heads, 3 * self.head_size)
        query, key, value = qkv.chunk(3, dim=-1)

        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)

        torch_npu.scatter_update_(self.k_cache, kv_len, key, 1)
        torch_npu.scatter_update_(self.v_cache, kv_len, value, 1)

        if q_len == 1:
            key = self.k_cache[:, :kv_seq_len]
            value = self.v_cache[:, :kv_seq_len]

        attn_output, _ = eager_attention_forward(self, query, key, value, attention_mask, self.norm_factor)
        attn_output = attn_output.reshape(bsz, q_len, -1)
        return self.dense(attn_output)


class NeoXMLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden_states)))


class NeoXLayer(nn.Module):

    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.use_parallel_residual = config.use_parallel_residual
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = NeoXAttention(config, infer_config, layer_idx)
        self.mlp = NeoXMLP(config)

    def forward(self, hidden_states, position_embeddings, kv_len, kv_seq_len, attention_mask):
        attn_output = self.attention(
            self.input_layernorm(hidden_states), position_embeddings, kv_len, kv_seq_len, attention_mask)

        if self.use_parallel_residual:
            # x = x + attn(ln1(x)) + mlp(ln2(x))
            mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
            return mlp_output + attn_output + hidden_states
        # x = x + attn(ln1(x)); x = x + mlp(ln2(x))
        attn_output = attn_output + hidden_states
        return self.mlp(self.post_attention_layernorm(attn_output)) + attn_output


class NeoXModel(nn.Module):

    def __init__(self, config, infer_config):
        super().__init__()
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([NeoXLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = NeoXRotary(config)
        self.cache_seq_len = (infer_config.data_config.input_truncated_len
                              + infer_config.scheduler_config.max_new_tokens)

    def forward(self, input_ids, position_ids, forward_metadata):
        bsz, q_len = input_ids.shape
        hidden_states = self.embed_in(input_ids)
        position_embeddings = self.rotary_emb(position_ids, hidden_states.dtype)

        kv_len = forward_metadata.kv_len
        attention_mask = None
        if forward_metadata.is_prefill:
            # flat slots of the packed prompts -> first slot of each prompt -> offset in its own row
            kv_len = kv_len[::q_len] % self.cache_seq_len
            kv_seq_len = q_len
            attention_mask = torch.zeros(q_len, q_len, dtype=hidden_states.dtype, device=hidden_states.device)
            attention_mask = attention_mask.masked_fill(
                forward_metadata.attention_mask[:q_len, :q_len], torch.finfo(hidden_states.dtype).min)
        else:
            kv_seq_len = int(kv_len[0]) + 1

        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, kv_len, kv_seq_len, attention_mask)
        return self.final_layer_norm(hidden_states)


class NeoXForCausalLM(nn.Module):

    def __init__(self, config: NeoXConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ''):
        super().__init__()
        self.config = config
        self.gpt_neox = NeoXModel(config, infer_config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        input_ids = input_ids.view(self.batch_size, -1)
        position_ids = position_ids.view(self.batch_size, -1)
        hidden_states = self.gpt_neox(input_ids, position_ids, forward_metadata)

        if hidden_states.size(1) > 1:
            last = torch.argmax(position_ids, dim=1)
            last = last[:, None, None].expand(-1, 1, hidden_states.size(-1))
            hidden_states = hidden_states.gather(1, last)
        return self.embed_out(hidden_states).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, w in weights:
            # masks and rotary buffers that old checkpoints carry
            if name.endswith(('attention.bias', 'attention.masked_bias', 'rotary_emb.inv_freq')):
                continue
            default_weight_loader(params[name], w)
            loaded.add(name)
        return loaded
