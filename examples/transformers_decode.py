"""A Llama of transformers that decodes with mlagen, token for token like eager attention.

Shows an attention function for AttentionInterface.register: decode steps over a static cache go to
grouped-query attention where the cache lies, one page a request; the prompt goes to eager
attention. The model is tiny and random; nothing is downloaded. It needs transformers 5.

Run it:     python3 examples/transformers_decode.py
Prints:     the device, the new tokens of both, and how many attention calls mlagen served.
Exits with: 1 if the tokens differ.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from mlagen.decode import xqa_batch_decode_with_kv_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, PROMPT, NEW_TOKENS = 2, 33, 16  # a cache of 48 tokens: a multiple of 16 suits gqa_sm90
workspace = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
q_lens: list[int] = []  # of the calls that mlagen serves


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with mlagen where there is one query token; prompts have no padding on the left."""
    batch, _, q_len, _ = query.shape
    if q_len > 1:
        masked = (attention_mask, scaling)
        return eager_attention_forward(module, query, key, value, *masked, **kwargs)[0], None
    q_lens.append(q_len)
    # key and value are the whole cache, [batch, kv_heads, tokens, head_dim]: pages of HND layout.
    seq_lens = (kwargs["position_ids"][:, -1] + 1).int().expand(batch).contiguous()
    out = xqa_batch_decode_with_kv_cache(
        query[:, :, 0],
        (key, value),
        workspace,
        block_tables=torch.arange(batch, dtype=torch.int32, device=query.device)[:, None],
        seq_lens=seq_lens,
        max_seq_len=key.shape[2],
        bmm1_scale=scaling,
        kv_layout="HND",
    )
    return out[:, None], None


AttentionInterface.register("mlagen", attention)
AttentionMaskInterface.register("mlagen", eager_mask)


def generate(model: LlamaForCausalLM, prompt: torch.Tensor, implementation: str) -> list[list[int]]:
    """Return the greedy tokens of an attention implementation."""
    model.set_attn_implementation(implementation)
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    static = {"cache_implementation": "static", "disable_compile": True}
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy, **static)
    return [row[PROMPT:] for row in tokens.tolist()]


torch.manual_seed(2)
config = LlamaConfig(
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=64,
    initializer_range=0.05,  # logits differ by more than rounding changes them
    eos_token_id=None,
)
model = LlamaForCausalLM(config).to(DEVICE, torch.float16).eval()
prompt = torch.randint(config.vocab_size, (BATCH, PROMPT), device=DEVICE)
eager, ours = (generate(model, prompt, name) for name in ("eager", "mlagen"))
print("device:", torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, plain PyTorch")
print("eager: ", *eager, "\nmlagen:", *ours)
print("attention calls of mlagen:", len(q_lens))
sys.exit(0 if ours == eager else 1)
