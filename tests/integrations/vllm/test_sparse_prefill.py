"""Conversion of ``fp8_ds_mla`` rows to bf16 for the query tokens of a long prefill."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import HEADS, assert_near, attended
from tests.integrations.servers import Import
from tests.integrations.vllm.conftest import LAYER, ImplOf
from tests.problems.mla_rows import store

BLOCK, TOP_K = 64, 8
SEQ_LENS, Q_LENS = (70, 40), (3, 2)  # of prefills
DECODES = 2


@pytest.fixture
def sparse(vllm: Import, monkeypatch: Patch) -> ModuleType:
    """Return the module of the sparse backend, which converts any number of query tokens."""
    module = vllm("mlagen.integrations.vllm.sparse")
    monkeypatch.setattr(module, "MIN_TOKENS", 1)
    return module


def elements_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the values of rows of 656 bytes."""
    codes = rows[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[..., 512:528].contiguous().view(torch.float32).repeat_interleave(128, dim=-1)
    return torch.cat([codes * scales, rows[..., 528:].contiguous().view(torch.bfloat16)], dim=-1)


@pytest.fixture
def on_cpu(sparse: ModuleType, monkeypatch: Patch) -> None:
    """Put torch in the place of vLLM's two kernels, which need a GPU."""

    def gather(cache: Any, dst: Any, table: Any, starts: Any, count: int) -> None:
        ends = [*starts[1:].tolist(), len(dst)]
        for request in range(count):
            start, end = int(starts[request]), ends[request]
            rows = cache[table[request].long()].flatten(0, 1)[: end - start]
            dst[start:end] = elements_of(rows).to(dst.dtype)

    def convert(request: Any, table: Any, indices: Any, **keywords: Any) -> Any:
        assert keywords["HAS_PREFILL_WORKSPACE"]
        assert keywords["NUM_TOPK_TOKENS"] == indices.shape[1]
        assert (keywords["prefill_workspace_request_ids"] == request).all()
        assert len(table) == len(keywords["prefill_workspace_starts"])
        offsets = keywords["prefill_workspace_starts"][request.long()][:, None]
        is_valid = indices >= 0
        return torch.where(is_valid, indices + offsets, -1), is_valid.sum(1).int()

    monkeypatch.setattr(sparse.ops, "cp_gather_and_upconvert_fp8_kv_cache", gather)
    monkeypatch.setattr(sparse, "triton_convert_req_index_to_global_index", convert)


def builder_of(rows: int = 4 * BLOCK, **fields: Any) -> Any:
    """Return what a conversion takes from a builder."""
    config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
    space = torch.full((rows, 576), torch.nan, dtype=torch.bfloat16)
    known = {"chunked_prefill_workspace": space, "dcp_world_size": 1, "vllm_config": config}
    return SimpleNamespace(**known | fields)


def metadata_of(sparse: ModuleType, *, decodes: int = DECODES, **fields: Any) -> Any:
    """Return the metadata of decodes of one token, and of prefills behind them."""
    lengths = torch.tensor([BLOCK] * decodes + list(SEQ_LENS)).int()
    counts = torch.tensor([1] * decodes + list(Q_LENS))
    requests = torch.arange(len(counts)).repeat_interleave(counts).int()
    table = torch.arange(2 * len(lengths)).view(len(lengths), 2).flip(0).int()
    known = {
        "num_reqs": len(lengths),
        "max_query_len": max(Q_LENS),
        "max_seq_len": int(lengths.max()),
        "num_actual_tokens": len(requests),
        "query_start_loc": counts.cumsum(0),
        "slot_mapping": requests.long(),
        "num_decodes": decodes,
        "num_decode_tokens": decodes,
        "num_prefills": len(Q_LENS),
        "block_table": table,
        "req_id_per_token": requests,
        "seq_lens": lengths,
        "block_size": BLOCK,
        "prefill": SimpleNamespace(use_dense_mha=False),
    }
    return sparse.MlagenSparseMLAMetadata(**known | fields)


def batch_of(metadata: Any) -> Any:
    """Return the batch of metadata, as the model runner describes it."""
    return SimpleNamespace(seq_lens_cpu_upper_bound=metadata.seq_lens)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("decodes", [0, DECODES])
@pytest.mark.parametrize("is_parted", [True, False])
def test_prefills_attend_to_converted_rows(
    sparse: ModuleType,
    impl_of: ImplOf,
    decodes: int,
    is_parted: bool,
    monkeypatch: Patch,
) -> None:
    """Each query token sees its top-k tokens; decodes before them take the common path."""
    metadata = metadata_of(sparse, decodes=decodes)
    metadata.conversion = sparse.conversion_of(builder_of(), batch_of(metadata), metadata)
    generator = torch.Generator().manual_seed(9)
    blocks = metadata.block_table.numel()
    stored = store(torch.randn(blocks * BLOCK, 576, generator=generator), 512, "fp8_ds_mla")
    tokens = metadata.num_actual_tokens
    query = torch.randn(tokens, HEADS, 576, generator=generator).bfloat16()
    limits = metadata.seq_lens[metadata.req_id_per_token.long()]
    indices = torch.rand(tokens, TOP_K, generator=generator) * limits[:, None]
    indices = indices.int()
    indices[-1, 5:] = -1
    impl = impl_of(sparse.MlagenSparseMLAImpl, kv_cache_dtype="fp8_ds_mla")
    impl.topk_indices_buffer = indices
    common: list[int] = []

    def forward_mqa(_: Any, q: Any, *__: Any) -> Any:
        common.append(len(sparse.latent_of(q)))
        return torch.ones(common[-1], HEADS, 512).bfloat16(), None

    monkeypatch.setattr(sparse.SparseMLACommonImpl, "forward_mqa", forward_mqa)
    given = (query[..., :512], query[..., 512:]) if is_parted else query

    out, lse = impl.forward_mqa(given, stored.rows.view(blocks, BLOCK, 656), metadata, LAYER)

    assert lse is None
    assert common == ([decodes] if decodes else [])
    assert (out[:decodes] == 1).all()
    elements = stored.elements.view(blocks, BLOCK, 576)
    for token in range(decodes, tokens):
        request = metadata.req_id_per_token[token]
        rows = elements[metadata.block_table[request].long()].flatten(0, 1)
        seen = rows[indices[token][indices[token] >= 0].long()]
        assert_near(out[token], attended(query[token].double(), seen, impl.scale, 512)[0])


@pytest.mark.parametrize("case", ["no conversion", "decodes alone"])
def test_other_batches_take_the_common_path(
    sparse: ModuleType, impl_of: ImplOf, case: str, monkeypatch: Patch
) -> None:
    """Without a conversion, or where prefills are dense, vLLM's implementation has all tokens."""
    calls: list[Any] = []
    monkeypatch.setattr(
        sparse.SparseMLACommonImpl, "forward_mqa", lambda _, *call: calls.append(call)
    )
    metadata = metadata_of(sparse)
    if case == "decodes alone":
        metadata.conversion = "conversion"
    query = torch.ones(DECODES if metadata.conversion else 7, HEADS, 576)
    call = (query, "cache", metadata, LAYER)
    impl_of(sparse.MlagenSparseMLAImpl).forward_mqa(*call)
    assert calls == [call]


@pytest.mark.parametrize(
    ("fields", "rows", "min_tokens", "converts"),
    [
        ({}, 256, 5, True),
        ({}, 256, 6, False),
        ({}, 127, 5, False),
        ({}, 128, 5, True),
        ({"num_prefills": 0, "num_decode_tokens": 7}, 256, 0, False),
        ({"prefill": SimpleNamespace(use_dense_mha=True)}, 256, 5, False),
        ({"prefill": None}, 256, 5, True),
    ],
    ids=["long", "short", "too many rows", "exact", "no prefill", "dense", "no dense prefill"],
)
def test_a_long_sparse_prefill_that_fits_is_converted(
    sparse: ModuleType,
    fields: dict[str, Any],
    rows: int,
    min_tokens: int,
    converts: bool,
    monkeypatch: Patch,
) -> None:
    """The rows of all prefills fit into the workspace, whole pages of it."""
    monkeypatch.setattr(sparse, "MIN_TOKENS", min_tokens)
    metadata = metadata_of(sparse, **fields)
    found = sparse.conversion_of(builder_of(rows), batch_of(metadata), metadata)
    assert (found is not None) is converts
    if found is not None:
        assert found.num_rows == sum(SEQ_LENS)
        assert found.starts.tolist() == [0, SEQ_LENS[0]]
        assert found.request_ids.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("heads", "dtype", "fields", "can"),
    [
        (64, "fp8_ds_mla", {}, True),
        (16, "fp8_ds_mla", {}, False),
        (128, "fp8", {}, False),
        (128, "fp8_ds_mla", {"dcp_world_size": 2}, False),
        (128, "fp8_ds_mla", {"chunked_prefill_workspace": torch.ones(9, 576).half()}, False),
        (128, "fp8_ds_mla", {"chunked_prefill_workspace": torch.ones(9, 512).bfloat16()}, False),
    ],
    ids=["64 heads", "16 heads", "another cache", "DCP", "fp16", "without RoPE"],
)
def test_which_layers_convert(
    sparse: ModuleType, heads: int, dtype: str, fields: dict[str, Any], can: bool
) -> None:
    """With few heads the kernel of FP8 rows is faster."""
    assert sparse.can_convert(builder_of(**fields), heads, dtype) is can


@pytest.mark.parametrize("converts", [True, False])
def test_the_builder_adds_the_conversion(
    sparse: ModuleType, converts: bool, monkeypatch: Patch
) -> None:
    """The metadata of a batch says whether its prefills are converted, for all layers of a step."""
    metadata = metadata_of(sparse)
    base = sparse.SparseMLACommonMetadataBuilder
    monkeypatch.setattr(base, "build", lambda *_: metadata)
    builder = object.__new__(sparse.MlagenSparseMLAMetadataBuilder)
    vars(builder).update(vars(builder_of()) | {"converts": converts})

    built = builder.build(0, batch_of(metadata))

    assert built is metadata
    assert (built.conversion is not None) is converts
