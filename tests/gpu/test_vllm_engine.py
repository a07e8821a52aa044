"""Engines of vLLM over tiny random models: tokens of transformers by mlagen's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.servers import is_installed
from tests.integrations.vllm import engine

ROOT = Path(__file__).resolve().parents[2]
LAYERS, VOCABULARY = 3, 8192
# More tokens than a step of the engine takes: a prompt is prefilled while others decode.
LENGTHS = (5, 17, 64, 65, 200, 511, 1000, 1800)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 4096,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled for minutes
    "VLLM_HAS_FLASHINFER_CUBIN": "1",  # or vLLM does not call XQA, which is mlagen here
}


def llama() -> Any:
    """Return a Llama of grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return LlamaForCausalLM(LlamaConfig(**SIZES | heads))


def deepseek_v3() -> Any:
    """Return a DeepSeek-V3 of dense layers: rounding may choose other experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 512}
    dense = {"first_k_dense_replace": LAYERS, "mlp_layer_types": ["dense"] * LAYERS}
    unused = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | heads | dense | unused))


def models_in(folder: Path, make: Any, device: str) -> tuple[Any, Any]:
    """Return a model in bf16, saved in a folder, and the same in fp32."""
    torch.manual_seed(0)
    model = make()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            # Scores have a standard deviation of 2, so that attention decides tokens.
            std = 1.0 if "embed_tokens" in name else (2 / weight.shape[1]) ** 0.5
            torch.nn.init.normal_(weight, std=std)
    model.bfloat16().save_pretrained(folder)
    # Loaded, because a cast of the model rounds the frequencies of RoPE too.
    load = partial(type(model).from_pretrained, folder, attn_implementation="eager")
    return load(dtype=torch.bfloat16).to(device), load(dtype=torch.float32).to(device)


def engine_over(folder: Path, backend: str, mode: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Return what an engine did, run by a process of its own."""
    given, result = folder / "prompts", folder / "result"
    given.write_text(json.dumps(prompts))
    command = [sys.executable, "-m", engine.__name__, *map(str, (folder, backend, mode))]

    done = subprocess.run(
        [*command, str(given), str(result)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    did: dict[str, Any] = json.loads(result.read_text())
    return did


@torch.no_grad()
def logits_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the logits from which each of the tokens is chosen."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    logits: torch.Tensor = model(ids, logits_to_keep=len(tokens), use_cache=False).logits[0]
    return logits.float()


@pytest.mark.skipif(
    not is_installed("vllm") or not entry_points(group="vllm.general_plugins", name="mlagen"),
    reason="needs vLLM, and mlagen installed beside it",
)
@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize(("make", "backend"), [(llama, "MLAGEN_GQA"), (deepseek_v3, "MLAGEN_MLA")])
def test_tokens_are_those_of_transformers(
    make: Any, backend: str, mode: str, device: str, tmp_path: Path
) -> None:
    """Each decode step launches mlagen's kernels, and errs about as bf16 does elsewhere."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if backend == "MLAGEN_GQA" and not (is_hopper and is_installed("flashinfer")):
        pytest.skip("MLAGEN_GQA needs FlashInfer, and a GPU of compute capability 9.0")
    rounded, exact = models_in(tmp_path, make, device)
    prompts = [torch.randint(VOCABULARY, (length,)).tolist() for length in LENGTHS]

    did = engine_over(tmp_path, backend, mode, prompts)

    steps = engine.COUNTED - 1
    kernel = f"{backend.removeprefix('MLAGEN_').lower()}_sm"
    assert did["backends"] == [backend] * LAYERS
    assert sum(n for name, n in did["kernels"].items() if name.startswith(kernel)) == LAYERS * steps
    assert did["replays"] == (steps if mode == "graphs" else 0)
    assert did["repeated"] == did["tokens"]
    rows = []
    for prompt, tokens, logprobs in zip(prompts, did["tokens"], did["logprobs"], strict=True):
        assert len(tokens) == engine.NEW
        chosen = torch.tensor(tokens, device=device)[:, None]
        got, wanted = (logits_of(model, prompt, tokens) for model in (rounded, exact))
        gap = (wanted.amax(1, keepdim=True) - wanted.gather(1, chosen)).max()
        error = (got - wanted).abs().max()
        got, wanted = (each.log_softmax(1).gather(1, chosen)[:, 0] for each in (got, wanted))
        drift = (torch.tensor(logprobs, device=device) - wanted).abs().mean()
        rows.append(torch.stack([gap, error, drift, (got - wanted).abs().mean()]))
    gap, error, drift, usual = torch.stack(rows).T
    # The bounds are errors of transformers in bf16 over the same tokens. An engine that errs as
    # much in two logits chooses a token at most twice the largest error below the best one. Mean
    # errors of two orders of rounding differ less than the largest.
    assert gap.max() <= 2 * error.max()
    assert drift.mean() <= 1.5 * usual.mean()
