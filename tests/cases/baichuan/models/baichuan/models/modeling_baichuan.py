# Baichuan 2 7B (rotary positions), contiguous cache.
import math

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_baichuan import BaichuanConfig


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_position_embeddings=2048, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        t = torch.arange(max_position_embeddings, dtype=torch.float32)
        freqs = torch.outer(t, inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos()[None, None, :, :], persistent=False)
        self.register_buffer("sin_cached", emb.sin()[None, None, :, :], persistent=False)

    def forward(self):
        return self.cos_cached, self.sin_cached


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos_, sin_, position_ids):
    cos = cos_.squeeze(1).squeeze(0)  # [seq_len, dim]
    sin = sin_.squeeze(1).squeeze(0)
    cos = cos[position_ids].unsqueeze(1)  # [bs, 1, seq_len, dim]
    sin = sin[position_ids].unsqueeze(1)
    q_embed = (q.float() * cos) + (rotate_half(q.float()) * sin)
    k_embed = (k.float() * cos) + (rotate_half(k.float()) * sin)
    return q_embed.to(q.dtype), k_embed.to(k.dtype)


class MLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self, config: BaichuanConfig):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        if (self.head_dim * self.num_heads) != self.hidden_size:
            raise ValueError(f"hidden_size must be divisible by num_heads (got {self.hidden_size}, {self.num_heads})")
        self.W_pack = nn.Linear(self.hidden_size, 3 * self.hidden_size, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden_size, bias=False)
        self.rotary_emb = RotaryEmbedding(self.head_dim, max_position_embeddings=config.max_position_embeddings)

    def forward(self, hidden_states, position_ids, kv_memory, forward_metadata):
        bsz, q_len, _ = hidden_states.size()
        proj = self.W_pack(hidden_states)
        proj = proj.unflatten(-1, (3, self.hidden_size)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        query_states = proj[0].view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key_states = proj[1].view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        value_states = proj[2].view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        cos, sin = self.rotary_emb()
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin, position_ids)

        if forward_metadata.is_prefill:
            kv_memory["k"].narrow(2, 0, q_len).copy_(key_states)
            kv_memory["v"].narrow(2, 0, q_len).copy_(value_states)
            attention_mask = torch.full((q_len, q_len), float("-inf"), device=hidden_states.device).triu(diagonal=1)
        else:
            slot = forward_metadata.kv_len.view(bsz, 1, 1, 1).expand(-1, self.num_heads, 1, self.head_dim)
            kv_memory["k"].scatter_(2, slot, key_states)
            kv_memory["v"].scatter_(2, slot, value_states)
            key_states, value_states = kv_memory["k"], kv_memory["v"]
            column = torch.arange(key_states.shape[2], device=hidden_states.device)
            unseen = (column > forward_metadata.kv_len[:, None])[:, None, :, None]
            key_states, value_states = (x.masked_fill(unseen, 0) for x in (key_states, value_states))
            attention_mask = torch.zeros(unseen.shape, device=unseen.device).masked_fill(unseen, float("-inf"))
            attention_mask = attention_mask.transpose(2, 3)

        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) / math.sqrt(self.head_dim)
        attn_weights = F.softmax(attn_weights + attention_mask, dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_output = torch.matmul(attn_weights, value_states)
        if attn_output.size() != (bsz, self.num_heads, q_len, self.head_dim):
            raise ValueError("attn_output has the wrong size")
        attn_output = attn_output.transpose(1, 2)
        attn_output = attn_output.reshape(bsz, q_len, self.hidden_size)
        return self.o_proj(attn_output)


class DecoderLayer(nn.Module):
    def __init__(self, config: BaichuanConfig):
        super().__init__()
        self.self_attn = Attention(config=config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_ids, kv_memory, forward_metadata):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, position_ids, kv_memory, forward_metadata)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class BaichuanModel(nn.Module):
    def __init__(self, config: BaichuanConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids, position_ids, memory, forward_metadata: ForwardMetaData):
        hidden_states = self.embed_tokens(input_ids)
        for decoder_layer, kv_memory in zip(self.layers, memory):
            hidden_states = decoder_layer(hidden_states, position_ids, kv_memory, forward_metadata)
        return self.norm(hidden_states)


class BaichuanForCausalLM(nn.Module):
    def __init__(self, config: BaichuanConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = BaichuanModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.memory = []

    def init_cache(self, device):
        rows = self.infer_config.scheduler_config.batch_size_per_dp_rank
        length = self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens
        heads = self.config.num_attention_heads
        shape = (rows, heads, length, self.config.hidden_size // heads)
        dtype = self.lm_head.weight.dtype
        self.memory = [
            {"k": torch.zeros(shape, dtype=dtype, device=device), "v": torch.zeros(shape, dtype=dtype, device=device)}
            for _ in range(self.config.num_hidden_layers)
        ]

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.numel()
        input_ids = input_ids.view(bsz, -1)
        position_ids = position_ids.view(bsz, -1)
        hidden_states = self.model(input_ids, position_ids, self.memory, forward_metadata)
        last = position_ids.shape[1] - 1
        logits = self.lm_head(hidden_states[:, last:, :])
        return logits.float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        packed, done = {}, set()
        for name, tensor in weights:
            for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
                if part in name:
                    packed.setdefault(name.replace(part, "W_pack"), [None] * 3)[i] = tensor
                    break
            else:
                default_weight_loader(params[name], tensor)
                done.add(name)
        for name, parts in packed.items():
            default_weight_loader(params[name], torch.cat(parts))
            done.add(name)
        return done
