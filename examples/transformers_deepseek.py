"""A DeepSeek-V3 of transformers that decodes over its compressed cache, beside sdpa.

Weights are random; nothing is downloaded. It needs transformers 5.17 or newer.

Run it:     python3 examples/transformers_deepseek.py
Prints:     the device, the tokens a second of both, and what served the attention calls.
Exits with: 1 if the logits of a decode step differ by more than rounding.
"""

from __future__ import annotations

import sys
from time import perf_counter

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from mlagen.integrations.transformers import explain, use_mla

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
BATCH, PROMPT, NEW_TOKENS = (4, 1985, 64) if ON_GPU else (2, 59, 6)  # the last is not cached
HIDDEN, LAYERS, HEADS = (2048, 8, 32) if ON_GPU else (512, 2, 8)
TOLERANCE = 0.05  # of the standard deviation of the logits


def generate(model: DeepseekV3ForCausalLM, prompt: torch.Tensor) -> torch.Tensor:
    """Print the speed of the attention of the model, and return the logits of a decode step."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    mask = torch.ones_like(prompt)
    model.generate(prompt, attention_mask=mask, **options)  # compiles the kernel
    start = perf_counter()
    logits: torch.Tensor = model.generate(prompt, attention_mask=mask, **options).logits[1].cpu()
    speed = BATCH * NEW_TOKENS / (perf_counter() - start)
    print(f"{model.config._attn_implementation:6}: {speed:.0f} tokens a second")  # noqa: SLF001
    return logits.float()


torch.manual_seed(0)
config = DeepseekV3Config(  # latents of 512 elements and RoPE keys of 64 by default
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    num_hidden_layers=LAYERS,
    first_k_dense_replace=LAYERS,  # no experts: attention is what differs
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    vocab_size=1024,
    eos_token_id=None,
    pad_token_id=0,
)
model = DeepseekV3ForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
prompt = torch.randint(config.vocab_size, (BATCH, PROMPT), device=DEVICE)
print("device:", torch.cuda.get_device_name() if ON_GPU else "CPU, plain PyTorch")
sdpa = generate(model, prompt)
use_mla(model)
mlagen = generate(model, prompt)
print("calls:", explain())
sys.exit(int((sdpa - mlagen).abs().max() > TOLERANCE * sdpa.std()))
