"""Attention of the sparse backend to rows of the cache, after vLLM's conversion of indices."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import E4M3, HEADS, assert_near, attended
from tests.integrations.servers import Import
from tests.integrations.vllm.conftest import LAYER, ImplOf, queries_of
from tests.problems.mla_rows import store, viewed

BLOCK, BLOCKS, TOP_K = 32, 3, 8
COUNTS = (8, 3, 0)  # the last as of a token without one on this DCP rank


@pytest.fixture
def sparse(vllm: Import) -> ModuleType:
    """Return the module of the sparse backend."""
    return vllm("mlagen.integrations.vllm.sparse")


def attend(impl: Any, query: Any, cache: torch.Tensor, indices: torch.Tensor, **call: Any) -> Any:
    """Call the implementation as vLLM's common one does."""
    counts = torch.tensor(COUNTS).int()
    call = {"block_size": cache.shape[1], "is_decode": True} | call
    return impl._forward_mqa_kernel(query, cache, indices, counts, layer=LAYER, **call)


@pytest.mark.parametrize(
    ("row_format", "query_format", "rope"),
    [
        ("bf16", "bf16", 64),
        ("bf16", "bf16", 0),
        ("e4m3", "bf16", 0),
        ("e4m3", "e4m3", 64),
        ("fp8_ds_mla", "bf16", 64),
        pytest.param("fp8_ds_mla", "bf16", 0, id="GLM-5.3-Flash: RoPE elements of zeros"),
    ],
)
@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(BLOCK, id="one layer"),
        pytest.param(2 * BLOCK, id="blocks of two layers in turn"),
        pytest.param(BLOCK + 16, id="blocks that another cache keeps apart"),
    ],
)
def test_each_token_attends_to_its_rows(
    sparse: ModuleType, impl_of: ImplOf, row_format: str, query_format: str, rope: int, stride: int
) -> None:
    """A token sees the first valid count of its indices, which count rows of other layers too."""
    generator = torch.Generator().manual_seed(3)
    content = torch.randn(BLOCKS * stride, 512 + rope, generator=generator)
    if row_format == "fp8_ds_mla":
        content = torch.nn.functional.pad(content, (0, 64 - rope))
    stored = store(content, 512, row_format)
    rows = viewed(stored.rows, row_format).view(BLOCKS, stride, -1)
    dtype = {"bf16": torch.bfloat16, "e4m3": E4M3}[query_format]
    query = torch.randn(len(COUNTS), HEADS, 512 + rope, generator=generator).to(dtype)
    slots = torch.randint(BLOCKS * BLOCK, (len(COUNTS), TOP_K), generator=generator)
    indices = slots // BLOCK * stride + slots % BLOCK
    kv_cache_dtype = {"bf16": "auto", "e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla"}[row_format]
    impl = impl_of(sparse.MlagenSparseMLAImpl, rope=rope, kv_cache_dtype=kv_cache_dtype)
    impl.need_to_return_lse_for_decode = True
    given = query if dtype != torch.bfloat16 else (query[..., :512], query[..., 512:])

    out, lse = attend(impl, given, rows[:, :BLOCK], indices.int())

    k_scale = 0.25 if row_format == "e4m3" else 1.0
    scale = impl.scale * k_scale * (0.5 if query_format == "e4m3" else 1.0)
    elements = stored.elements[:, : 512 + rope]
    for token, count in enumerate(COUNTS):
        seen = elements[indices[token, :count]]
        want, want_lse = attended(query[token].double(), seen, scale, 512)
        assert_near(out[token], want * k_scale)
        assert_near(lse[token], want_lse)


def test_the_parts_of_a_query_are_not_copied(
    sparse: ModuleType, impl_of: ImplOf, monkeypatch: Patch
) -> None:
    """A 16-bit query comes in two parts, which mlagen reads where vLLM has them."""
    calls = queries_of(sparse, monkeypatch)
    q_pe = torch.zeros(3, HEADS, 192).bfloat16()[..., 128:]
    parts = (torch.zeros(3, HEADS, 512).bfloat16(), q_pe)
    cache = torch.ones(1, BLOCK, 576).bfloat16()

    attend(impl_of(sparse.MlagenSparseMLAImpl), parts, cache, torch.zeros(3, TOP_K).int())

    ((latent, rope),) = calls
    assert (latent.shape, rope.shape) == ((3, 1, HEADS, 512), (3, 1, HEADS, 64))
    assert [latent.data_ptr(), rope.data_ptr()] == [part.data_ptr() for part in parts]


def test_no_lse_is_returned_to_one_gpu(sparse: ModuleType, impl_of: ImplOf) -> None:
    """Without DCP there is no LSE, which the kernel then need not write."""
    impl = impl_of(sparse.MlagenSparseMLAImpl)
    query, cache = torch.ones(3, HEADS, 576).bfloat16(), torch.ones(1, BLOCK, 576).bfloat16()

    out, lse = attend(impl, query, cache, torch.zeros(3, TOP_K).int())

    assert lse is None
    assert_near(out[:2], torch.ones(2, HEADS, 512))


def test_the_builder_takes_drafts_on_dcp_ranks_too(sparse: ModuleType, monkeypatch: Patch) -> None:
    """Requests with drafts are decoded, not prefilled, whether or not there are DCP ranks."""
    thresholds: list[Any] = []
    base = sparse.SparseMLACommonMetadataBuilder
    monkeypatch.setattr(base, "__init__", lambda *_: None)
    monkeypatch.setattr(
        base, "_init_reorder_batch_threshold", lambda _, *args, **kw: thresholds.append((args, kw))
    )

    builder = sparse.MlagenSparseMLAMetadataBuilder
    monkeypatch.setattr(builder, "add_to_warm_up", lambda *_: None)

    builder(SimpleNamespace(block_size=64), ["layer"], None, torch.device("cpu"))

    keywords = {"supports_spec_as_decode": True, "supports_dcp_with_varlen": True}
    assert thresholds == [((1,), keywords)]


@pytest.mark.parametrize(("block_size", "rows"), [(64, 64), (1152, 64), (48, 16), (1, 1)])
def test_blocks_are_whole_pages_apart(
    sparse: ModuleType, block_size: int, rows: int, monkeypatch: Patch
) -> None:
    """The cache is laid out so that an index can count rows over the layers in between."""
    monkeypatch.setattr(sparse, "align_blocks_to_rows", lambda _, rows: rows)
    spec = SimpleNamespace(block_size=block_size)
    assert sparse.MlagenSparseMLABackend.customize_spec(spec) == rows


@pytest.mark.parametrize(
    ("block_size", "stride", "page"),
    [(64, 64, 64), (1152, 1152, 64), (128, 320, 64), (96, 96, 32), (64, 80, 16)],
)
def test_an_inflated_block_is_read_in_pages(
    sparse: ModuleType,
    impl_of: ImplOf,
    block_size: int,
    stride: int,
    page: int,
    monkeypatch: Patch,
) -> None:
    """A KV block of a hybrid model, among those of other layers, has pages that are prewarmed."""
    pages: list[tuple[int, ...]] = []

    def decode(query: torch.Tensor, cache: torch.Tensor, *_: Any, **__: Any) -> Any:
        pages.append(tuple(cache.shape[1:]))
        return query

    monkeypatch.setattr(sparse, "decode", decode)
    cache = torch.ones(2, stride, 576).bfloat16()[:, :block_size]
    query = torch.ones(3, HEADS, 576).bfloat16()
    attend(impl_of(sparse.MlagenSparseMLAImpl), query, cache, torch.zeros(3, TOP_K).int())
    assert pages == [(page, 576)]


def test_rows_without_rope_are_not_gathered_for_a_dense_prefill(
    sparse: ModuleType, impl_of: ImplOf
) -> None:
    """VLLM's dense prefill of a short prompt would write whole rows to a narrower workspace."""
    cls = sparse.MlagenSparseMLAImpl
    assert not impl_of(cls, rope=0, kv_cache_dtype="fp8_ds_mla").supports_dense_mha_prefill
    assert impl_of(cls, rope=64, kv_cache_dtype="fp8_ds_mla").supports_dense_mha_prefill
    assert impl_of(cls, rope=0).supports_dense_mha_prefill
