"""The plugin over SGLang's classes, installed ones or stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.servers import Import, modules_of
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
OPTIONS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[Import]:
    """Return the import of a module of SGLang or of the plugin, by its name."""
    with modules_of("sglang", MODULES):
        yield import_module


def _start(self: Any, model_runner: Any) -> None:
    vars(self).update(FIELDS | vars(model_runner))


@pytest.fixture
def mla(sglang: Import, monkeypatch: Patch) -> ModuleType:
    """Return the module of the dense backend, which needs no model runner of a server."""
    module = sglang("mlagen.integrations.sglang.mla")
    monkeypatch.setattr(module.TRTLLMMLABackend, "__init__", _start)
    monkeypatch.setattr(module, "resolved_view", lambda arguments: arguments)
    monkeypatch.setattr(module, "get_platform", lambda: SimpleNamespace(is_blackwell=False))
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(dcp_enabled=False))
    return module


@pytest.fixture
def dsa(sglang: Import, monkeypatch: Patch) -> ModuleType:
    """Return the module of the sparse backend, which needs none either."""
    module = sglang("mlagen.integrations.sglang.dsa")
    monkeypatch.setattr(module.DeepseekSparseAttnBackend, "__init__", _start)
    return module


def runner(**fields: Any) -> Any:
    """Return a model runner that decodes with mlagen and prefills with FlashAttention 3."""
    options = dict(zip(OPTIONS, (None, "fa3", "mlagen_mla"), strict=True))
    options |= {name: fields.pop(name) for name in OPTIONS if name in fields}
    common: dict[str, Any] = {"use_mla_backend": True, "page_size": 64}
    common |= {"kv_cache_dtype": torch.bfloat16, "kv_cache_dim": 576}
    return SimpleNamespace(**common | fields, server_args=SimpleNamespace(**options))
