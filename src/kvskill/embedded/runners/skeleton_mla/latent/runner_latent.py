"""A runner that owns the loop and the cache: tokenize, prefill, decode step by step."""

import logging
import os
import time

import torch
import torch_npu
from safetensors.torch import load_file
from transformers import AutoTokenizer

from models.configuration_latent import LatentConfig
from models.modeling_latent import LatentForCausalLM

logger = logging.getLogger(__name__)


def get_init_attn_mask(mask_length, device):
    return ~torch.tril(torch.ones((mask_length, mask_length), dtype=torch.bool, device=device))


class LatentRunner:
    def __init__(self, runner_settings):
        self.runner_settings = runner_settings
        self.model_name = runner_settings.get("model_name", "latent")
        self.model_path = runner_settings.get("model_config").get("model_path")
        self.max_seq_len = runner_settings.get("model_config").get("max_seq_len", 2048)
        self.max_new_tokens = runner_settings.get("scheduler_config").get("max_new_tokens", 32)
        self.input_truncated_len = runner_settings.get("data_config").get("input_truncated_len", 1024)
        self.device = torch.device("npu", int(os.getenv("LOCAL_RANK", "0")))
        torch.npu.set_device(self.device)
        self.dtype = torch.bfloat16
        self.config = LatentConfig.from_pretrained(self.model_path)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        self.model = self._load_model()
        self.attn_mask = get_init_attn_mask(2048, self.device)

    def _load_model(self):
        model = LatentForCausalLM(self.config).to(self.dtype)
        model.load_state_dict(load_file(os.path.join(self.model_path, "model.safetensors")))
        return model.to(self.device).eval()

    def init_static_kvcache(self, batch_size, max_seq_len):
        """One (latent, rope) pair for each layer, [batch, max_seq_len, size]."""
        latent, rope = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        cache = []
        for _ in range(self.config.num_hidden_layers):
            k = torch.zeros(batch_size, max_seq_len, latent, dtype=self.dtype, device=self.device)
            v = torch.zeros(batch_size, max_seq_len, rope, dtype=self.dtype, device=self.device)
            cache.append((k, v))
        return cache

    @torch.no_grad()
    def model_generate(self, prompts, warm_up=False):
        inputs = self.tokenizer(
            prompts, return_tensors="pt", padding=True, truncation=True, max_length=self.input_truncated_len
        )
        input_ids = inputs.input_ids.to(self.device)
        batch_size, input_seq_len = input_ids.shape
        past_key_values = self.init_static_kvcache(batch_size, self.max_seq_len)
        generated_ids = input_ids.clone()

        # prefill
        kv_len = torch.zeros((batch_size,), dtype=torch.int32, device=self.device)
        position_ids = torch.arange(input_seq_len, device=self.device).unsqueeze(0).expand(batch_size, -1)
        torch.npu.synchronize()
        start = time.time()
        outputs = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=past_key_values,
            kv_len=kv_len,
            attention_mask=self.attn_mask[:input_seq_len, :input_seq_len],
            is_prefill=True,
        )
        torch.npu.synchronize()
        if not warm_up:
            spent = (time.time() - start) * 1000
            logger.info(f"{self.model_name} inference time cost of prefill is {spent:.2f} ms")
        next_token = outputs.logits[:, -1].argmax(dim=-1, keepdim=True)
        generated_ids = torch.cat([generated_ids, next_token], dim=-1)

        # decode
        for step in range(self.max_new_tokens - 1):
            kv_len = torch.tensor([input_seq_len + step] * batch_size, dtype=torch.int32, device=self.device)
            position_ids = kv_len.unsqueeze(-1)
            torch.npu.synchronize()
            start = time.time()
            outputs = self.model(
                input_ids=next_token,
                position_ids=position_ids,
                past_key_values=past_key_values,
                kv_len=kv_len,
                attention_mask=None,
                is_prefill=False,
            )
            torch.npu.synchronize()
            if not warm_up:
                spent = (time.time() - start) * 1000
                logger.info(f"{self.model_name} inference time cost of decode is {spent:.2f} ms")
            next_token = outputs.logits[:, -1].argmax(dim=-1, keepdim=True)
            generated_ids = torch.cat([generated_ids, next_token], dim=-1)
            if (next_token == self.tokenizer.eos_token_id).all():
                break

        if not warm_up:
            for i in range(batch_size):
                logger.info(f"Request {i}: {self.tokenizer.decode(generated_ids[i], skip_special_tokens=True)}")
        return generated_ids
