"""What SGLang's registries and options say of the backends, and how a server gets them."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fixture_types import Log, Patch
from tests.integrations.attended import E4M3
from tests.integrations.servers import Import
from tests.integrations.sglang.conftest import runner

NAME = "mlagen_mla"
ALONE = {"attention_backend": NAME, "prefill_attention_backend": None}
# The class of each backend, and SGLang's handler of its models.
MADE = {
    NAME: ("MlagenMLABackend", "handle_attention_trtllm_mla"),
    "mlagen_dsa": ("MlagenDSABackend", "handle_attention_dsa"),
}
FP8_DS_MLA = {"kv_cache_dtype": E4M3, "kv_cache_dim": 656}


@pytest.fixture
def backends(mla: ModuleType, dsa: ModuleType) -> dict[str, ModuleType]:
    """Return the module of each backend."""
    return {NAME: mla, "mlagen_dsa": dsa}


def test_the_names_are_choices_of_the_options(sglang: Import) -> None:
    """A server accepts each name once, however often the plugin is loaded."""
    choices = sglang("sglang.srt.arg_groups.choices")

    for _ in range(2):
        sglang("mlagen.integrations.sglang").register()

    for name in (NAME, "mlagen_dsa"):
        assert choices.ATTENTION_BACKEND_CHOICES.count(name) == 1
    assert choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count(NAME) == 1


@pytest.mark.parametrize(
    ("name", "cache"), [(NAME, {}), ("mlagen_dsa", {}), ("mlagen_dsa", FP8_DS_MLA)]
)
def test_a_model_runner_gets_the_backend(
    sglang: Import, backends: dict[str, ModuleType], name: str, cache: dict[str, Any]
) -> None:
    """The registry makes the backend, which the models then treat as SGLang's own."""
    registry = sglang("sglang.srt.layers.attention.attention_registry")
    models = sglang("sglang.srt.models.deepseek_common.utils")
    handlers = sglang("sglang.srt.models.deepseek_common.attention_backend_handler")
    sglang("mlagen.integrations.sglang").register()

    for _ in range(2):  # a draft model has a runner of its own
        backend = registry.ATTENTION_BACKENDS[name](runner(**cache))

    made, like = MADE[name]
    assert type(backend) is getattr(backends[name], made)
    assert models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count(name) == 1
    assert handlers.AttentionBackendRegistry.get_handler(name) is getattr(handlers, like)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (NAME, {"use_mla_backend": False}, "expected an MLA model"),
        (NAME, ALONE, "--prefill-attention-backend: expected another backend than mlagen_mla"),
        ("mlagen_dsa", {"kv_cache_dtype": E4M3}, "expected rows of 656 bytes in an FP8 cache, got"),
        ("mlagen_dsa", {"dcp_size": 2}, "mlagen_dsa: expected --dcp-size 1, got 2"),
    ],
    ids=["without MLA", "without a prefill", "rows without a kernel", "tokens over ranks"],
)
def test_a_server_that_cannot_work_does_not_start(
    backends: dict[str, ModuleType], name: str, fields: dict[str, Any], message: str
) -> None:
    """What no kernel serves is refused, and so is TensorRT-LLM's prefill where it has none."""
    with pytest.raises(ValueError, match=message):
        backends[name].backend_of(runner(**fields), name)


def test_blackwell_has_a_kernel_for_prefill(mla: ModuleType, monkeypatch: Patch) -> None:
    """On Blackwell one name serves prefill and decode."""
    monkeypatch.setattr(mla, "get_platform", lambda: SimpleNamespace(is_blackwell=True))
    assert mla.backend_of(runner(**ALONE), NAME)


@pytest.mark.parametrize(("page_size", "warns"), [(1, True), (64, False)])
def test_a_page_size_of_the_sm80_kernel_is_reported(
    mla: ModuleType, caplog: Log, page_size: int, warns: bool
) -> None:
    """SGLang's default of one token to a page costs the fast kernels, and the log says so."""
    with caplog.at_level(logging.WARNING, logger="mlagen"):
        mla.backend_of(runner(page_size=page_size), NAME)
    assert ("pass --page-size 64" in caplog.text) is warns
