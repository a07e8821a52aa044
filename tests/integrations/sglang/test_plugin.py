"""What SGLang's registries and options say of the backends, and how a server gets them."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.settings import current_settings
from tests.fixture_types import Log, Patch
from tests.integrations.attended import E4M3
from tests.integrations.servers import Import, stub
from tests.integrations.sglang.conftest import runner

NAME = "mlagen_mla"
ALONE = {"attention_backend": NAME, "prefill_attention_backend": None}
# The class of each backend, and the backend as which SGLang's models treat it.
MADE = {
    NAME: ("MlagenMLABackend", "trtllm_mla"),
    "mlagen_dsa": ("MlagenDSABackend", "dsa"),
    "mlagen_mha": ("MlagenMHABackend", None),
}
GQA: dict[str, Any] = {"use_mla_backend": False}
FP8_DS_MLA = {"kv_cache_dtype": E4M3, "kv_cache_dim": 656}


@pytest.fixture
def backends(mla: ModuleType, dsa: ModuleType, mha: ModuleType) -> dict[str, ModuleType]:
    """Return the module of each backend."""
    return {NAME: mla, "mlagen_dsa": dsa, "mlagen_mha": mha}


def test_the_names_are_choices_of_the_options(sglang: Import) -> None:
    """A server accepts each name once, however often the plugin is loaded."""
    choices = sglang("sglang.srt.arg_groups.choices")

    for _ in range(2):
        sglang("mlagen.integrations.sglang").register()

    for name in MADE:
        assert choices.ATTENTION_BACKEND_CHOICES.count(name) == 1
    assert choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count(NAME) == 1


@pytest.mark.parametrize(
    ("name", "fields"),
    [(NAME, {}), ("mlagen_dsa", {}), ("mlagen_dsa", FP8_DS_MLA), ("mlagen_mha", GQA)],
)
def test_a_model_runner_gets_the_backend(
    sglang: Import, backends: dict[str, ModuleType], name: str, fields: dict[str, Any]
) -> None:
    """The registry makes the backend, which the models then treat as SGLang's own."""
    registry = sglang("sglang.srt.layers.attention.attention_registry")
    models = sglang("sglang.srt.models.deepseek_common.utils")
    handlers = [
        sglang(f"sglang.srt.models.{module}").AttentionBackendRegistry
        for module in ("deepseek_common.attention_backend_handler", "sarvam_moe")
    ]
    sglang("mlagen.integrations.sglang").register()

    for _ in range(2):  # a draft model has a runner of its own
        backend = registry.ATTENTION_BACKENDS[name](runner(**fields))

    made, like = MADE[name]
    assert type(backend) is getattr(backends[name], made)
    if like:
        assert models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count(name) == 1
        for each in handlers:
            assert each.get_handler(name) is each.get_handler(like)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (NAME, {"use_mla_backend": False}, "expected an MLA model"),
        (NAME, ALONE, "--prefill-attention-backend: expected another backend than mlagen_mla"),
        ("mlagen_dsa", {"kv_cache_dtype": E4M3}, "expected rows of 656 bytes in an FP8 cache, got"),
        ("mlagen_dsa", {"dcp_size": 2}, "mlagen_dsa: expected --dcp-size 1, got 2"),
        ("mlagen_mha", {}, "mlagen_mha: expected a model without MLA"),
        (
            "mlagen_mha",
            GQA | {"attention_backend": "mlagen_mha", "prefill_attention_backend": None},
            "--prefill-attention-backend: expected another backend than mlagen_mha",
        ),
        ("mlagen_mha", GQA | {"kv_cache_dtype": torch.float8_e5m2}, "^kv_cache_dtype: expected"),
        ("mlagen_mha", GQA | {"kv_cache_dtype": torch.uint8}, "^kv_cache_dtype: expected"),
        ("mlagen_mha", GQA | {"dtype": torch.float32}, "^dtype: expected"),
        (
            "mlagen_mha",
            GQA | {"layers": [((8, 192, 8), {"v_head_dim": 128})]},
            "keys and values of one head dim, got 192 and 128",
        ),
        (
            "mlagen_mha",
            GQA | {"layers": [((8, 64), {"logit_cap": 30.0, "logit_capping_method": "relu"})]},
            "mlagen_mha: expected a logit_cap by tanh, got relu",
        ),
        (NAME, {"layers": [((8, 576), {"logit_cap": 30.0})]}, "expected layers without logit_cap"),
        (
            NAME,
            {"kv_cache_dtype": torch.float8_e5m2},
            "^kv_cache_dtype: expected .* mlagen_mla, got",
        ),
        ("mlagen_dsa", {"dtype": torch.float32}, "^dtype: expected .* mlagen_dsa, got torch.float"),
        (
            NAME,
            {"architecture": "DeepseekV4ForCausalLM"},
            "expected mlagen_dsv4 for .*got DeepseekV4For",
        ),
        (
            "mlagen_dsa",
            {"architecture": "DeepseekV4ForCausalLM"},
            "expected mlagen_dsv4 for .*got Deepseek",
        ),
    ],
    ids=[
        *("without MLA", "without a prefill", "rows without a kernel", "tokens over ranks"),
        *("with MLA", "no prefill of GQA", "e5m2", "nvfp4", "fp32", "two head dims"),
        *("another soft cap", "a soft cap of MLA"),
        *("e5m2 of MLA", "fp32 of DSA", "V4", "sparse V4"),
    ],
)
def test_a_server_that_cannot_work_does_not_start(
    backends: dict[str, ModuleType], name: str, fields: dict[str, Any], message: str
) -> None:
    """What no kernel serves is refused, and so is TensorRT-LLM's prefill where it has none."""
    with pytest.raises(ValueError, match=message):
        backends[name].backend_of(runner(**fields), name)


def test_a_layer_of_another_temperature_is_rejected(backends: dict[str, ModuleType]) -> None:
    """Grok's scores have another one in long contexts."""
    made = runner(**GQA)
    made.model[0].xai_temperature_len = 1024
    with pytest.raises(ValueError, match=r"^mlagen_mha: expected scores of one .* from 1024 on$"):
        backends["mlagen_mha"].backend_of(made, "mlagen_mha")


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


@pytest.mark.parametrize("variable", [None, "0"])
def test_deterministic_inference_makes_decode_batch_invariant(
    mla: ModuleType, variable: str | None, monkeypatch: Patch
) -> None:
    """Unless the environment of mlagen says otherwise, which is refused."""
    execution = sys.modules["mlagen.integrations.sglang.runner"].get_exec()
    monkeypatch.setattr(execution.deterministic, "enable_deterministic_inference", True)
    monkeypatch.delenv("MLAGEN_BATCH_INVARIANT", raising=False)
    if variable is not None:
        monkeypatch.setenv("MLAGEN_BATCH_INVARIANT", variable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        current_settings.cache_clear()
        if variable is None:
            mla.backend_of(runner(), NAME)
            assert current_settings().batch_invariant
        else:
            rule = "expected MLAGEN_BATCH_INVARIANT=1, got 0"
            with pytest.raises(ValueError, match=f"^--enable-deterministic-inference: {rule}$"):
                mla.backend_of(runner(), NAME)


@pytest.mark.parametrize("name", MADE)
def test_a_tree_of_drafts_is_refused(
    backends: dict[str, ModuleType], monkeypatch: Patch, name: str
) -> None:
    """The kernels would take it for a chain, without a word."""
    spec = SimpleNamespace(speculative_eagle_topk=4)
    monkeypatch.setattr(sys.modules["mlagen.integrations.sglang.runner"], "get_spec", lambda: spec)
    fields = GQA if name == "mlagen_mha" else {}

    with pytest.raises(ValueError, match=f"^--speculative-eagle-topk: expected 1 with {name}.*4$"):
        backends[name].backend_of(runner(**fields), name)


def test_decode_context_parallel_of_gqa_is_refused(mha: ModuleType, monkeypatch: Patch) -> None:
    """The backend returns no LSE, which ranks are merged by."""
    parallel = SimpleNamespace(dcp_enabled=True, attn_dcp_size=4)
    monkeypatch.setattr(mha, "get_parallel", lambda: parallel)

    with pytest.raises(ValueError, match="mlagen_mha: expected --dcp-size 1, got 4"):
        mha.backend_of(runner(**GQA), "mlagen_mha")


@pytest.mark.parametrize(
    ("method", "other", "got"),
    [
        ("_run_decode_kernel", None, "got no method"),
        ("_run_decode_kernel", stub("self query scale"), r"got \(self, query, scale\)"),
    ],
    ids=["missing", "changed"],
)
def test_another_sglang_with_another_kernel_is_refused(
    mla: ModuleType, monkeypatch: Patch, method: str, other: Any, got: str
) -> None:
    """An override that SGLang does not call, or calls otherwise, does not go without a word."""
    monkeypatch.setattr(mla.TRTLLMMLABackend, method, other)

    with pytest.raises(ValueError, match=rf"SGLang's TRTLLMMLABackend.{method}\(self.*{got}$"):
        mla.backend_of(runner(), NAME)
