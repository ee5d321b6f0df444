# Mistral for cann executor: migrated from HF, eager mode, one card.
import torch
import torch_npu
from torch import nn

from executor.core.config import InferenceConfig, CommManager
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_mistral import MistralConfig


class MistralRMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, t):
        f = t.float()
        f = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * f.type_as(t)


class MistralRotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        # x: [bs, num_attention_heads, seq_len, head_size]
        freqs = torch.einsum("bs,d->bsd", position_ids.float(), self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # heads axis
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def sliding_causal_mask(position_ids, kv_total, window):
    """Bool mask [B, 1, Sq, Skv], True = attend. A query looks back `window` tokens."""
    q_pos = position_ids[:, None, :, None]
    kv_pos = torch.arange(kv_total, device=position_ids.device)
    mask = kv_pos <= q_pos
    if window is not None:
        mask = mask & (kv_pos >= q_pos - window)
    return mask


class MistralMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MistralSdpaAttention(nn.Module):
    def __init__(self, config: MistralConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.window = config.sliding_window

        self.q_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.hidden_size, bias=False)
        self.rotary_emb = MistralRotaryEmbedding(self.head_dim, base=config.rope_theta)

        # contiguous KV cache, allocated by the framework
        self.k_cache = torch.Tensor()
        self.v_cache = torch.Tensor()
        self.cache_unit = (self.num_key_value_heads * self.head_dim,)

    def forward(self, hidden_states, position_ids, metadata: ForwardMetaData):
        B, L, _ = hidden_states.shape

        q = self.q_proj(hidden_states).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(B, L, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(B, L, self.num_key_value_heads, self.head_dim).transpose(1, 2)

        cos, sin = self.rotary_emb(v, position_ids)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)

        offset = position_ids[:, 0]
        torch_npu.scatter_update_(self.k_cache, offset, k.transpose(1, 2).flatten(2), 1)
        torch_npu.scatter_update_(self.v_cache, offset, v.transpose(1, 2).flatten(2), 1)
        if metadata.is_prefill:
            kv_total = L
        else:
            kv_total = int(position_ids.max()) + 1
            k = self.k_cache[:, :kv_total].unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            v = self.v_cache[:, :kv_total].unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        # GQA: repeat k/v heads if n_kv_heads < n_heads
        n_rep = self.num_heads // self.num_key_value_heads
        k = k.repeat_interleave(n_rep, dim=1)
        v = v.repeat_interleave(n_rep, dim=1)

        mask = sliding_causal_mask(position_ids, kv_total, self.window)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o = o.transpose(1, 2).contiguous().view(B, L, self.num_heads * self.head_dim)
        return self.o_proj(o)


class MistralDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = MistralSdpaAttention(config, layer_idx)
        self.mlp = MistralMLP(config)
        self.input_layernorm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, past_residual, position_ids, metadata):
        residual = hidden_states if past_residual is None else hidden_states + past_residual
        hidden_states = self.self_attn(self.input_layernorm(residual), position_ids, metadata)
        residual = residual + hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(residual))
        return (residual, hidden_states)


class MistralModel(nn.Module):
    def __init__(self, config, infer_config: InferenceConfig):
        super().__init__()
        self.batch_size_per_dp_rank = infer_config.scheduler_config.batch_size_per_dp_rank
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MistralDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, position_ids, metadata):
        # the framework hands over packed tokens; equal prompt lengths assumed
        input_ids = input_ids.view(self.batch_size_per_dp_rank, -1)
        position_ids = position_ids.view(self.batch_size_per_dp_rank, -1)

        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            residual, hidden_states = layer(hidden_states, residual, position_ids, metadata)
        return self.norm(residual + hidden_states)


class MistralForCausalLM(nn.Module):
    def __init__(self, config, infer_config: InferenceConfig, comm_manager: CommManager = None, prefix=""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = MistralModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        out = self.model(input_ids, position_ids, forward_metadata)
        bs = out.shape[0]
        # last token of every request; lengths are all 1 in decode
        rows = torch.arange(bs, device=out.device)
        out = out[rows, forward_metadata.actual_seq_lengths_q - 1]
        return self.lm_head(out).view(bs, 1, -1).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        done = set()
        for name, w in weights:
            if name in params:
                default_weight_loader(params[name], w)
                done.add(name)
        return done
