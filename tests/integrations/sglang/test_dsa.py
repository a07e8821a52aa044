"""Sparse decode of the backend ``mlagen_dsa``, called as SGLang's models call it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import assert_near, attended
from tests.problems.mla_rows import store, viewed

NAME = "mlagen_dsa"
HEADS, SLOTS, TOP_K = 3, 128, 8
COUNTS = (8, 3, 1)  # of a long request, a short one, and one that pads a CUDA graph
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def dsa(sglang: Callable[[str], ModuleType], monkeypatch: Patch) -> ModuleType:
    """Return the module of the backend, whose base class needs no model runner of a server."""
    module = sglang("mlagen.integrations.sglang.dsa")

    def init(self: Any, model_runner: Any) -> None:
        fields = {"dcp_size": 1, "dsa_decode_impl": "flashmla_kv", "dsa_index_kpool": 1}
        dims = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "physical_page_size": 64}
        vars(self).update(fields | dims | vars(model_runner))

    monkeypatch.setattr(module.DeepseekSparseAttnBackend, "__init__", init)
    return module


def runner(**fields: Any) -> Any:
    """Return a model runner, here with what the backend takes from it and from its server."""
    return SimpleNamespace(**{"kv_cache_dtype": torch.bfloat16, "kv_cache_dim": 576} | fields)


@pytest.mark.parametrize("row_format", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(COUNTS, id="a length for each token"),
        pytest.param((*COUNTS, 5), id="lengths of padding"),
        pytest.param(COUNTS[:2], id="tokens of padding"),
    ],
)
def test_a_step_attends_to_its_slots(
    dsa: ModuleType, row_format: str, lengths: tuple[int, ...]
) -> None:
    """A token sees the first of its slots, as many as its length says; padding gives zeros."""
    generator = torch.Generator().manual_seed(3)
    stored = store(torch.randn(SLOTS, 576, generator=generator), 512, row_format)
    rows = viewed(stored.rows, row_format).unsqueeze(1)
    cache = rows if row_format == "bf16" else rows.view(E4M3)  # as SGLang's pool returns it
    query = torch.randn(3, HEADS, 704, generator=generator).bfloat16()
    q_nope, q_rope = query[..., :512].contiguous(), query[..., 640:]
    slots = torch.randint(SLOTS, (3, TOP_K), generator=generator)
    chosen = slots.where(torch.arange(TOP_K) < torch.tensor(COUNTS)[:, None], -1).int()
    backend = dsa.MlagenDSABackend(runner())
    backend.hisparse_coordinator, backend.use_fused_topk = None, True
    backend.dsa_topk_backend = SimpleNamespace(is_sgl_kernel=lambda: True)
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda _: cache)
    backend.forward_metadata = SimpleNamespace(
        dsa_cache_seqlens_int32=torch.tensor(lengths).int(),
        dsa_cu_seqlens_q=None,
        dsa_cu_seqlens_k=None,
        dsa_max_seqlen_q=1,
    )
    sizes = {"tp_q_head_num": HEADS, "head_dim": 576, "v_head_dim": 512}
    facts = {"scaling": 192**-0.5, "logit_cap": 0.0, "layer_id": 0, "is_cross_attention": False}
    layer = SimpleNamespace(**sizes, **facts)

    out = backend.forward_decode(
        q_nope, None, None, layer, None, q_rope=q_rope, topk_indices=chosen
    )

    assert out.shape == (3, HEADS, 512)
    both = torch.cat([q_nope, q_rope], dim=-1).double()
    for token, count in enumerate((*lengths[:3], 0)[:3]):
        want, _ = attended(both[token], stored.elements[slots[token, :count]], 192**-0.5, 512)
        assert_near(out[token], want)


def test_a_soft_cap_is_refused(dsa: ModuleType) -> None:
    """A layer with a feature that no kernel has fails, and says which."""
    names = ("q_rope", "kv_cache", "q_nope", "page_table", "cache_seqlens", "cu_seqlens_q")
    rest = {"cu_seqlens_k": None, "max_seqlen_q": 1, "v_head_dim": 512, "sm_scale": 1.0}
    call = dict.fromkeys(names) | rest | {"page_size": 1, "logit_cap": 30.0}
    with pytest.raises(NotImplementedError, match="logit_cap"):
        dsa.MlagenDSABackend(runner())._forward_fa3(**call)


@pytest.mark.parametrize("cache", [{}, {"kv_cache_dtype": E4M3, "kv_cache_dim": 656}])
def test_a_model_runner_gets_the_backend(
    sglang: Callable[[str], ModuleType], dsa: ModuleType, cache: dict[str, Any]
) -> None:
    """The registry makes the backend, which the models then treat as SGLang's own."""
    registry = sglang("sglang.srt.layers.attention.attention_registry")
    handlers = sglang("sglang.srt.models.deepseek_common.attention_backend_handler")
    models = sglang("sglang.srt.models.deepseek_common.utils")
    sglang("mlagen.integrations.sglang").register()

    for _ in range(2):  # a draft model has a runner of its own
        backend = registry.ATTENTION_BACKENDS[NAME](runner(**cache))

    assert type(backend) is dsa.MlagenDSABackend
    assert models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count(NAME) == 1
    handler = handlers.AttentionBackendRegistry.get_handler(NAME)
    assert handler is handlers.handle_attention_dsa


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kv_cache_dtype": E4M3},
            "mlagen_dsa: expected rows of 656 bytes in an FP8 cache, got 576",
        ),
        ({"dcp_size": 2}, "mlagen_dsa: expected --dcp-size 1, got 2"),
    ],
)
def test_a_server_that_cannot_work_does_not_start(
    dsa: ModuleType, fields: dict[str, Any], message: str
) -> None:
    """A cache that no kernel reads is refused, and so are tokens that are spread over ranks."""
    with pytest.raises(ValueError, match=message):
        dsa.backend_of(runner(**fields), NAME)
