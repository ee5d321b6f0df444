# coding=utf-8
# Command R7B (Cohere2): 3 sliding-window layers with rotary, then one global layer without positions.
import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData
from .configuration_cohere2 import R7BConfig


class R7BLayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), None, self.eps).to(x.dtype)


class R7BRotary(nn.Module):
    def __init__(self, head_dim, base, max_len):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))
        angle = torch.arange(max_len).float()[:, None] * inv_freq[None]
        angle = torch.repeat_interleave(angle, 2, dim=-1)
        self.register_buffer("cos_cached", angle.cos(), persistent=False)
        self.register_buffer("sin_cached", angle.sin(), persistent=False)

    def forward(self, position_ids):
        # [B, S] -> [B, S, 1, D]
        cos = F.embedding(position_ids, self.cos_cached).unsqueeze(2)
        sin = F.embedding(position_ids, self.sin_cached).unsqueeze(2)
        return cos, sin


def rotate_pairs(x):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([-odd, even], dim=-1).flatten(-2)


def apply_rope(x, cos, sin):
    xf = x.float()
    return (xf * cos + rotate_pairs(xf) * sin).to(x.dtype)


class R7BAttention(nn.Module):
    def __init__(self, config: R7BConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        attn_tp = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads // attn_tp
        self.num_kv_heads = max(config.num_key_value_heads // attn_tp, 1)
        self.scale_value = 1.0 / (self.head_dim ** 0.5)
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=bias)

        # Legacy cache, filled in by the framework
        self.k_cache, self.v_cache = torch.Tensor([]), torch.Tensor([])
        self.cache_unit = (self.num_kv_heads, self.head_dim)

    def forward(
        self,
        hidden_states,
        cos_sin=None,
        kv_len=None,
        actual_seq_lengths_kv=None,
        attention_mask=None,
        is_prefill=True,
    ):
        bsz, q_len, _ = hidden_states.size()

        q = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)

        if self.sliding_window is not None:
            cos, sin = cos_sin
            q = apply_rope(q, cos, sin)
            k = apply_rope(k, cos, sin)

        torch_npu.scatter_update_(self.k_cache, kv_len, k, 1)
        torch_npu.scatter_update_(self.v_cache, kv_len, v, 1)

        if is_prefill:
            if self.sliding_window is not None:
                # band: the window counts the token itself
                window_args = {"sparse_mode": 4, "pre_tokens": self.sliding_window - 1, "next_tokens": 0}
            else:
                window_args = {"sparse_mode": 3}
            attn_output, _ = torch_npu.npu_fused_infer_attention_score(
                q.reshape(bsz, q_len, -1),
                k.reshape(bsz, q_len, -1),
                v.reshape(bsz, q_len, -1),
                num_heads=self.num_heads,
                num_key_value_heads=self.num_kv_heads,
                scale=self.scale_value,
                input_layout="BSH",
                atten_mask=attention_mask,
                actual_seq_lengths=actual_seq_lengths_kv,
                actual_seq_lengths_kv=actual_seq_lengths_kv,
                **window_args,
            )
        else:
            # With one query the kernel looks at every key it is given, so the window is cut out here
            # (all rows of a batch have the same length).
            end = int(kv_len.max()) + 1
            start = max(end - self.sliding_window, 0) if self.sliding_window is not None else 0
            k_all = self.k_cache[:, start:end].reshape(bsz, end - start, -1)
            v_all = self.v_cache[:, start:end].reshape(bsz, end - start, -1)
            attn_output, _ = torch_npu.npu_fused_infer_attention_score(
                q.reshape(bsz, q_len, -1),
                k_all.contiguous(),
                v_all.contiguous(),
                num_heads=self.num_heads,
                num_key_value_heads=self.num_kv_heads,
                scale=self.scale_value,
                input_layout="BSH",
                atten_mask=None,
                sparse_mode=0,
            )
        return self.o_proj(attn_output.view(bsz, q_len, -1))


class R7BMLP(nn.Module):
    def __init__(self, config: R7BConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class R7BDecoderLayer(nn.Module):
    def __init__(self, config: R7BConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = R7BAttention(config, infer_config, layer_idx)
        self.mlp = R7BMLP(config)
        self.input_layernorm = R7BLayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states, cos_sin=None, kv_len=None, actual_seq_lengths_kv=None, attention_mask=None,
                is_prefill=True):
        normed = self.input_layernorm(hidden_states)
        attn = self.self_attn(
            normed,
            cos_sin=cos_sin,
            kv_len=kv_len,
            actual_seq_lengths_kv=actual_seq_lengths_kv,
            attention_mask=attention_mask,
            is_prefill=is_prefill,
        )
        return hidden_states + attn + self.mlp(normed)


class R7BModel(nn.Module):
    def __init__(self, config: R7BConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(
            R7BDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = R7BLayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = R7BRotary(config.head_dim, config.rope_theta, config.max_position_embeddings)

    def forward(self, input_ids, position_ids, kv_len, forward_metadata: ForwardMetaData):
        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                cos_sin=cos_sin,
                kv_len=kv_len,
                actual_seq_lengths_kv=forward_metadata.actual_seq_lengths_kv,
                attention_mask=forward_metadata.attention_mask if forward_metadata.is_prefill else None,
                is_prefill=forward_metadata.is_prefill,
            )
        return self.norm(hidden_states)


class R7BForCausalLM(nn.Module):
    def __init__(self, config: R7BConfig, infer_config: InferenceConfig, comm_manager: CommManager = None, prefix=""):
        super().__init__()
        self.config = config
        self.model = R7BModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight  # use_embedding_sharing
        self.logit_scale = config.logit_scale

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        q_len = input_ids.shape[0] // bsz
        input_ids = input_ids.view(bsz, q_len)
        position_ids = position_ids.view(bsz, q_len)

        if forward_metadata.is_prefill:
            # flat slots are of no use behind the fold
            kv_len = torch.zeros(bsz, dtype=torch.int64, device=input_ids.device)
        else:
            kv_len = forward_metadata.kv_len

        hidden_states = self.model(input_ids, position_ids, kv_len, forward_metadata)

        if forward_metadata.is_prefill:
            rows = torch.arange(bsz, device=input_ids.device)
            hidden_states = hidden_states[rows, forward_metadata.actual_seq_lengths_q - 1].unsqueeze(1)
        return (self.lm_head(hidden_states) * self.logit_scale).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name == "lm_head.weight":
                continue
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
