"""The GQA backend: vLLM's FlashInfer backend with mlagen's decode in the place of XQA."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.spec.dtype import DType
from tests.fixture_types import Patch
from tests.integrations.attended import E4M3, assert_near, gqa_attended
from tests.integrations.servers import Import, is_installed
from tests.integrations.vllm.conftest import config_of
from tests.problems.gqa import STORES, GqaCase

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 2, 64, 16, 4
SEQ_LENS = (33, 2)
LAYER = SimpleNamespace(_q_scale=None, _q_scale_float=1.0, _k_scale_float=0.5, _v_scale_float=0.25)


def cache_spec(head_dim: int = HEAD_DIM, dtype: str = "auto") -> Any:
    """Return the cache of a layer with the largest pages, as vLLM's builder sees it."""
    fields: dict[str, Any] = {"block_size": 128, "num_kv_heads": 2, "head_size": head_dim}
    if not is_installed("vllm"):
        return SimpleNamespace(**fields, kv_quant_mode=SimpleNamespace(is_nvfp4=dtype == "nvfp4"))
    module = import_module("vllm.v1.kv_cache_interface")
    stored = torch.bfloat16 if dtype == "auto" else torch.uint8
    mode = module.get_kv_quant_mode(dtype)
    return module.FullAttentionSpec(**fields, dtype=stored, kv_quant_mode=mode)


@pytest.fixture
def impl(gqa: ModuleType) -> Any:
    """Return an implementation, with what vLLM sets at start-up on Hopper."""
    made = object.__new__(gqa.MlagenGQAImpl)
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM}
    others = {"window_left": -1, "scale": HEAD_DIM**-0.5, "sinks": None, "kv_cache_dtype": "auto"}
    vars(made).update(sizes | others | {"logits_soft_cap": None})
    return made


def batch(
    gqa: ModuleType, q_len: int, head_dim: int = HEAD_DIM
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return query, cache and metadata of a decode batch, as vLLM's builder makes them."""
    generator = torch.Generator().manual_seed(11)
    flashinfer = gqa.vllm_flashinfer
    layout = import_module("vllm.v1.kv_cache_interface").KVCacheLayout.LBHNC
    tokens = len(SEQ_LENS) * q_len
    query = torch.randn(tokens, HEADS, head_dim, generator=generator).bfloat16()
    cache = torch.randn(len(SEQ_LENS) * PAGES, KV_HEADS, PAGE, 2 * head_dim, generator=generator)
    decode = flashinfer.FlashInferTrtllmAPIDecode(
        kernel=flashinfer.FlashInferDecodeKernel.XQA,
        block_tables=torch.arange(len(SEQ_LENS) * PAGES).view(len(SEQ_LENS), PAGES).int(),
        seq_lens=torch.tensor(SEQ_LENS).int(),
        max_seq_len=max(SEQ_LENS),
        q_len_per_req=q_len,
    )
    metadata = flashinfer.FlashInferMetadata(
        kv_cache_layout=layout,
        num_actual_tokens=tokens,
        slot_mapping=torch.zeros(tokens).long(),
        q_data_type_prefill=torch.bfloat16,
        q_data_type_decode=torch.bfloat16,
        num_decodes=len(SEQ_LENS),
        num_decode_tokens=tokens,
        num_prefills=0,
        num_prefill_tokens=0,
        causal=True,
        prefill=None,
        decode=decode,
    )
    return query, cache.bfloat16(), metadata


def expected(
    query: torch.Tensor,
    cache: torch.Tensor,
    q_len: int,
    sinks: torch.Tensor | None = None,
    window: int = -1,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Return the attention of the query tokens of each request, in float64."""
    outs = []
    for request, seq_len in enumerate(SEQ_LENS):
        own = cache[request * PAGES : (request + 1) * PAGES].transpose(1, 2).flatten(0, 1)
        tokens = query[request * q_len : (request + 1) * q_len]
        keys, values = own[:seq_len].chunk(2, dim=-1)
        scale = query.shape[-1] ** -0.5
        outs.append(gqa_attended(tokens, keys, values, scale, window, sinks, soft_cap))
    return torch.cat(outs)


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("window", "soft_cap"), [(-1, None), (7, 0.0), (7, 0.5)])
def test_a_decode_is_mlagens(
    gqa: ModuleType, impl: Any, q_len: int, has_sinks: bool, window: int, soft_cap: float | None
) -> None:
    """Each query token attends to its causal prefix.

    With sinks and windows as gpt-oss has them, and soft caps as Gemma 2 has.
    """
    query, cache, metadata = batch(gqa, q_len)
    sinks = torch.tensor([1.0, -1.0, 0.5, 2.0]) if has_sinks else None
    impl.sinks, impl.window_left, impl.logits_soft_cap = sinks, window, soft_cap
    out = torch.full_like(query, torch.nan)

    returned = impl.forward(LAYER, query, None, None, cache, metadata, out)

    assert returned is out
    assert_near(out, expected(query, cache, q_len, sinks, window, soft_cap))


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_an_fp8_cache_is_scaled(gqa: ModuleType, impl: Any, name: str, dtype: torch.dtype) -> None:
    """VLLM stores FP8 as bytes, and the scales of the layer apply."""
    query, cache, metadata = batch(gqa, 1)
    impl.kv_cache_dtype = name
    stored = cache.to(dtype)
    out = torch.full_like(query, torch.nan)

    impl.forward(LAYER, query, None, None, stored.view(torch.uint8), metadata, out)

    scaled = stored.double() * torch.tensor([0.5, 0.25]).repeat_interleave(HEAD_DIM).double()
    assert_near(out, expected(query, scaled, 1))


def nvfp4_pages(head_dim: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vLLM's pages of codes and scales, and keys and values in float64 as one cache.

    A page has the codes of its keys, their scales, the codes of its values, and their scales, and
    vLLM sees twice the KV heads in it.
    """
    dims: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": head_dim, "page_size": PAGE}
    case = GqaCase(**dims, kv="nvfp4", seq_lens=())
    pages = len(SEQ_LENS) * PAGES
    store = STORES["nvfp4"](case, pages)
    generator = torch.Generator().manual_seed(12)
    sides = ((store.key, store.key_scale), (store.value, store.value_scale))
    ids = torch.arange(pages)
    content = [store._fill(*side, ids, pages * PAGE, generator)[0] for side in sides]
    given = [part for side in sides for part in side if part is not None]
    parts = [part.transpose(1, 2) if layout == "HND" else part for part in given]
    stored = torch.cat([part.flatten(1) for part in parts], dim=1)
    axes = (2 * KV_HEADS, PAGE) if layout == "HND" else (PAGE, 2 * KV_HEADS)
    cache = stored.view(pages, *axes, head_dim * 9 // 16)
    both = torch.cat(content, dim=-1).view(pages, PAGE, KV_HEADS, 2 * head_dim).transpose(1, 2)
    return cache if layout == "HND" else cache.transpose(1, 2), both


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("head_dim", "q_len", "window"), [(128, 2, -1), (512, 1, 7)])
def test_an_nvfp4_cache_is_read_where_vllm_stores_it(
    gqa: ModuleType, impl: Any, layout: str, head_dim: int, q_len: int, window: int
) -> None:
    """Codes and scales are views of vLLM's pages, and the scales of the layer apply."""
    query, _, metadata = batch(gqa, q_len, head_dim)
    impl.kv_cache_dtype, impl.head_size, impl.scale = "nvfp4", head_dim, head_dim**-0.5
    impl.window_left = window
    cache, content = nvfp4_pages(head_dim, layout)
    out = torch.full_like(query, torch.nan)

    impl.forward(LAYER, query, None, None, cache, metadata, out)

    scaled = content * torch.tensor([0.5, 0.25]).repeat_interleave(head_dim).double()
    assert_near(out, expected(query, scaled, q_len, window=window))


def test_ragged_drafts_are_decoded(gqa: ModuleType, impl: Any) -> None:
    """Requests with different numbers of speculative tokens are one call."""
    query, cache, metadata = batch(gqa, 2)
    offsets = torch.tensor([0, 2, 3]).int()
    parts = replace(metadata.decode, q_cu_seq_lens=offsets, q_len_per_req=2)
    ragged = replace(metadata, decode=parts, num_decode_tokens=3, num_actual_tokens=3)
    out = torch.full_like(query, torch.nan)

    impl.forward(LAYER, query, None, None, cache, ragged, out)

    want = expected(query[[0, 1, 2, 2]], cache, 2)
    assert_near(out[:3], want[[0, 1, 3]])
    assert out[3].isnan().all()


def test_requests_that_pad_a_graph_have_rows(gqa: ModuleType, impl: Any) -> None:
    """A captured batch of more requests than tokens writes a row for each request."""
    query, cache, metadata = batch(gqa, 1)
    metadata = replace(metadata, num_actual_tokens=1, num_decode_tokens=1)
    out = torch.full_like(query, torch.nan)
    impl.forward(LAYER, query, None, None, cache, metadata, out)
    assert_near(out, expected(query, cache, 1))


def test_prefills_behind_the_decodes_are_flashinfers(
    gqa: ModuleType, impl: Any, monkeypatch: Patch
) -> None:
    """FlashInfer gets the rest of a mixed batch, as a batch of prefills alone.

    With ``--kv-sharing-fast-prefill`` the metadata has a class that is made of other metadata.
    """
    seen: list[Any] = []

    def forward(_: Any, *call: Any) -> torch.Tensor:
        seen.append(call)
        out: torch.Tensor = call[-1]
        return out.fill_(1)

    monkeypatch.setattr(gqa.vllm_flashinfer.FlashInferImpl, "forward", forward)
    query, cache, metadata = batch(gqa, 1)
    both = torch.cat([query, torch.ones(3, HEADS, HEAD_DIM).bfloat16()])
    mixed = replace(
        metadata, num_actual_tokens=5, num_prefills=1, num_prefill_tokens=3, prefill="prefill"
    )

    class Shared(type(mixed)):  # type: ignore[misc]
        def __init__(self, other: Any) -> None:
            for name, value in vars(other).items():
                setattr(self, name, value)

    mixed = Shared(mixed)
    out = torch.full_like(both, torch.nan)

    impl.forward(LAYER, both, None, None, cache, mixed, out)

    assert_near(out[:2], expected(query, cache, 1))
    assert (out[2:] == 1).all()
    ((_, rest, _, _, _, prefills, _),) = seen
    assert len(rest) == prefills.num_actual_tokens == prefills.num_prefill_tokens == 3
    assert (prefills.num_decode_tokens, prefills.decode, prefills.prefill) == (0, None, "prefill")
    assert (mixed.num_actual_tokens, mixed.num_decode_tokens) == (5, 2)


@pytest.mark.parametrize(("dtype", "scale"), [(E4M3, 0.5), (torch.bfloat16, 1.0)])
def test_a_prefilled_query_of_16_bits_has_no_scale(
    gqa: ModuleType, impl: Any, dtype: torch.dtype, scale: float, monkeypatch: Patch
) -> None:
    """FlashInfer multiplies the scores by the scale of the query, which only an FP8 one has."""
    calls: list[Any] = []
    monkeypatch.setattr(
        gqa.vllm_flashinfer.FlashInferImpl, "forward", lambda _, *call: calls.append(call)
    )
    layer = SimpleNamespace(**vars(LAYER) | {"_q_scale_float": 0.5})
    metadata = SimpleNamespace(decode=None, q_data_type_prefill=dtype)
    impl.forward(layer, *("query", "key", "value", "cache"), metadata, "out")
    ((seen, *_),) = calls
    assert vars(seen).items() >= (vars(LAYER) | {"_q_scale_float": scale}).items()


@pytest.mark.parametrize("metadata", [None, SimpleNamespace(decode=SimpleNamespace(wrapper=1))])
def test_other_batches_are_flashinfers(
    gqa: ModuleType, impl: Any, metadata: Any, monkeypatch: Patch
) -> None:
    """A profiling run, and a layer that XQA does not serve, stay with the base class."""
    calls: list[Any] = []
    monkeypatch.setattr(
        gqa.vllm_flashinfer.FlashInferImpl, "forward", lambda _, *call: calls.append(call)
    )
    call = (LAYER, "query", "key", "value", "cache", metadata, "out", "scale", "block scale")
    impl.forward(*call)
    assert calls == [call]


@pytest.fixture
def hopper(gqa: ModuleType, vllm: Import, monkeypatch: Patch) -> list[str]:
    """Return what an air-gapped Hopper is asked: vLLM's own gate, which reaches for the network."""
    asked: list[str] = []

    def ask(*_: Any, **__: Any) -> bool:
        asked.append("network")
        return False

    names = ("has_nvidia_artifactory", "supports_trtllm_attention", "can_use_trtllm_attention")
    utils = vllm("vllm.utils.flashinfer")
    for module, name in product((utils, gqa.vllm_flashinfer), names):
        monkeypatch.setattr(module, name, ask, raising=False)
    monkeypatch.setattr(gqa, "force_use_trtllm_attention", lambda: None)
    if is_installed("vllm"):
        for module in (utils, gqa.vllm_flashinfer):
            monkeypatch.setattr(module, "force_use_trtllm_attention", lambda: None)
        platform = type(vllm("vllm.platforms").current_platform)
        ninety = {"is_device_capability": 90, "is_device_capability_family": 90}
        for name, value in ninety.items():
            method = classmethod(lambda _, asked, *__, value=value: asked == value)
            monkeypatch.setattr(platform, name, method)
        has = classmethod(lambda _, asked, *__: asked <= 90)
        monkeypatch.setattr(platform, "has_device_capability", has)
    return asked


def test_the_gate_is_open_without_cubins_and_a_network(gqa: ModuleType, hopper: list[str]) -> None:
    """Decode on Hopper is mlagen's, sinks included, and nobody waits for a repository of cubins."""
    backend = gqa.MlagenGQABackend
    assert backend.supports_sink()
    builder = backend.get_builder_cls()
    support = builder.get_cudagraph_support(config_of(8), cache_spec())
    assert support.name == "UNIFORM_BATCH"
    if is_installed("vllm"):
        gpt_oss = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
        gpt_oss |= {"block_size": 16, "has_sink": True, "attn_type": "decoder"}
        gpt_oss |= dict.fromkeys(("use_mla", "use_sparse", "use_mm_prefix"), False)
        gpt_oss |= {"use_per_head_quant_scales": False}
        nine = import_module("vllm.platforms.interface").DeviceCapability(9, 0)
        assert backend.validate_configuration(**gpt_oss, device_capability=nine) == []
    assert hopper == []


@pytest.mark.parametrize(
    ("heads", "forced", "is_invariant", "is_open"),
    [
        ((8, 2), None, False, True),
        ((8, 2), True, False, True),
        ((8, 3), None, False, False),
        ((8, 2), False, False, False),
        ((8, 2), None, True, True),
    ],
    ids=["default", "forced", "uneven heads", "switched off", "batch invariant"],
)
def test_what_closes_the_gate(
    gqa: ModuleType,
    heads: tuple[int, int],
    forced: bool | None,
    is_invariant: bool,
    is_open: bool,
    monkeypatch: Patch,
) -> None:
    """An option of vLLM, and heads without a group, leave decode to FlashInfer."""
    monkeypatch.setattr(gqa, "force_use_trtllm_attention", lambda: forced)
    monkeypatch.setattr(gqa.envs, "VLLM_BATCH_INVARIANT", is_invariant, raising=False)
    assert gqa.can_use_trtllm_attention(*heads) is is_open
    assert not gqa.can_use_trtllm_attention(*heads, is_prefill=True)


def test_another_backend_keeps_its_gate(gqa: ModuleType) -> None:
    """FLASHINFER in the same process asks vLLM's gate, as without mlagen."""
    name = "supports_trtllm_attention"
    theirs = gqa.vllm_flashinfer.FlashInferBackend.supports_sink.__globals__[name]
    ours = gqa.MlagenGQABackend.supports_sink.__globals__[name]
    assert ours is gqa.supports_trtllm_attention
    assert theirs is not ours


def assert_plans_a_prefill(gqa: ModuleType, builder: Any, monkeypatch: Patch) -> None:
    """Check that the warm-up of a builder of vLLM's reaches FlashInfer's plan, and no decode."""
    flashinfer = gqa.vllm_flashinfer
    plans: list[Any] = []

    class Wrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            """Allocate nothing."""

        def plan(self, **keywords: Any) -> None:
            plans.append(keywords["qo_indptr"].tolist())

    monkeypatch.setitem(type(builder).build.__globals__, "PIN_MEMORY", False)
    monkeypatch.setattr(builder, "_get_prefill_wrapper", lambda **_: Wrapper())
    monkeypatch.setattr(builder, "_compute_flashinfer_kv_metadata", lambda *_: None)
    monkeypatch.setattr(type(builder), "kv_cache_layout", None)
    builder.warm_up_prefill()
    assert plans == [[0, 2]]


GIVEN: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_size": HEAD_DIM,
    "scale": 1.0,
    "alibi_slopes": None,
    "sliding_window": None,
    "logits_soft_cap": None,
    "kv_cache_dtype": "auto",
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("logits_soft_cap", 50.0, False),
        ("alibi_slopes", [0.5] * 8, True),
        ("sliding_window", 128, False),
    ],
)
def test_what_xqa_would_ignore_is_refused(
    gqa: ModuleType, name: str, value: Any, is_refused: bool
) -> None:
    """VLLM passes XQA no ALiBi, and asks no backend about it."""
    refused = pytest.raises(NotImplementedError, match=f"^mlagen: {name} is not supported by GQA")
    with refused if is_refused else nullcontext():
        gqa.MlagenGQAImpl(**GIVEN | {name: value})


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "prefilled"),
    [
        (64, "auto", DType.BF16, torch.bfloat16),
        (256, "fp8", DType.E4M3, torch.float8_e4m3fn),
        (128, "fp8_e5m2", DType.E5M2, torch.bfloat16),
        (512, "fp8", DType.E4M3, torch.bfloat16),  # FlashInfer has no prefill of an FP8 query
        (512, "nvfp4", DType.NVFP4, torch.bfloat16),
    ],
)
def test_a_layer_and_its_builder_ask_no_network(
    gqa: ModuleType,
    vllm: Import,
    hopper: list[str],
    head_dim: int,
    dtype: str,
    kv_dtype: DType,
    prefilled: torch.dtype,
    monkeypatch: Patch,
) -> None:
    """A layer is built for XQA's place, also where XQA has no kernel, and graphs hold its drafts.

    No batch of prefills asks for other kernels.
    """
    is_nvfp4 = dtype == "nvfp4"
    given = GIVEN | {"kv_cache_dtype": dtype, "head_size": head_dim}
    layer = gqa.MlagenGQAImpl(**given, sinks=None if is_nvfp4 else torch.zeros(8))
    config = config_of(8)
    config.cache_config.cache_dtype = dtype
    spec = cache_spec(head_dim, dtype)
    if is_installed("vllm"):
        own = vars(vllm("vllm.v1.attention.backends.flashinfer"))
        utils = vllm("vllm.v1.attention.backends.utils")
        same = utils.PerLayerParameters(-1, 50.0, 1.0, has_sinks=not is_nvfp4)
        monkeypatch.setitem(own, "get_per_layer_parameters", lambda *_: {"layer": same})
        monkeypatch.setitem(own, "get_num_attention_heads_from_layers", lambda *_: 8)
        monkeypatch.setitem(own, "get_dcp_world_size_and_rank", lambda _: (1, 0))

    builder = gqa.MlagenGQAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))

    if is_installed("vllm"):
        ((variant, rows),) = builder.decode_calls()
        assert (variant.head_dim, variant.kv_dtype, rows) == (head_dim, kv_dtype, 4)
        assert variant.has_soft_cap
        assert_plans_a_prefill(gqa, builder, monkeypatch)
    else:
        assert builder.build(0, None) is False
    assert builder.q_data_type_prefill is prefilled
    assert builder.get_cudagraph_support(config, spec).name == "UNIFORM_BATCH"
    assert layer.supports_xqa_or_trtllm_gen_decode
    assert builder.use_xqa
    assert hopper == []


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (None, []),
        (SimpleNamespace(sparse_attention_config=None), []),
        (SimpleNamespace(sparse_attention_config={"sparse_block_size": 128}), [128]),
    ],
)
def test_pages_are_also_the_blocks_of_sparse_layers(
    gqa: ModuleType, monkeypatch: Patch, text: Any, more: list[int]
) -> None:
    """One size serves all layers of a group, and vLLM's sparse layers have no other."""
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text)) if text else None
    monkeypatch.setattr(gqa, "get_current_vllm_config_or_none", lambda: config)
    assert gqa.MlagenGQABackend.get_supported_kernel_block_sizes() == [16, 32, 64, *more]


def test_the_classes_are_of_that_backend(gqa: ModuleType) -> None:
    """VLLM builds layers of these classes, and still finds FlashInfer's in them."""
    backend, flashinfer = gqa.MlagenGQABackend, gqa.vllm_flashinfer
    assert backend.get_impl_cls() is gqa.MlagenGQAImpl
    assert backend.get_builder_cls() is gqa.MlagenGQAMetadataBuilder
    assert issubclass(gqa.MlagenGQAImpl, flashinfer.FlashInferImpl)
    assert issubclass(gqa.MlagenGQAMetadataBuilder, flashinfer.FlashInferMetadataBuilder)
