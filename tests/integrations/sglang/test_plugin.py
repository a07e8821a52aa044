"""What SGLang's registries and options say of the backend, and how a server gets it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Log, Patch

NAME = "mlagen_mla"


@pytest.fixture
def mla(sglang: Callable[[str], ModuleType], monkeypatch: Patch) -> ModuleType:
    """Return the module of the backend, whose base class needs no model runner of a server."""
    module = sglang("mlagen.integrations.sglang.mla")

    def init(self: Any, model_runner: Any) -> None:
        self.data_type = model_runner.kv_cache_dtype

    monkeypatch.setattr(module.TRTLLMMLABackend, "__init__", init)
    monkeypatch.setattr(module, "resolved_view", lambda arguments: arguments)
    monkeypatch.setattr(module, "get_platform", lambda: SimpleNamespace(is_blackwell=False))
    return module


def runner(**fields: Any) -> Any:
    """Return a model runner that decodes with mlagen and prefills with FlashAttention 3."""
    arguments = {
        "attention_backend": None,
        "prefill_attention_backend": "fa3",
        "decode_attention_backend": NAME,
    }
    common = {"use_mla_backend": True, "page_size": 64, "kv_cache_dtype": torch.bfloat16}
    arguments |= {name: fields.pop(name) for name in list(fields) if name in arguments}
    return SimpleNamespace(**common | fields, server_args=SimpleNamespace(**arguments))


def test_the_name_is_a_choice_of_the_options(sglang: Callable[[str], ModuleType]) -> None:
    """A server accepts the name once, however often the plugin is loaded."""
    plugin = sglang("mlagen.integrations.sglang")
    choices = sglang("sglang.srt.arg_groups.choices")

    plugin.register()
    plugin.register()

    assert [choices.ATTENTION_BACKEND_CHOICES.count(name) for name in (NAME, "mlagen_dsa")] == [
        1,
        1,
    ]
    assert choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count(NAME) == 1


def test_a_model_runner_gets_the_backend(
    sglang: Callable[[str], ModuleType], mla: ModuleType
) -> None:
    """The registry makes the backend, which the models then treat as TensorRT-LLM's."""
    plugin = sglang("mlagen.integrations.sglang")
    registry = sglang("sglang.srt.layers.attention.attention_registry")
    models = sglang("sglang.srt.models.deepseek_common.utils")
    plugin.register()

    for _ in range(2):  # a draft model has a runner of its own
        backend = registry.ATTENTION_BACKENDS[NAME](runner())

    assert type(backend) is mla.MlagenMLABackend
    assert models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count(NAME) == 1
    handler = mla.AttentionBackendRegistry.get_handler(NAME)
    assert handler is mla.handle_attention_trtllm_mla


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_mla_backend": False}, "mlagen_mla: expected an MLA model"),
        (
            {"attention_backend": NAME, "prefill_attention_backend": None},
            "--prefill-attention-backend: expected another backend than mlagen_mla",
        ),
    ],
)
def test_a_server_that_cannot_work_does_not_start(
    mla: ModuleType, fields: dict[str, Any], message: str
) -> None:
    """A model without MLA is refused, and so is TensorRT-LLM's prefill where it has no kernel."""
    with pytest.raises(ValueError, match=message):
        mla.backend_of(runner(**fields), NAME)


def test_blackwell_has_a_kernel_for_prefill(mla: ModuleType, monkeypatch: Patch) -> None:
    """On Blackwell one name serves prefill and decode."""
    monkeypatch.setattr(mla, "get_platform", lambda: SimpleNamespace(is_blackwell=True))
    fields = {"attention_backend": NAME, "prefill_attention_backend": None}
    assert mla.backend_of(runner(**fields), NAME)


@pytest.mark.parametrize(("page_size", "warns"), [(1, True), (64, False)])
def test_a_page_size_of_the_sm80_kernel_is_reported(
    mla: ModuleType, caplog: Log, page_size: int, warns: bool
) -> None:
    """SGLang's default of one token to a page costs the fast kernels, and the log says so."""
    with caplog.at_level(logging.WARNING, logger="mlagen"):
        mla.backend_of(runner(page_size=page_size), NAME)
    assert ("pass --page-size 64" in caplog.text) is warns
