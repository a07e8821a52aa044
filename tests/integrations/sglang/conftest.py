"""The plugin over SGLang's classes, installed ones or stand-ins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.servers import Import, is_installed, modules_of
from tests.integrations.sglang.stand_in import MODULES

# What the base classes know of a server and its model.
FIELDS = {
    "data_type": torch.bfloat16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "physical_page_size": 64,
    "dcp_size": 1,
    "dsa_decode_impl": "flashmla_kv",
    "dsa_index_kpool": 1,
}
# The layers of a model, those of MLA absorbed and expanded.
MLA_LAYERS: list[Any] = [((16, 576), {"v_head_dim": 512}), ((16, 192, 16), {"v_head_dim": 128})]
GQA_LAYERS: list[Any] = [((32, 128, 8), {})]
# A server of DeepSeek-V4.
DSV4: dict[str, Any] = {
    "attention_backend": "mlagen_dsv4",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "architecture": "DeepseekV4ForCausalLM",
    "page_size": 256,
    "kv_cache_dtype": torch.float8_e4m3fn,
    "layers": [((8, 512), {})] * 2,
    "token_to_kv_pool": SimpleNamespace(get_swa_key_bytes_per_token=lambda: 584),
}
OPTIONS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

# Without a GPU the kernels of SGLang that build metadata are interpreted.
if is_installed("sglang") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[Import]:
    """Return the import of a module of SGLang or of the plugin, by its name."""
    with modules_of("sglang", MODULES):
        yield import_module


def _start(self: Any, model_runner: Any, *_: Any, **__: Any) -> None:
    vars(self).update(FIELDS | vars(model_runner))


@pytest.fixture
def calls(sglang: Import, monkeypatch: Patch) -> list[Any]:
    """Return the calls that are warmed up; a server is as in :func:`runner`, without drafts."""
    module = sglang("mlagen.integrations.sglang.runner")
    warmed: list[Any] = []
    spec = {"speculative_eagle_topk": None, "speculative_attention_mode": "prefill"}
    parallel = {"dcp_enabled": False, "attn_dcp_size": 1}
    monkeypatch.setattr(module, "resolved_view", lambda arguments: arguments)
    monkeypatch.setattr(module, "get_spec", lambda: SimpleNamespace(**spec))
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    execution = SimpleNamespace(deterministic=deterministic)
    monkeypatch.setattr(module, "get_exec", lambda: execution)
    monkeypatch.setattr(module, "max_speculative_num_draft_tokens", lambda: None)
    monkeypatch.setattr(module, "warm_up_on", lambda calls, _: warmed.extend(calls))
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(**parallel))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    # No test but those of drafts changes SGLang's factory.
    unhooked = SimpleNamespace(register=lambda *_, **__: None, apply_hooks=lambda: None)
    monkeypatch.setattr(module, "HookRegistry", unhooked)
    return warmed


@pytest.fixture
def mla(sglang: Import, calls: list[Any], monkeypatch: Patch) -> ModuleType:
    """Return the module of the dense backend, which needs no model runner of a server."""
    del calls
    module = sglang("mlagen.integrations.sglang.mla")
    monkeypatch.setattr(module.TRTLLMMLABackend, "__init__", _start)
    monkeypatch.setattr(module, "get_platform", lambda: SimpleNamespace(is_blackwell=False))
    monkeypatch.setattr(module, "get_parallel", module.check.__globals__["get_parallel"])
    return module


@pytest.fixture
def dsa(sglang: Import, calls: list[Any], monkeypatch: Patch) -> ModuleType:
    """Return the module of the sparse backend, which needs none either."""
    del calls
    module = sglang("mlagen.integrations.sglang.dsa")
    monkeypatch.setattr(module.DeepseekSparseAttnBackend, "__init__", _start)
    return module


@pytest.fixture
def mha(sglang: Import, calls: list[Any], monkeypatch: Patch) -> ModuleType:
    """Return the module of the GQA backend, which needs none either."""
    del calls
    module = sglang("mlagen.integrations.sglang.mha")
    monkeypatch.setattr(module.TRTLLMHAAttnBackend, "__init__", _start)
    monkeypatch.setattr(module, "get_parallel", module.check.__globals__["get_parallel"])
    return module


@pytest.fixture
def dsv4(sglang: Import, calls: list[Any], monkeypatch: Patch) -> ModuleType:
    """Return the module of the backend of DeepSeek-V4, which needs none either."""
    del calls
    module = sglang("mlagen.integrations.sglang.dsv4")
    monkeypatch.setattr(module.DeepseekV4AttnBackend, "__init__", _start)
    options = SimpleNamespace(kernel=SimpleNamespace(dsv4_attn_backend="flashmla"))
    readers = [module]
    if is_installed("sglang"):
        readers.append(sglang("sglang.srt.layers.attention.deepseek_v4_trtllm_backend"))
    for each in readers:
        monkeypatch.setattr(each, "get_exec", lambda: options)
    hopper = SimpleNamespace(is_sm100=False, is_sm120=False)
    monkeypatch.setattr(module, "get_platform", lambda: hopper)
    return module


def layer(heads: int, head_dim: int, kv_heads: int = 1, **options: Any) -> Any:
    """Return an attention layer of a model."""
    radix = import_module("sglang.srt.layers.radix_attention").RadixAttention
    return radix(heads, head_dim, 0.1, kv_heads, 0, **options)


def runner(**fields: Any) -> Any:
    """Return a model runner that decodes with mlagen and prefills with FlashAttention 3."""
    options = dict(zip(OPTIONS, (None, "fa3", "mlagen_mla"), strict=True))
    options |= {name: fields.pop(name) for name in OPTIONS if name in fields}
    is_mla = fields.setdefault("use_mla_backend", True)
    default = MLA_LAYERS if is_mla else GQA_LAYERS
    layers = [layer(*args, **options) for args, options in fields.pop("layers", default)]
    config = SimpleNamespace(architectures=[fields.pop("architecture", "DeepseekV3ForCausalLM")])
    common: dict[str, Any] = {"page_size": 64, "dtype": torch.bfloat16, "max_context_len": 4096}
    common |= {"kv_cache_dtype": torch.bfloat16, "kv_cache_dim": 576}
    common |= {"q_data_type": torch.bfloat16, "model": torch.nn.ModuleList(layers)}
    common["model_config"] = SimpleNamespace(hf_config=config, hf_text_config=config)
    common["data_type"] = fields.get("kv_cache_dtype", torch.bfloat16)
    return SimpleNamespace(**common | fields, server_args=SimpleNamespace(**options))
