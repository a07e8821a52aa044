"""The plugin over vLLM's classes, installed ones or stand-ins, and layers of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import HEADS
from tests.integrations.servers import Import, is_installed, modules_of
from tests.integrations.vllm.stand_in import MODULES

ImplOf = Callable[..., Any]
# What the warm-up takes from a builder, and the attributes of a backend.
GROUP = {"add_to_warm_up", "decode_calls", "warm_up_prefill", "is_sparse", "_dtypes_of"}
GROUP |= {"layers", "layer_names"}
NAMED = {"name", "impl", "builder"}
# A layer with the scales of an FP8 checkpoint.
LAYER = SimpleNamespace(_q_scale_float=0.5, _k_scale_float=0.25)

# Without a GPU the kernels of vLLM that build metadata are interpreted.
if is_installed("vllm") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[Import]:
    """Return the import of a module of vLLM or of the plugin, by its name."""
    with modules_of("vllm", MODULES):
        yield import_module


@pytest.fixture
def impl_of(monkeypatch: Patch) -> ImplOf:
    """Return the constructor of an implementation, called as a layer of a model calls it."""

    def make(impl_class: Any, kv_lora_rank: int = 512, rope: int = 64, **mla: Any) -> Any:
        modules = [each.__module__ for each in impl_class.__mro__]
        base = import_module(next(name for name in modules if not name.startswith("mlagen")))
        # A process of its own has no groups of ranks.
        monkeypatch.setattr(base, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
        call = {
            "num_heads": HEADS,
            "num_kv_heads": 1,
            "head_size": kv_lora_rank + rope,
            "scale": 192**-0.5,
            "kv_cache_dtype": "auto",
            "attn_type": "decoder",
            "kv_lora_rank": kv_lora_rank,
            "q_lora_rank": None,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": rope,
            "qk_head_dim": 128 + rope,
            **dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_b_proj")),
            "kv_sharing_target_layer_name": None,
        }
        with current_config():
            return impl_class(**call | mla)

    return make


def current_config() -> AbstractContextManager[Any]:
    """Return a context in which vLLM has a configuration."""
    if not is_installed("vllm"):
        return nullcontext()
    config = import_module("vllm.config")
    on_cpu = config.VllmConfig(device_config=config.DeviceConfig(device="cpu"))
    context: AbstractContextManager[Any] = config.set_current_vllm_config(on_cpu)
    return context


def queries_of(module: ModuleType, monkeypatch: Patch) -> list[Any]:
    """Return a list that gets the queries of mlagen's calls, in the place of the calls."""
    queries: list[Any] = []

    def decode(query: Any, *_: Any, **__: Any) -> Any:
        queries.append(query)
        return query[0]

    monkeypatch.setattr(module, "decode", decode)
    return queries


@pytest.fixture
def gqa(vllm: Import) -> ModuleType:
    """Return the module of the GQA backend."""
    if is_installed("vllm"):
        pytest.importorskip("flashinfer", reason="vLLM's FlashInfer backend needs flashinfer")
    return vllm("mlagen.integrations.vllm.gqa")


def config_of(heads: int, *, drafts: int | None = None, **fields: Any) -> Any:
    """Return what builders of vLLM read of its configuration; ``fields`` are those of a model."""
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts, parallel_drafting=False, use_dspark=lambda: False
    )
    return SimpleNamespace(
        attention_config=SimpleNamespace(
            **dict.fromkeys(("use_trtllm_attention", "hisparse_config")),
            disable_flashinfer_q_quantization=False,
            use_non_causal=False,
            use_prefill_query_quantization=False,
        ),
        model_config=SimpleNamespace(
            max_model_len=256,
            dtype=torch.bfloat16,
            get_num_attention_heads=lambda _: heads,
            model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
            **fields,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=64),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=2),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(decode_mode=lambda: None), static_forward_context={}
        ),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        num_speculative_tokens=drafts or 0,
        speculative_config=None if drafts is None else speculative,
    )
