"""A Llama of transformers that decodes with mlagen over a static cache, beside sdpa.

Weights are random; nothing is downloaded. It needs transformers 5.17 or newer.

Run it:     python3 examples/transformers_llama.py
Prints:     the device, the tokens a second of both, and what served the attention calls.
Exits with: 1 if the logits of a decode step differ by more than rounding.
"""

from __future__ import annotations

import sys
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mlagen.integrations.transformers import explain, register

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
BATCH, PROMPT, NEW_TOKENS = (8, 3841, 256) if ON_GPU else (2, 59, 6)  # the last is not cached
HIDDEN, LAYERS = (2048, 8) if ON_GPU else (512, 2)
TOLERANCE = 0.05  # of the standard deviation of the logits


def generate(model: LlamaForCausalLM, prompt: torch.Tensor, name: str) -> torch.Tensor:
    """Print the speed of an attention implementation, and return the logits of a decode step."""
    model.set_attn_implementation(name)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    mask = torch.ones_like(prompt)
    model.generate(prompt, attention_mask=mask, **options)  # compiles the kernel
    start = perf_counter()
    logits: torch.Tensor = model.generate(prompt, attention_mask=mask, **options).logits[1].cpu()
    seconds = perf_counter() - start
    print(f"{name:6}: {BATCH * NEW_TOKENS / seconds:.0f} tokens a second")
    return logits.float()


torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HIDDEN // 64,
    num_key_value_heads=HIDDEN // 256,
    vocab_size=1024,
    max_position_embeddings=8192,
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
prompt = torch.randint(config.vocab_size, (BATCH, PROMPT), device=DEVICE)
register()
print("device:", torch.cuda.get_device_name() if ON_GPU else "CPU, plain PyTorch")
sdpa, mlagen = (generate(model, prompt, name) for name in ("sdpa", "mlagen"))
print("calls:", explain())
sys.exit(int((sdpa - mlagen).abs().max() > TOLERANCE * sdpa.std()))
