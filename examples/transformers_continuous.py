"""Continuous batching of transformers with ``paged|mlagen``, beside ``paged|sdpa``.

Weights are random; nothing is downloaded. It needs transformers 5.17, psutil without a GPU.

Run it:     python3 examples/transformers_continuous.py
Prints:     the device, the tokens a second of both, and what served the attention calls.
Exits with: 1 if a request has other tokens than with sdpa, or what it needs is missing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from time import perf_counter

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mlagen.integrations.transformers import explain, register

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
PROMPTS = [2, 21, 11] * (16 if ON_GPU else 1)  # tokens of each request
NEW_TOKENS = 5
GREEDY = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
BATCHING = {"num_blocks": 256, "block_size": 32, "max_batch_tokens": 64, "use_cuda_graph": False}


def generate(model: LlamaForCausalLM, row: list[int], name: str) -> list[list[int]]:
    """Print the speed of an attention implementation, and return the tokens of each request."""
    model.set_attn_implementation(name)
    requests = [row[:length] for length in PROMPTS]
    for _ in range(2):  # the first one compiles the kernel
        start = perf_counter()
        batching = ContinuousBatchingConfig(**BATCHING)
        given = {"generation_config": GREEDY, "continuous_batching_config": batching}
        outputs = model.generate_batch(requests, warmup=False, **given).values()
        seconds = perf_counter() - start
    print(f"{name:12}: {len(outputs) * NEW_TOKENS / seconds:.0f} tokens a second")
    return sorted([*output.prompt_ids, *output.generated_tokens] for output in outputs)


register()
if "paged|mlagen" not in ALL_ATTENTION_FUNCTIONS:
    sys.exit(f"transformers: expected 5.17 for paged|mlagen, got {transformers.__version__}")
if not ON_GPU and find_spec("psutil") is None:
    sys.exit("psutil: expected an installed package without a GPU, got none")

torch.manual_seed(15)
config = LlamaConfig(
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=64,
    initializer_range=0.05,  # logits differ by more than rounding changes them
)
model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
row = torch.randint(1, 64, (2, 21), generator=torch.Generator().manual_seed(0))[0].tolist()
print("device:", torch.cuda.get_device_name() if ON_GPU else "CPU, plain PyTorch")
sdpa, mlagen = (generate(model, row, name) for name in ("paged|sdpa", "paged|mlagen"))
print("calls:", explain())
sys.exit(0 if len(sdpa) == len(PROMPTS) and sdpa == mlagen else 1)
