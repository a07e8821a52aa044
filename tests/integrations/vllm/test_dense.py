"""``forward_mqa`` of the dense backend, over vLLM's metadata."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import E4M3, HEADS, PAGE, Batch, assert_near
from tests.integrations.servers import Import, is_installed
from tests.integrations.vllm.conftest import LAYER, ImplOf, queries_of


def metadata_of(batch: Batch, dense: ModuleType, **fields: Any) -> Any:
    """Return vLLM's metadata, its decode part made by the builder."""
    starts = torch.tensor([0, *batch.q_lens]).cumsum(0).int()
    longest = {"max_query_len": max(batch.q_lens), "max_seq_len": max(batch.seq_lens)}
    counts = {"num_decode_tokens": sum(batch.q_lens)}
    decode = dense.MlagenMLAMetadataBuilder._build_decode(
        None,
        block_table_tensor=batch.table,
        seq_lens_device=torch.tensor(batch.seq_lens).int(),
        query_start_loc_cpu=starts,
        query_start_loc_device=starts,
        **counts | longest | {"dcp_tot_seq_lens_device": None} | fields,
    )
    return dense.MLACommonMetadata(
        num_reqs=len(batch.q_lens),
        num_actual_tokens=sum(batch.q_lens),
        query_start_loc=starts,
        slot_mapping=starts,
        num_decodes=len(batch.q_lens),
        num_prefills=0,
        decode=decode,
        **counts | longest,
    )


@pytest.fixture
def dense(vllm: Import) -> ModuleType:
    """Return the module of the dense backend."""
    return vllm("mlagen.integrations.vllm.dense")


# Query and KV lengths.
LENGTHS = {
    "one token, and an empty request of a padded graph": ((1, 1, 1), (1, 61, 0)),
    "uniform drafts": ((3, 3), (40, 3)),
    "ragged drafts": ((2, 1, 4), (17, 1, 60)),
}


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 64), (512, 0)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("returns_lse", [False, True])
def test_forward_mqa_is_attention(
    dense: ModuleType, impl_of: ImplOf, rank: int, rope: int, lengths: str, returns_lse: bool
) -> None:
    """Outputs, and natural LSEs where DCP needs them, are those of each token's causal prefix."""
    impl = impl_of(dense.MlagenMLAImpl, rank, rope)
    impl.need_to_return_lse_for_decode = returns_lse
    batch = Batch(rank + rope, *LENGTHS[lengths])
    parts = (batch.query[..., :rank], batch.query[..., rank:])

    out, lse = impl.forward_mqa(parts, batch.cache, metadata_of(batch, dense), LAYER)

    want, want_lse = batch.expected(batch.query, batch.cache, impl.scale, rank)
    assert out.shape == (len(batch.query), HEADS, rank)
    assert_near(out, want)
    assert (lse is not None) is returns_lse
    if returns_lse:
        assert_near(lse, want_lse)


@pytest.mark.parametrize(
    ("q_lens", "axes"),
    [pytest.param((1, 1), 4, id="one token"), pytest.param((2, 1), 3, id="drafts")],
)
def test_the_parts_of_a_query_are_not_copied(
    dense: ModuleType, impl_of: ImplOf, monkeypatch: Patch, q_lens: tuple[int, ...], axes: int
) -> None:
    """A 16-bit query comes in two parts, which mlagen reads where vLLM has them."""
    calls = queries_of(dense, monkeypatch)
    batch = Batch(576, q_lens, (9, 20))
    q_pe = torch.zeros(sum(q_lens), HEADS, 192).bfloat16()[..., 128:]
    parts = (batch.query[..., :512].contiguous(), q_pe)

    impl_of(dense.MlagenMLAImpl).forward_mqa(parts, batch.cache, metadata_of(batch, dense), LAYER)

    ((latent, rope),) = calls
    assert latent.dim() == rope.dim() == axes
    assert [latent.data_ptr(), rope.data_ptr()] == [part.data_ptr() for part in parts]


@pytest.mark.parametrize("query_is_fp8", [False, True])
def test_an_fp8_cache_is_scaled(dense: ModuleType, impl_of: ImplOf, query_is_fp8: bool) -> None:
    """The scales of a layer apply to the operands that are e4m3, to the cache twice."""
    impl = impl_of(dense.MlagenMLAImpl, kv_cache_dtype="fp8")
    batch = Batch(576, (1, 1), (33, 2))
    cache = batch.cache.to(E4M3)
    query = batch.query.to(E4M3) if query_is_fp8 else batch.query
    given = query if query_is_fp8 else (query[..., :512], query[..., 512:])

    out, _ = impl.forward_mqa(given, cache, metadata_of(batch, dense), LAYER)

    scale = impl.scale * 0.25 * (0.5 if query_is_fp8 else 1.0)
    want, _ = batch.expected(query.float(), cache.float(), scale)
    assert_near(out, want * 0.25)


def test_a_captured_batch_is_replayed_with_other_query_lengths(
    dense: ModuleType, impl_of: ImplOf
) -> None:
    """The bound on query lengths makes a batch ragged, whatever lengths it has at capture."""
    impl = impl_of(dense.MlagenMLAImpl)
    batch = Batch(576, (1, 1), (9, 20))
    metadata = metadata_of(batch, dense, max_query_len=2)
    # As on replay: the first request has both tokens, the second is padding.
    metadata.decode.query_start_loc.copy_(torch.tensor([0, 2, 2]))
    batch.q_lens = (2, 0)

    out, _ = impl.forward_mqa(batch.query, batch.cache, metadata, LAYER)

    want, _ = batch.expected(batch.query, batch.cache, impl.scale)
    assert_near(out, want)


@pytest.mark.parametrize("q_lens", [(1, 1), (2, 3)], ids=["one token", "drafts"])
def test_ranks_of_dcp_merge_to_one_gpu(
    dense: ModuleType, impl_of: ImplOf, q_lens: tuple[int, ...]
) -> None:
    """Each rank's output and LSE are of its own tokens, so that vLLM's merge gives all of them."""
    batch = Batch(576, q_lens, (50, 3))
    want, want_lse = batch.expected(batch.query, batch.cache, 192**-0.5)
    tokens = [batch.cache[pages.long()].flatten(0, 1) for pages in batch.table]
    lengths = torch.tensor(batch.seq_lens).int()
    states = []
    for rank in range(2):
        impl = impl_of(dense.MlagenMLAImpl)
        impl.dcp_world_size, impl.dcp_rank, impl.need_to_return_lse_for_decode = 2, rank, True
        local = [rows[:n][rank::2] for rows, n in zip(tokens, batch.seq_lens, strict=True)]
        part = Batch(576, q_lens, tuple(len(rows) for rows in local))
        for pages, rows in zip(part.table, local, strict=True):
            padded = torch.zeros(4 * PAGE, 576).bfloat16()
            padded[: len(rows)] = rows
            part.cache[pages.long()] = padded.view(4, PAGE, 576)
        metadata = metadata_of(part, dense, dcp_tot_seq_lens_device=lengths)
        states.append(impl.forward_mqa(batch.query, part.cache, metadata, LAYER))

    assert impl.supports_dcp
    assert impl.lse_base_on_e
    lse = torch.stack([lse for _, lse in states]).double()
    weights = lse.softmax(0).unsqueeze(-1)
    assert_near(torch.logsumexp(lse, 0), want_lse)
    assert_near((torch.stack([out.double() for out, _ in states]) * weights).sum(0), want)


@pytest.mark.parametrize(("drafts", "is_refused"), [(0, False), (2, True)])
def test_drafts_need_tokens_that_alternate_between_dcp_ranks(
    dense: ModuleType, monkeypatch: Patch, drafts: int, is_refused: bool
) -> None:
    """Speculative tokens over DCP ranks that hold several tokens in turn fail at start-up."""
    base = dense.MLACommonMetadataBuilder

    def common(self: Any, *_: Any, **__: Any) -> None:
        self.dcp_world_size, self.cp_kv_cache_interleave_size = 2, 16
        self.reorder_batch_threshold = 1 + drafts

    monkeypatch.setattr(base, "__init__", common)
    monkeypatch.setattr(dense.MlagenMLAMetadataBuilder, "add_to_warm_up", lambda *_: None)
    message = "cp_kv_cache_interleave_size: expected 1"
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        spec = SimpleNamespace(block_size=64)
        dense.MlagenMLAMetadataBuilder(spec, ["layer"], None, torch.device("cpu"))


def common_metadata(vllm: Import, batch: Batch) -> Any:
    """Return a batch as vLLM's model runner describes it to every builder."""
    starts = torch.tensor([0, *batch.q_lens]).cumsum(0).int()
    seq_lens = torch.tensor(batch.seq_lens).int()
    return vllm("vllm.v1.attention.backend").CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=len(batch.q_lens),
        num_actual_tokens=sum(batch.q_lens),
        max_query_len=max(batch.q_lens),
        max_seq_len=max(batch.seq_lens),
        block_table_tensor=batch.table,
        slot_mapping=torch.zeros(sum(batch.q_lens)).long(),
        seq_lens_cpu_upper_bound=seq_lens,
    )


@pytest.mark.skipif(not is_installed("vllm"), reason="needs vLLM: make test-vllm")
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (3, 3, 3), (2, 1, 3)])
def test_a_built_batch_is_decoded(
    vllm: Import, dense: ModuleType, impl_of: ImplOf, q_lens: tuple[int, ...]
) -> None:
    """Requests with drafts, of equal numbers or not, are decodes of one batch, not prefills."""
    batch = Batch(576, q_lens, (40, 3, 64))
    builder = object.__new__(dense.MlagenMLAMetadataBuilder)
    builder.device, builder.dcp_world_size, builder.use_pcp = torch.device("cpu"), 1, False
    builder.metadata_cls, builder.reorder_batch_threshold = dense.MLACommonMetadata, 4
    builder.model_config = SimpleNamespace(get_head_size=lambda: 576)
    impl = impl_of(dense.MlagenMLAImpl)

    metadata = builder.build(0, common_metadata(vllm, batch))
    out, _ = impl.forward_mqa(batch.query, batch.cache, metadata, LAYER)

    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    want, _ = batch.expected(batch.query, batch.cache, impl.scale)
    assert_near(out, want)
