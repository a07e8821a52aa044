"""Tiny models for engines of servers, what an engine did, and its bounds against transformers.

The module of an engine calls :func:`main`. A test runs it in a process of its own, because
servers keep state of their first engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
LAYERS, VOCABULARY = 3, 8192
# More tokens than a step of the engine takes: prefill splits a prompt.
LENGTHS = (5, 17, 64, 65, 200, 511, 1000, 1800)
STEP = 2048
# Tokens of a request, and of one whose kernels are counted. Prefill gives the first.
NEW, COUNTED = 32, 9
STEPS = COUNTED - 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 4096,
}


def llama() -> Any:
    """Return a Llama of grouped-query attention."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config())


def llama_config() -> Any:
    """Return the configuration of that model."""
    from transformers import LlamaConfig

    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return LlamaConfig(**SIZES | heads, architectures=["LlamaForCausalLM"])


def save_llama(folder: Path) -> None:
    """Save the configuration of a Llama, without weights."""
    llama_config().save_pretrained(folder)


def gpt_oss() -> Any:
    """Return a gpt-oss, of layers with sinks, every other one with a sliding window."""
    from transformers import GptOssConfig, GptOssForCausalLM

    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    # Of all experts rounding chooses no others.
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 4}
    experts |= {"swiglu_limit": 7.0}  # as in its checkpoints; SGLang reads it
    model = GptOssForCausalLM(GptOssConfig(**SIZES | heads | experts, sliding_window=128))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=3.0)
    return model


def gemma4() -> Any:
    """Return a Gemma 4, of layers with windows, and a wider one without."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    last = {"global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    kinds = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
    plain = {"hidden_size_per_layer_input": 0, "tie_word_embeddings": False}
    model = Gemma4ForCausalLM(
        Gemma4TextConfig(**SIZES | heads | last | plain, layer_types=kinds, sliding_window=128)
    )
    for layer in model.model.layers:  # its scores are not scaled
        norm = layer.self_attn.q_norm.weight
        torch.nn.init.constant_(norm, 2 * len(norm) ** -0.5)
    return model


def deepseek_v3() -> Any:
    """Return a DeepSeek-V3 of dense layers: rounding may choose other experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 512}
    dense = {"first_k_dense_replace": LAYERS, "mlp_layer_types": ["dense"] * LAYERS}
    unused = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    unused |= {"moe_layer_freq": 1}  # transformers has no such field, and SGLang reads it
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | heads | dense | unused))


# The share of tokens before the first other one. At one step in twenty the best logits are so near
# that another order of sums changes the token, in FlashMLA's engine too.
V4_LEAST = 1 / 8
V4_LAYERS = ("sliding", "compressed_sparse", "heavily_compressed", "sliding")
# What SGLang reads as DeepSeek's own configuration has it; the last ratio is of the draft layer.
# Heads of one rank are not padded for FlashMLA, which has kernels of 64.
V4_OF_SGLANG: dict[str, Any] = {
    "num_attention_heads": 64,
    "compress_ratios": [0, 4, 128, 0, 0],
    "num_hash_layers": 0,
    "first_k_dense_replace": 0,
    "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
}


def save_deepseek_v4(folder: Path, **others: Any) -> None:
    """Save the configuration of a DeepSeek-V4 of each kind of layers, without weights.

    An engine draws them, in bf16: layers in FP8 drift five times as far, since the last bit of an
    attention output may move an input by a sixteenth. Other keys replace those that transformers
    writes for what they say.
    """
    from transformers import DeepseekV4Config

    count = len(V4_LAYERS)
    DeepseekV4Config(
        architectures=["DeepseekV4ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=4096,  # kernels of hyper-connections have few sizes
        moe_intermediate_size=256,
        n_routed_experts=8,  # of all experts rounding chooses no others
        num_experts_per_tok=8,
        topk_method="noaux_tc",  # servers read it; transformers has no such field
        num_hidden_layers=count,
        num_attention_heads=16,
        num_nextn_predict_layers=1,
        max_position_embeddings=4096,
        layer_types=[f"{kind}_attention" for kind in V4_LAYERS],
        mlp_layer_types=["moe"] * count,
    ).save_pretrained(folder)
    if others:
        file = folder / "config.json"
        written = json.loads(file.read_text())
        replaced = ("rope_parameters", "layer_types", "mlp_layer_types", "compress_rates")
        kept = {key: value for key, value in written.items() if key not in replaced}
        file.write_text(json.dumps(kept | others))


def save_deepseek_v32(folder: Path) -> None:
    """Save the configuration of a DeepSeek-V3.2 of dense layers, without weights.

    A token attends to as many others as prompts have: rounding chooses no others.
    """
    from transformers import DeepseekV3Config

    fields = DeepseekV3Config(
        **SIZES,
        architectures=["DeepseekV32ForCausalLM"],
        dtype="bfloat16",
        num_attention_heads=16,
        num_key_value_heads=16,
        first_k_dense_replace=LAYERS,
        n_routed_experts=8,  # of the draft layer
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=512,
        num_nextn_predict_layers=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
    ).to_dict()
    index = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    folder.joinpath("config.json").write_text(
        json.dumps(fields | index | {"model_type": "deepseek_v32"})
    )


# What SGLang reads, of a type that transformers knows.
M3_OF_SGLANG: dict[str, Any] = {
    "model_type": "minimax_m2",
    "head_dim": 128,
    "rotary_dim": 64,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


def save_minimax_m3(folder: Path, **others: Any) -> None:
    """Save the configuration of a MiniMax-M3 of a dense layer and sparse ones, without weights.

    The first and last blocks are all that a token attends to: rounding chooses no others. The
    type of the draft model is the one of vLLM whose fields are those of a text model.
    """
    sparse = [0] + [1] * (LAYERS - 1)
    blocks = {"sparse_topk_blocks": 8, "sparse_init_block": 3, "sparse_local_block": 5}
    index = {"sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_block_size": 128}
    layers = {"sparse_attention_freq": sparse, "sparse_disable_index_value": sparse}
    fields: dict[str, Any] = SIZES | {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_mtp",
        "dtype": "bfloat16",
        "dense_intermediate_size": SIZES["intermediate_size"],
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "moe_layer_freq": [0] * LAYERS,  # rounding may choose other experts
        "sparse_attention_config": blocks | index | layers,
    }
    folder.joinpath("config.json").write_text(json.dumps(fields | others))


def save_qwen3_8(folder: Path) -> None:
    """Save the configuration of a Qwen3.8 of sparse layers, without weights.

    Recurrent ones would tune a hundred kernels. A token attends to as many others as prompts have,
    and to all experts: rounding chooses no others. The dims of the residual streams are no multiple
    of 8, for which vLLM needs CuTe DSL.
    """
    index = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128}
    chosen = {"indexer_budget": 2048, "indexer_compress_ratio": 4}
    linear = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # the size of a KV block
    experts = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    fields: dict[str, Any] = SIZES | {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "hidden_size": 1026,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
        "layer_types": ["full_attention"] * LAYERS,
        "hc_count": 2,
        **index,
        **chosen,
        **linear,
        **experts,
    }
    folder.joinpath("config.json").write_text(json.dumps(fields))


# The weights of norms, of models whose norms are Gemma's: one more than a weight is the factor.
NORMS = dict.fromkeys(("minimax_m3_mtp", M3_OF_SGLANG["model_type"], "qwen4_exp_text"), 0.4)


def model_type_of(checkpoint: str) -> str:
    """Return the type of the model of a checkpoint."""
    return str(json.loads(Path(checkpoint, "config.json").read_text())["model_type"])


def draw_weights(checkpoint: str, model: torch.nn.Module) -> None:
    """Draw the weights of a checkpoint's model, the same in each engine.

    Scores have a standard deviation of 2.
    """
    norm = NORMS.get(model_type_of(checkpoint), 1.0)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        draw(name, weight.data, norm)


def draw(name: str, weight: torch.Tensor, norm: float) -> None:
    """Draw a weight so that each layer keeps the size of its input."""
    if weight.dtype == torch.float8_e4m3fn:
        weight.copy_(torch.randn(weight.shape, device=weight.device))
    elif not weight.is_floating_point():
        return
    elif name.endswith(("weight_scale_inv", "weight_scale")):
        weight.fill_(2**-5)  # of FP8, with 1024 to 4096 inputs
    elif "norm" in name or weight.dim() == 0:
        weight.fill_(norm)
    elif weight.dim() > 1 and "embed" not in name:
        weight.normal_(std=(2 / weight.shape[-1]) ** 0.5)
    else:
        weight.normal_()


def models_in(folder: Path, make: Any, device: str) -> tuple[Any, Any]:
    """Return a model in bf16, saved in a folder, and the same in fp32."""
    torch.manual_seed(0)
    model = make()
    embedded = 1 / getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            # Scores have a standard deviation of 2, so that attention decides tokens.
            std = embedded if "embed_tokens" in name else (2 / weight.shape[1]) ** 0.5
            torch.nn.init.normal_(weight, std=std)
    model.bfloat16().save_pretrained(folder)
    # Loaded, because a cast of the model rounds the frequencies of RoPE too.
    load = partial(type(model).from_pretrained, folder, attn_implementation="eager")
    return load(dtype=torch.bfloat16).to(device), load(dtype=torch.float32).to(device)


def prompts() -> list[list[int]]:
    """Return a prompt of random tokens of each length."""
    return [torch.randint(VOCABULARY, (length,)).tolist() for length in LENGTHS]


def main(run: Callable[[str, str, str, list[list[int]]], dict[str, Any]]) -> None:
    """Run an engine as the arguments say, and write what it did.

    They are a checkpoint, a backend, ``eager`` or ``graphs``, a file of prompts, and the file for
    the result.
    """
    checkpoint, backend, mode, prompts_file, result_file = sys.argv[1:]
    did = run(checkpoint, backend, mode, json.loads(Path(prompts_file).read_text()))
    Path(result_file).write_text(json.dumps(did))
    os._exit(0)  # no thread of the engine is waited for


def engine_over(
    module: str, environment: dict[str, str], folder: Path, backend: str, mode: str, given: Any
) -> dict[str, Any]:
    """Return what the engine of a module did over a checkpoint and prompts."""
    name = backend.replace(" ", "_")
    asked, result, log = (folder / f"{name}.{kind}" for kind in ("prompts", "result", "log"))
    asked.write_text(json.dumps(given))
    command = [sys.executable, "-m", module, *map(str, (folder, backend, mode, asked, result))]

    with log.open("w") as output:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=600,  # servers compile kernels too
            cwd=ROOT,
            env=os.environ | environment,
            check=False,
        )

    assert done.returncode == 0, log.read_text()[-8000:]
    did: dict[str, Any] = json.loads(result.read_text())
    return did | {"log": log.read_text()}


@torch.no_grad()
def logits_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the logits from which each of the tokens is chosen."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    logits: torch.Tensor = model(ids, logits_to_keep=len(tokens), use_cache=False).logits[0]
    return logits.float()


def launches(kernel: str, did: dict[str, Any]) -> int:
    """Return how often an engine launched the kernels of these names."""
    return sum(count for name, count in did["kernels"].items() if name.startswith(kernel))


def assert_decodes_by(kernel: str, did: dict[str, Any], mode: str, layers: int = LAYERS) -> None:
    """Check that each layer of each decode step launched a kernel, by graphs if so asked."""
    assert launches(kernel, did) == layers * STEPS, did["kernels"]
    assert did["replays"] == (0 if mode.startswith("eager") else STEPS)


def assert_like_transformers(
    rounded: Any, exact: Any, given: list[list[int]], did: dict[str, Any]
) -> None:
    """Check that the tokens repeat, and that the engine errs about as bf16 does elsewhere."""
    assert did["repeated"] == did["tokens"]
    rows = []
    for prompt, tokens, logprobs in zip(given, did["tokens"], did["logprobs"], strict=True):
        assert len(tokens) == NEW
        chosen = torch.tensor(tokens, device=exact.device)[:, None]
        got, wanted = (logits_of(model, prompt, tokens) for model in (rounded, exact))
        gap = (wanted.amax(1, keepdim=True) - wanted.gather(1, chosen)).max()
        error = (got - wanted).abs().max()
        got, wanted = (each.log_softmax(1).gather(1, chosen)[:, 0] for each in (got, wanted))
        drift = (torch.tensor(logprobs, device=exact.device) - wanted).abs().mean()
        rows.append(torch.stack([gap, error, drift, (got - wanted).abs().mean()]))
    gap, error, drift, usual = torch.stack(rows).T
    # The bounds are errors of transformers in bf16 over the same tokens. An engine that errs as
    # much in two logits chooses a token at most twice the largest error below the best one. Mean
    # errors of two orders of rounding differ less than the largest.
    assert gap.max() <= 2 * error.max()
    assert drift.mean() <= 1.5 * usual.mean()


# Tolerances of log probabilities. bf16 logits of 4 to 8 are multiples of 1/32: three of these. The
# other is for values that are rounded to few bits, by one of the engines or in one step of both.
FINE, COARSE = 0.1, 0.25


def assert_like_another(
    did: dict[str, Any], other: dict[str, Any], tolerance: float = FINE, least: float = 0.5
) -> None:
    """Check that two engines over the same weights decode the same tokens, up to rounding.

    After the first token that rounding changes, they decode other contexts: ``least`` is the share
    of all tokens that must precede it. ``tolerance`` is of log probabilities before it.
    """
    assert did["repeated"] == did["tokens"]
    drifts = []  # of the log probabilities of each prompt, up to the first other token
    for ours, theirs, got, wanted in zip(
        did["tokens"], other["tokens"], did["logprobs"], other["logprobs"], strict=True
    ):
        differ = [at for at, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1]
        shared = min(differ, default=NEW)
        pairs = list(zip(got, wanted, strict=True))[:shared]
        drifts.append([round(abs(a - b), 4) for a, b in pairs])
    assert all(drifts)  # prefill gives the first tokens, in both by the same kernels
    assert sum(map(len, drifts)) >= NEW * len(drifts) * least, drifts
    assert max(map(max, drifts)) <= tolerance, drifts
