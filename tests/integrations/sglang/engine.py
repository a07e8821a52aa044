"""One SGLang engine over a checkpoint."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.integrations.engines import (
    COUNTED,
    M3_OF_SGLANG,
    NEW,
    STEP,
    draw_weights,
    main,
    model_type_of,
)

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "context_length": 4096,
    "max_running_requests": 8,
    "chunked_prefill_size": STEP,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 1 << 15,
    "sampling_backend": "pytorch",  # that of FlashInfer is compiled
    "disable_radix_cache": True,  # a second run prefills again
    "disable_prefill_cuda_graph": True,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "log_level": "info",
}
# Of models with an indexer and of DeepSeek-V4 one option names both backends.
WHOLE = ("dsa", "dsv4")
SPLIT: dict[str, Any] = {"prefill_attention_backend": "fa3", "page_size": 64}
M3 = {"page_size": 128}  # a KV block
# A step does not overlap with what prepares the next one.
EAGER = {"disable_decode_cuda_graph": True, "disable_overlap_schedule": True}
DRAFTS: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}


def run(checkpoint: str, backend: str, mode: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the backend of decode, and tokens, kernels and graph replays of requests.

    The dtype of the cache may follow the mode. Drafts are verified by graphs.
    """
    from sglang.srt.entrypoints.engine import Engine

    class RandomEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_with_random_weights)

    mode, _, kv_cache_dtype = mode.partition(" ")
    is_whole = backend.removeprefix("mlagen_") in WHOLE
    option = "attention_backend" if is_whole else "decode_attention_backend"
    options = OPTIONS | {option: backend} | ({} if is_whole else SPLIT)
    options |= {"kv_cache_dtype": kv_cache_dtype or "auto"}
    options |= M3 if model_type_of(checkpoint) == M3_OF_SGLANG["model_type"] else {}
    options |= EAGER if mode == "eager" else {}
    options |= DRAFTS if mode == "drafts" else {}
    is_drawn = not [*Path(checkpoint).glob("*.safetensors")]
    options |= {"load_format": "dummy"} if is_drawn else {}
    engine = (RandomEngine if is_drawn else Engine)(model_path=checkpoint, **options)

    def generated(count: int, prompts: list[list[int]]) -> Any:
        greedy = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        return engine.generate(input_ids=prompts, sampling_params=greedy, return_logprob=True)

    first, second = generated(NEW, prompts), generated(NEW, prompts)
    with TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False)
        generated(COUNTED, [prompts[-1][:300]] * 4)
        engine.stop_profile()
        kernels, replays = launched(Path(folder))
    did = {
        "backends": [engine.get_server_info()[option]],
        "tokens": [each["output_ids"] for each in first],
        "repeated": [each["output_ids"] for each in second],
        "logprobs": [
            [logprob for logprob, *_ in each["meta_info"]["output_token_logprobs"]]
            for each in first
        ],
        "kernels": kernels,
        "replays": replays,
    }
    engine.shutdown()
    return did


def run_with_random_weights(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Run a process of SGLang that schedules, and draws the weights of its model."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = partial(draw_weights, server_args.model_path)
    run_scheduler_process(server_args, *args, **kwargs)


def launched(folder: Path) -> tuple[dict[str, int], int]:
    """Return how often the GPU ran each kernel, graphs included, and how many graphs it ran."""
    (trace,) = folder.glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = Counter(each["name"] for each in events if each.get("cat") == "kernel")
    return dict(kernels), sum(each["name"].startswith("cudaGraphLaunch") for each in events)


if __name__ == "__main__":
    main(run)
