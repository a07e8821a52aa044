"""One SGLang engine over a checkpoint."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.integrations.engines import COUNTED, NEW, STEP, draw_weights, is_deepseek_v4, main

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
    "disable_overlap_schedule": True,  # it runs a step more than a request needs
    "disable_prefill_cuda_graph": True,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "log_level": "info",
}
# Of DeepSeek-V4 one option names both backends, SGLang sets the pages, and the weights are drawn.
SPLIT: dict[str, Any] = {"page_size": 64, "prefill_attention_backend": "fa3"}
RANDOM: dict[str, Any] = {"load_format": "dummy"}


def run(checkpoint: str, backend: str, mode: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the backend of decode, and tokens, kernels and graph replays of requests."""
    from sglang.srt.entrypoints.engine import Engine

    class RandomEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_with_random_weights)

    is_v4 = is_deepseek_v4(checkpoint)
    option = "attention_backend" if is_v4 else "decode_attention_backend"
    engine = (RandomEngine if is_v4 else Engine)(
        model_path=checkpoint,
        disable_decode_cuda_graph=mode == "eager",
        **OPTIONS | {option: backend} | (RANDOM if is_v4 else SPLIT),
    )

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


def run_with_random_weights(*args: Any, **kwargs: Any) -> None:
    """Run a process of SGLang that schedules, and draws the weights of its model."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw_weights
    run_scheduler_process(*args, **kwargs)


def launched(folder: Path) -> tuple[dict[str, int], int]:
    """Return how often the GPU ran each kernel, graphs included, and how many graphs it ran."""
    (trace,) = folder.glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = Counter(each["name"] for each in events if each.get("cat") == "kernel")
    return dict(kernels), sum(each["name"].startswith("cudaGraphLaunch") for each in events)


if __name__ == "__main__":
    main(run)
