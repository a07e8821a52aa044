"""One vLLM engine over a checkpoint."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

from mlagen.integrations.vllm.models import MODELS
from mlagen.jit import jit_mode
from tests.integrations.engines import (
    COUNTED,
    NEW,
    STEP,
    draw_weights,
    main,
    model_type_of,
)

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": STEP,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": False,  # a second run prefills again
    "generation_config": "vllm",
    "kernel_config": {"enable_flashinfer_autotune": False},
}
# Without torch.compile, whose compilation takes minutes.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
# No prompt is prefilled in pieces: a piece of one token is decoded.
INVARIANT = {"max_num_seqs": 32, "max_num_batched_tokens": 1 << 14}
ALONE = 8
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
RANDOM = "random"  # loads no weights, and draws them
WITHOUT_MODELS = "alone"  # beside a backend: layers that choose their attention keep vLLM's
# Without vLLM's warm-up, which compiles the kernels of hyper-connections one by one, for minutes.
V4 = {
    "kv_cache_dtype": "fp8",
    "kernel_config": OPTIONS["kernel_config"] | {"enable_jit_warmup": False},
}
# The options of models without weights.
DRAWN: dict[str, dict[str, Any]] = {"deepseek_v4": V4, "minimax_m3_mtp": {}, "qwen4_exp_text": {}}


def run(checkpoint: str, backend: str, mode: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the backends of the layers, and tokens, kernels and graph replays of requests.

    The dtype of the cache may follow the mode. A batch-invariant engine also serves the first
    prompts one at a time.
    """
    from vllm import LLM, SamplingParams, envs

    mode, _, kv_cache_dtype = mode.partition(" ")
    backend, _, without_models = backend.partition(" ")
    if without_models:
        MODELS.clear()
    graphs = {"compilation_config": GRAPHS} if mode == "graphs" else {"enforce_eager": True}
    options = OPTIONS | graphs | (DRAFTS if mode == "drafts" else {})
    options |= {"kv_cache_dtype": kv_cache_dtype or "auto"}
    drawn = DRAWN.get(model_type_of(checkpoint))
    if drawn is not None:
        register_random_weights(checkpoint)
        options |= drawn | {"load_format": RANDOM}
    if envs.VLLM_BATCH_INVARIANT:
        options |= INVARIANT
    llm = LLM(model=checkpoint, attention_backend=backend, **options)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()

    def generated(count: int, prompts: list[list[int]]) -> list[Any]:
        greedy = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=1
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [each.outputs[0] for each in llm.generate(requests, greedy, use_tqdm=False)]

    first, second = generated(NEW, prompts), generated(NEW, prompts)
    alone = prompts[:ALONE] if envs.VLLM_BATCH_INVARIANT else []
    singles = [generated(NEW, [prompt])[0] for prompt in alone]
    kernels, replays = launched(partial(generated, COUNTED, [prompts[-1][:300]] * 4))
    return {
        "backends": [layer.attn_backend.get_name() for layer in layers if hasattr(layer, "impl")],
        "layers": [type(layer).__name__ for layer in layers if hasattr(layer, "swa_cache_layer")],
        "tokens": [list(each.token_ids) for each in first],
        "repeated": [list(each.token_ids) for each in second],
        "logprobs": list(map(logprobs_of, first)),
        "alone": list(map(logprobs_of, singles)),
        "kernels": kernels,
        "jit": jit_mode(),
        "replays": replays,
    }


def logprobs_of(output: Any) -> list[float]:
    """Return the log probability of each token of an output."""
    each = zip(output.logprobs, output.token_ids, strict=True)
    return [at[token].logprob for at, token in each]


def register_random_weights(checkpoint: str) -> None:
    """Register a load format that gives a model the same random weights in each engine."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RandomLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            draw_weights(checkpoint, model)

    register_model_loader(RANDOM)(RandomLoader)


def launched(call: partial[Any]) -> tuple[dict[str, int], int]:
    """Return how often the GPU ran each kernel, graphs included, and how many graphs it ran."""
    replay, replays = torch.cuda.CUDAGraph.replay, [0]

    def counted(graph: Any) -> None:
        replays[0] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[assignment, method-assign]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = (each.name for each in profile.events() if str(each.device_type) == "DeviceType.CUDA")
    return dict(Counter(names)), replays[0]


if __name__ == "__main__":
    main(run)
