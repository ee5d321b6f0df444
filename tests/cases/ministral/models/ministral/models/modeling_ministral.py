"""
Ministral (interleaved sliding window) for the executor framework.

Ported from the Hugging Face file. One device, KV cache in the static form:
    k_cache, v_cache: [batch, max_len, heads * head_dim]
"""
import torch
from torch import nn
import torch.nn.functional as F
import torch_npu

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_ministral import MinistralConfig


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = x.to(torch.float32)
        y = y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary(x, angles):
    """x: [B, S, N, D], angles: [B, S, D/2]"""
    first, second = x.unflatten(-1, (2, -1)).unbind(-2)
    cos, sin = angles.cos().unsqueeze(2).to(x.dtype), angles.sin().unsqueeze(2).to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MinistralAttention(nn.Module):
    def __init__(self, config: MinistralConfig, index: int):
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.dim = config.head_dim
        self.groups = self.heads // self.kv_heads
        self.scale = self.dim ** -0.5
        # only the sliding layers have a window
        self.window = config.sliding_window if config.layer_types[index] == "sliding_attention" else None

        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

        # K/V are stored after the GQA repeat, hence all query heads
        self.cache_unit = (self.heads * self.dim,)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])

    def forward(self, x, angles, pos, meta):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.dim)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.dim)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim)
        q, k = rotary(q, angles), rotary(k, angles)

        k = torch.repeat_interleave(k, self.groups, dim=2).reshape(batch, length, -1)
        v = torch.repeat_interleave(v, self.groups, dim=2).reshape(batch, length, -1)

        begin = pos[:, 0]
        torch_npu.scatter_update_(self.k_cache, begin, k, -2)
        torch_npu.scatter_update_(self.v_cache, begin, v, -2)
        if not meta.is_prefill:
            # everything up to the newest token
            k = self.k_cache[:, : int(begin.max()) + 1]
            v = self.v_cache[:, : int(begin.max()) + 1]

        q = q.transpose(1, 2)
        k = k.view(batch, -1, self.heads, self.dim).transpose(1, 2)
        v = v.view(batch, -1, self.heads, self.dim).transpose(1, 2)

        distance = pos[:, :, None] - torch.arange(k.shape[2], device=pos.device)
        blocked = distance < 0
        if self.window is not None:
            blocked |= distance >= self.window
        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(blocked.unsqueeze(1), torch.finfo(scores.dtype).min)
        probs = torch.softmax(scores.float(), dim=-1).to(v.dtype)
        out = torch.matmul(probs, v)

        out = out.transpose(1, 2).reshape(batch, length, self.heads * self.dim)
        return self.o_proj(out)


class MinistralDecoderLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.self_attn = MinistralAttention(config, index)
        self.mlp = SwiGLU(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, angles, pos, meta):
        x = x + self.self_attn(self.input_layernorm(x), angles, pos, meta)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class MinistralModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            self.layers.append(MinistralDecoderLayer(config, index))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.register_buffer("inv_freq", 1.0 / config.rope_theta ** half, persistent=False)

    def forward(self, ids, pos, meta):
        x = self.embed_tokens(ids)
        angles = pos.unsqueeze(-1).float() * self.inv_freq
        for layer in self.layers:
            x = layer(x, angles, pos, meta)
        return self.norm(x)


class MinistralForCausalLM(nn.Module):
    def __init__(self, config: MinistralConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = MinistralModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        if input_ids.ndim == 1:
            # rows of equal length
            rows = forward_metadata.actual_seq_lengths_q.shape[0]
            input_ids, position_ids = input_ids.view(rows, -1), position_ids.view(rows, -1)

        x = self.model(input_ids, position_ids, forward_metadata)
        if forward_metadata.is_prefill:
            last = (forward_metadata.actual_seq_lengths_q - 1).view(-1, 1, 1)
            x = x.gather(1, last.expand(-1, -1, x.size(-1)))
        return self.lm_head(x).float()

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        seen = set()
        for name, tensor in weights:
            if name not in own:
                continue
            default_weight_loader(own[name], tensor)
            seen.add(name)
        return seen
