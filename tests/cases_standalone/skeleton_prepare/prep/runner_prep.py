"""A runner whose model prepares its own inputs: one loop for both phases, the state travels in a dict."""

import logging
import os
import time

import torch
import torch.distributed as dist
import torch_npu
from safetensors.torch import load_file
from transformers import AutoTokenizer

from models.configuration_prep import PrepConfig
from models.modeling_prep import PrepForCausalLM


def causal_mask(length, device):
    return ~torch.tril(torch.ones((length, length), dtype=torch.bool, device=device))


class PrepRunner:
    def __init__(self, runner_settings):
        self.runner_settings = runner_settings
        self.model_name = runner_settings.get("model_name", "prep")
        self.model_path = runner_settings.get("model_config").get("model_path")
        self.input_max_len = runner_settings.get("data_config").get("input_max_len", 1024)
        self.max_new_tokens = runner_settings.get("data_config").get("max_new_tokens", 32)
        self.attn_tp_size = runner_settings.get("parallel_config").get("attn_tp_size", 1)
        self.rank = int(os.getenv("LOCAL_RANK", "0"))
        self.device = torch.device("npu", self.rank)
        torch.npu.set_device(self.device)
        if int(os.getenv("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group(backend="hccl", world_size=int(os.getenv("WORLD_SIZE")), rank=self.rank)
        self.past_key_values = None

    def init_model(self):
        self.config = PrepConfig.from_pretrained(self.model_path)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path, padding_side="right")
        model = PrepForCausalLM(self.config, self.runner_settings).to(torch.bfloat16)
        weights = load_file(os.path.join(self.model_path, "model.safetensors"))
        self.rank_in_tp = self.rank % self.attn_tp_size
        model.load_state_dict({name: self.shard(name, w) for name, w in weights.items()})
        self.model = model.to(self.device).eval()

    def shard(self, name, weight):
        """Attention projections are split over the tensor-parallel ranks."""
        for part, axis in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            if part in name:
                return weight.chunk(self.attn_tp_size, dim=axis)[self.rank_in_tp].contiguous()
        return weight

    def model_input_prepare(self, input_dict):
        if input_dict["past_key_values"] is None:
            self.past_key_values = self.model.init_cache(input_dict["input_ids"])
            input_dict["past_key_values"] = self.past_key_values
        return self.model.prepare_inputs_for_generation(
            input_ids=input_dict["input_ids"],
            attention_mask=input_dict["attention_mask"],
            past_key_values=self.past_key_values,
            is_prefill=input_dict["is_prefill"],
            kv_len=input_dict["kv_len"],
            causal_mask=input_dict["causal_mask"],
        )

    def model_inference(self, model_inputs, is_prefill):
        torch.npu.synchronize()
        start = time.time()
        with torch.no_grad():
            logits = self.model.prefill(**model_inputs) if is_prefill else self.model.decode(**model_inputs)
        torch.npu.synchronize()
        spent = (time.time() - start) * 1000
        stage = "prefill" if is_prefill else "decode"
        logging.info(f"{self.model_name} inference time cost of {stage} is {spent:.2f} ms")
        return logits

    def model_output_process(self, model_inputs, logits, input_dict):
        input_dict["is_prefill"] = False
        input_dict["kv_len"] = torch.max(model_inputs.get("position_ids"), dim=1)[0] + 1
        input_dict["attention_mask"] = None
        next_tokens = torch.argmax(logits, dim=-1)[:, -1:]
        input_dict["input_ids"] = next_tokens
        input_dict["generate_ids"] = torch.cat([input_dict["generate_ids"], next_tokens], dim=-1)

    def model_generate(self, prompts, warm_up=False):
        inputs = self.tokenizer(
            prompts, return_tensors="pt", padding="max_length", truncation=True, max_length=self.input_max_len
        ).to(self.device)
        input_dict = {
            "input_ids": inputs.input_ids,
            "generate_ids": inputs.input_ids,
            "attention_mask": inputs.attention_mask,
            "causal_mask": causal_mask(2048, self.device),
            "past_key_values": self.past_key_values,
            "kv_len": None,
            "is_prefill": True,
        }
        for _ in range(2 if warm_up else self.max_new_tokens):
            model_inputs = self.model_input_prepare(input_dict)
            logits = self.model_inference(model_inputs, input_dict["is_prefill"])
            self.model_output_process(model_inputs, logits, input_dict)
        return input_dict["generate_ids"]
