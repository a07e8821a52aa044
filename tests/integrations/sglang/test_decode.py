"""The decode kernel of the backend, called as SGLang's forward methods call it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import E4M3, HEADS, Batch, assert_near
from tests.integrations.sglang.conftest import runner

LAYER = SimpleNamespace(scaling=192**-0.5, k_scale_float=0.5)


def arguments_of(batch: Batch, cache: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the arguments of a batch, its pool of KV as SGLang views it."""
    query = batch.query.view(len(batch.q_lens), -1, *batch.query.shape[1:])
    return {
        "query": query.to(cache),
        "kv_cache": batch.cache.unsqueeze(1).to(cache),
        "block_tables": batch.table,
        "seq_lens": torch.tensor(batch.seq_lens),
        "max_seq_len": max(batch.seq_lens),
        "layer": LAYER,
    }


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_the_decode_kernel_is_attention(mla: ModuleType, q_len: int, cache: torch.dtype) -> None:
    """Decode steps and the verification of drafts see each token's causal prefix."""
    batch = Batch(576, (q_len,) * 2, (61, 3))
    backend = mla.MlagenMLABackend(runner(data_type=cache))

    out = backend._run_decode_kernel(**arguments_of(batch, cache))

    scale = LAYER.scaling * (0.5 if cache == E4M3 else 1.0)
    want, _ = batch.expected(batch.query.to(cache), batch.cache.to(cache), scale)
    assert out.shape == (2, q_len, HEADS, 512)
    assert_near(out.view(-1, HEADS, 512), want)


def test_the_lse_of_a_dcp_rank_has_base_2(mla: ModuleType, monkeypatch: Patch) -> None:
    """SGLang merges ranks by base-2 LSEs where it does not know the name of the backend."""
    monkeypatch.setattr(mla, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
    batch = Batch(576, (1, 1), (61, 0))
    backend = mla.MlagenMLABackend(runner())

    out, lse = backend._run_decode_kernel(**arguments_of(batch), return_lse=True)

    want, want_lse = batch.expected(batch.query, batch.cache, LAYER.scaling)
    assert_near(out.view(-1, HEADS, 512), want)
    assert_near(lse.view(-1, HEADS), want_lse / torch.tensor(2.0).log())


def test_drafts_on_a_dcp_rank_name_the_tokens_of_all_ranks(
    mla: ModuleType, monkeypatch: Patch
) -> None:
    """The causal mask of several query tokens is by the rank and by the lengths on all ranks."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(mla, "decode", lambda *_, **keywords: calls.append(keywords))
    ranks = {"causal_seqs": torch.tensor([244, 12]), "cp_world": 4, "cp_rank": 3}
    call = arguments_of(Batch(576, (2, 2), (61, 3))) | ranks

    mla.MlagenMLABackend(runner())._run_decode_kernel(**call, return_lse=True)

    (keywords,) = calls
    assert keywords["causal_seqlens_kv_global"].tolist() == [244, 12]
    assert keywords["causal_seqlens_kv_global"].dtype == torch.int32
    assert (keywords["enable_dcp"], keywords["cp_world"], keywords["cp_rank"]) == (True, 4, 3)
    assert (keywords["return_lse"], keywords["return_lse_base"]) == (True, "base2")


def test_drafts_on_a_dcp_rank_without_global_lengths_are_refused(
    mla: ModuleType, monkeypatch: Patch
) -> None:
    """A causal mask by the lengths of one rank would be wrong, so there is no result."""
    monkeypatch.setattr(mla, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
    call = arguments_of(Batch(576, (2, 2), (61, 3)))
    with pytest.raises(NotImplementedError, match="causal_seqs"):
        mla.MlagenMLABackend(runner())._run_decode_kernel(**call, return_lse=True)
