# coding=utf-8
# GPT-2 family (stanford-crfm checkpoints scale the scores of layer i by 1 / (i + 1)).

import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_gpt2 import GPT2NpuConfig


class Conv1D(nn.Module):
    """A linear layer whose weight is kept [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class GPT2Attention(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        max_positions = config.n_positions
        self.register_buffer(
            "bias",
            torch.tril(torch.ones((max_positions, max_positions), dtype=torch.bool)).view(
                1, 1, max_positions, max_positions
            ),
            persistent=False,
        )
        self.layer_idx = layer_idx
        self.embed_dim = config.n_embd
        self.num_heads = config.n_head
        self.head_dim = self.embed_dim // self.num_heads
        self.split_size = self.embed_dim

        # Precompute unified scaling factor (accounts for both head_dim and layer-wise scaling)
        self.scaling = 1.0
        if config.scale_attn_weights:
            self.scaling = self.head_dim**-0.5
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= float(self.layer_idx + 1)

        self.c_attn = Conv1D(3 * self.embed_dim, self.embed_dim)
        self.c_proj = Conv1D(self.embed_dim, self.embed_dim)

        self.k_cache = torch.tensor([])
        self.v_cache = torch.tensor([])
        self.cache_unit = (self.num_heads * self.head_dim,)

    def _attn(self, query, key, value, visible):
        attn_weights = torch.matmul(query, key.transpose(-1, -2)) * self.scaling
        mask_value = torch.finfo(attn_weights.dtype).min
        mask_value = torch.full([], mask_value, dtype=attn_weights.dtype, device=attn_weights.device)
        attn_weights = torch.where(visible, attn_weights, mask_value)
        attn_weights = nn.functional.softmax(attn_weights.float(), dim=-1)
        attn_weights = attn_weights.type(value.dtype)
        return torch.matmul(attn_weights, value)

    def _split_heads(self, tensor):
        new_shape = tensor.size()[:-1] + (self.num_heads, self.head_dim)
        return tensor.view(new_shape).permute(0, 2, 1, 3)  # (batch, head, seq_length, head_features)

    def _merge_heads(self, tensor):
        tensor = tensor.permute(0, 2, 1, 3).contiguous()
        return tensor.view(tensor.size()[:-2] + (self.num_heads * self.head_dim,))

    def forward(self, hidden_states, kv_len, written, is_prefill):
        bsz = hidden_states.shape[0]
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)

        key_cache, value_cache = self.k_cache[:bsz], self.v_cache[:bsz]
        torch_npu.scatter_update_(key_cache, kv_len, key, -2)
        torch_npu.scatter_update_(value_cache, kv_len, value, -2)

        if is_prefill:
            q_len = query.size(1)
            visible = self.bias[:, :, :q_len, :q_len]
        else:
            # The cache is uninitialised memory behind the last token: mask the scores, and clear the
            # rows, because 0 * nan is nan.
            key = torch.where(written[:, :, None], key_cache, torch.zeros_like(key_cache))
            value = torch.where(written[:, :, None], value_cache, torch.zeros_like(value_cache))
            visible = written[:, None, None, :]

        query = self._split_heads(query)
        key = self._split_heads(key)
        value = self._split_heads(value)
        attn_output = self._attn(query, key, value, visible)
        attn_output = self._merge_heads(attn_output)
        attn_output = self.c_proj(attn_output)
        return attn_output, (key_cache, value_cache)


class GPT2MLP(nn.Module):
    def __init__(self, intermediate_size, config):
        super().__init__()
        self.c_fc = Conv1D(intermediate_size, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, intermediate_size)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden_states):
        return self.c_proj(self.act(self.c_fc(hidden_states)))


class GPT2Block(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        inner_dim = config.n_inner if config.n_inner is not None else 4 * config.n_embd
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, infer_config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(inner_dim, config)

    def forward(self, hidden_states, kv_len, written, is_prefill):
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_outputs = self.attn(hidden_states, kv_len, written, is_prefill)
        attn_output = attn_outputs[0]
        hidden_states = attn_output + residual

        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        hidden_states = residual + self.mlp(hidden_states)
        return (hidden_states,) + attn_outputs[1:]


class GPT2Transformer(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList([GPT2Block(config, infer_config, layer_idx=i) for i in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, input_ids, position_ids, forward_metadata):
        is_prefill = forward_metadata.is_prefill
        bsz, q_len = input_ids.shape

        written = None
        if is_prefill:
            kv_len = torch.zeros(bsz, dtype=torch.long, device=input_ids.device)
        else:
            kv_len = forward_metadata.kv_len
            cache_len = self.h[0].attn.k_cache.shape[1]
            written = torch.arange(cache_len, device=input_ids.device)[None] <= kv_len[:, None]

        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            outputs = block(hidden_states, kv_len, written, is_prefill)
            hidden_states = outputs[0]
        return self.ln_f(hidden_states)


class GPT2ForCausalLM(nn.Module):
    def __init__(
        self,
        config: GPT2NpuConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.transformer = GPT2Transformer(config, infer_config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = self.transformer(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        if forward_metadata.is_prefill:
            hidden_states = hidden_states[:, -1, :].unsqueeze(1)
        logits = self.lm_head(hidden_states)
        return logits.to(torch.float32)

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name.endswith((".attn.bias", ".attn.masked_bias")):  # causal mask buffers of old files
                continue
            if not name.startswith(("transformer.", "lm_head.")):
                name = "transformer." + name
            if name == "lm_head.weight":
                continue
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        # tied head
        self.lm_head.weight.data.copy_(self.transformer.wte.weight.data)
        loaded.add("lm_head.weight")
        return loaded
