"""The backends of values of their own dims and of scales of tokens, with mlagen's decode."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.spec.dtype import DType
from tests.fixture_types import Patch
from tests.integrations.attended import assert_near, gqa_attended
from tests.integrations.servers import Import, is_installed
from tests.integrations.vllm.conftest import config_of

HEADS, KV_HEADS, PAGE, PAGES = 4, 2, 16, 4
DIM, DIM_VO = 48, 32
SEQ_LENS = (33, 5)
LAYER = SimpleNamespace(_q_scale_float=2.0, _k_scale_float=0.5, _v_scale_float=0.25)


@pytest.fixture
def diffkv(vllm: Import) -> ModuleType:
    """Return the module of the backend."""
    return vllm("mlagen.integrations.vllm.diffkv")


@pytest.fixture
def impl(diffkv: ModuleType) -> Any:
    """Return an implementation, with what vLLM sets at start-up on Hopper."""
    return made_of(diffkv.MlagenDiffKVImpl)


@pytest.fixture
def token_scales(vllm: Import) -> ModuleType:
    """Return the module of the backend over Triton's."""
    return vllm("mlagen.integrations.vllm.token_scales")


def made_of(impl_class: Any) -> Any:
    """Return an implementation, with what vLLM sets at start-up on Hopper."""
    made = object.__new__(impl_class)
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": DIM, "max_q_len": 2}
    others = {"sliding_window": (-1, -1), "scale": DIM**-0.5}
    others |= dict.fromkeys(("sinks", "logits_soft_cap"))
    vars(made).update(sizes | others | {"kv_cache_dtype": "auto", "dcp_world_size": 1})
    return made


def batch(q_lens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return query, cache and metadata of a batch, as FlashAttention's builder makes them."""
    generator = torch.Generator().manual_seed(11)
    tokens, requests = sum(q_lens), len(SEQ_LENS)
    query = torch.randn(tokens, HEADS, DIM, generator=generator).bfloat16()
    shape = (requests * PAGES, PAGE, KV_HEADS, DIM + DIM_VO)
    cache = torch.randn(shape, generator=generator).bfloat16().transpose(1, 2)
    metadata = SimpleNamespace(
        num_actual_tokens=tokens,
        max_query_len=max(q_lens),
        query_start_loc=torch.tensor([0, *q_lens]).cumsum(0).int(),
        max_seq_len=max(SEQ_LENS),
        seq_lens=torch.tensor(SEQ_LENS).int(),
        block_table=torch.arange(requests * PAGES).view(requests, PAGES).int(),
        causal=True,
    )
    return query, cache, metadata


def expected(
    query: torch.Tensor,
    cache: torch.Tensor,
    q_lens: tuple[int, ...],
    window: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of the query tokens of each request, in float64."""
    outs, first = [], 0
    for request, (seq_len, q_len) in enumerate(zip(SEQ_LENS, q_lens, strict=True)):
        own = cache[request * PAGES : (request + 1) * PAGES].transpose(1, 2).flatten(0, 1)
        keys, values = own[:seq_len, :, :DIM], own[:seq_len, :, DIM:]
        tokens = query[first : first + q_len]
        outs.append(gqa_attended(tokens, keys, values, DIM**-0.5, window, sinks))
        first += q_len
    return torch.cat(outs)


@pytest.mark.parametrize("q_lens", [(1, 1), (2, 2), (1, 2)], ids=str)
@pytest.mark.parametrize(("window", "has_sinks"), [(-1, False), (7, True)])
def test_a_batch_of_decode_is_mlagens(
    impl: Any, q_lens: tuple[int, ...], window: int, has_sinks: bool
) -> None:
    """Each query token attends to its causal prefix, with MiMo's windows and sinks."""
    query, cache, metadata = batch(q_lens)
    sinks = torch.tensor([1.0, -1.0, 0.5, 2.0]) if has_sinks else None
    impl.sinks, impl.sliding_window = sinks, (window, 0)
    out = torch.full((len(query), HEADS, DIM_VO), torch.nan, dtype=query.dtype)

    returned = impl.forward(LAYER, query, None, None, cache, metadata, out)

    assert returned is out
    assert_near(out, expected(query, cache, q_lens, window, sinks))


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_fp8_cache_and_its_query_are_scaled(impl: Any, is_quantized: bool) -> None:
    """VLLM quantizes the query for FlashAttention, and its scale applies too."""
    query, cache, metadata = batch((1, 1))
    impl.kv_cache_dtype = "fp8"
    stored = cache.to(torch.float8_e4m3fn)
    query = (query / 2).to(torch.float8_e4m3fn) if is_quantized else query
    out = torch.full((len(query), HEADS, DIM_VO), torch.nan, dtype=torch.bfloat16)

    impl.forward(LAYER, query, None, None, stored.view(torch.uint8), metadata, out)

    scales = torch.tensor([0.5] * DIM + [0.25] * DIM_VO).double()
    factor = 2 if is_quantized else 1
    assert_near(out, expected(query.double() * factor, stored.double() * scales, (1, 1)))


@pytest.mark.parametrize(
    "change",
    [{"max_query_len": 3}, {"causal": False}, {"causal": torch.ones(2)}, None],
    ids=["a prompt", "not causal", "causal by request", "a profiling run"],
)
def test_other_batches_are_flash_attentions(
    diffkv: ModuleType, impl: Any, change: dict[str, Any] | None, monkeypatch: Patch
) -> None:
    """A batch with a prompt, a mask of another kind and a profiling run stay with the base."""
    calls: list[Any] = []
    monkeypatch.setattr(
        diffkv.FlashAttentionDiffKVImpl, "forward", lambda _, *call: calls.append(call)
    )
    metadata = batch((1, 1))[2]
    metadata = None if change is None else SimpleNamespace(**vars(metadata) | change)
    call = ("layer", "query", "key", "value", "cache", metadata, "out", None, None)
    impl.forward(*call)
    assert calls == [call]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_of_tokens_are_read_where_vllm_stores_them(
    vllm: Import, token_scales: ModuleType, dtype: torch.dtype, layout: str
) -> None:
    """A row has a key, its scale, the value and its scale; drafts, a window and sinks apply."""
    query, content, metadata = batch((1, 2))
    generator = torch.Generator().manual_seed(5)
    content = torch.randint(-99, 99, content.shape, generator=generator).float()
    keys = content.transpose(1, 2)[..., :DIM]  # of as many dims as values
    parts = []
    for codes in (keys, keys.flip(-1)):
        scales = torch.rand(*codes.shape[:-1], 1, generator=generator) / 50
        parts += [codes.to(dtype).view(torch.uint8), scales.view(torch.uint8)]
    rows = torch.cat(parts, dim=-1)
    if layout == "HND":
        rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
    impl = made_of(token_scales.MlagenTokenScalesImpl)
    mode = vllm("vllm.v1.kv_cache_interface").KVQuantMode
    is_int8 = dtype is torch.int8
    impl._kv_quant_mode = mode.INT8_PER_TOKEN_HEAD if is_int8 else mode.FP8_PER_TOKEN_HEAD
    impl._is_per_token_head_quant, impl.fp8_dtype = True, torch.float8_e4m3fn
    impl.sinks, impl.sliding_window = torch.tensor([1.0, -1.0, 0.5, 2.0]), (7, 0)
    cache = (rows.view(torch.int8) if is_int8 else rows).transpose(1, 2)
    stored = [part.clone() for part in parts[1::2]]
    views = impl.cache_of(LAYER, cache, query)["kv_cache_sf"]  # vLLM fills new scales with 1
    for view, scale in zip(views, stored, strict=True):
        view.copy_(scale.view(torch.float32)[..., 0])
    out = torch.full_like(query, torch.nan)

    returned = impl.forward(LAYER, query, None, None, cache, metadata, out)

    assert returned is out
    scaled = [
        part.view(dtype).float() * scale.view(torch.float32)
        for part, scale in zip(parts[::2], stored, strict=True)
    ]
    want, first = [], 0
    for request, (seq_len, q_len) in enumerate(zip(SEQ_LENS, (1, 2), strict=True)):
        pages = slice(request * PAGES, (request + 1) * PAGES)
        key, value = (each[pages].flatten(0, 1)[:seq_len] for each in scaled)
        tokens = query[first : first + q_len]
        want.append(gqa_attended(tokens, key, value, DIM**-0.5, 7, impl.sinks))
        first += q_len
    assert_near(out, torch.cat(want))


def test_a_layer_without_quantization_has_a_plain_cache(token_scales: ModuleType) -> None:
    """Keys and values of 16 bits lie side by side."""
    query, cache, metadata = batch((1, 1))
    impl = made_of(token_scales.MlagenTokenScalesImpl)
    impl._is_per_token_head_quant, impl.head_size = False, DIM_VO
    pages, query = cache[..., : 2 * DIM_VO], query[..., :DIM_VO]
    out = torch.full_like(query, torch.nan)

    impl.forward(LAYER, query, None, None, pages, metadata, out)

    want = []
    for request, seq_len in enumerate(SEQ_LENS):
        own = pages[request * PAGES : (request + 1) * PAGES].transpose(1, 2).flatten(0, 1)[:seq_len]
        key, value = own[..., :DIM_VO], own[..., DIM_VO:]
        want.append(gqa_attended(query[request : request + 1], key, value, DIM**-0.5))
    assert_near(out, torch.cat(want))


def test_the_dims_of_a_value_are_those_of_flash_attention(diffkv: ModuleType) -> None:
    """FlashAttention's classes choose their version by them."""
    diffkv.MlagenDiffKVBackend.set_head_size_v(96)
    try:
        assert diffkv.FlashAttentionDiffKVBackend.head_size_v == 96
    finally:
        diffkv.MlagenDiffKVBackend.set_head_size_v(128)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "soft_cap"), [("auto", DType.BF16, 0.0), ("fp8", DType.E4M3, 50.0)]
)
def test_the_calls_of_a_group_are_exact(
    diffkv: ModuleType, dtype: str, kv_dtype: DType, soft_cap: float, monkeypatch: Patch
) -> None:
    """Heads, dims, dtypes, caps, query lengths are those of layers; graphs hold uniform drafts."""
    fields = {"hf_config": SimpleNamespace(model_type="mimo_v2")}
    config = config_of(8, drafts=1, **fields, rswa_window=None, is_mm_prefix_lm=False)
    config.cache_config.cache_dtype = dtype
    config.compilation_config.cudagraph_mode.has_full_cudagraphs = lambda: False
    config.compilation_config.max_cudagraph_capture_size = None
    layer = SimpleNamespace(impl=SimpleNamespace(logits_soft_cap=soft_cap))
    config.compilation_config.static_forward_context["layer"] = layer
    if is_installed("vllm"):
        module = "vllm.v1.attention.backends.flash_attn"
        for name in ("get_num_attention_heads_from_layers", "get_dcp_world_size_and_rank"):
            value = 8 if name.startswith("get_num") else (1, 0)
            monkeypatch.setattr(f"{module}.{name}", lambda *_, value=value: value)
        monkeypatch.setattr(f"{module}.get_flash_attn_version", lambda **_: 3)
    spec = SimpleNamespace(
        num_kv_heads=2, head_size=192, head_size_v=128, block_size=64, dtype=torch.bfloat16
    )
    spec.dcp_sharded = False
    builder = diffkv.MlagenDiffKVMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))

    (first, rows), (second, more_rows) = builder.decode_calls()

    assert first == second
    assert first.has_soft_cap == bool(soft_cap)
    assert (first.head_dim, first.head_dim_vo, first.page_size) == (192, 128, 64)
    assert (first.query_dtype, first.kv_dtype, rows, more_rows) == (DType.BF16, kv_dtype, 4, 8)
    assert builder._cudagraph_support.name == "UNIFORM_BATCH"
    builder.warm_up_prefill()
