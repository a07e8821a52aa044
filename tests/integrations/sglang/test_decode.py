"""The decode kernel of the backend, called as SGLang's forward methods call it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import assert_near, attended

HEADS, PAGE, PAGES = 3, 32, 2
E4M3 = torch.float8_e4m3fn
LAYER = SimpleNamespace(scaling=192**-0.5, k_scale_float=0.5)


@pytest.fixture
def mla(sglang: Callable[[str], ModuleType]) -> ModuleType:
    """Return the module of the backend."""
    return sglang("mlagen.integrations.sglang.mla")


@pytest.fixture
def backend(mla: ModuleType, monkeypatch: Patch) -> Any:
    """Return a backend with what it knows of a model, on one GPU."""
    monkeypatch.setattr(mla, "get_parallel", lambda: SimpleNamespace(dcp_enabled=False))
    made = object.__new__(mla.MlagenMLABackend)
    made.data_type = torch.bfloat16
    made.kv_lora_rank, made.qk_nope_head_dim, made.qk_rope_head_dim = 512, 128, 64
    return made


def inputs(seq_lens: tuple[int, ...], q_len: int) -> dict[str, Any]:
    """Return the arguments of a batch, its pool of KV as SGLang views it."""
    generator = torch.Generator().manual_seed(5)
    shape = (len(seq_lens), q_len, HEADS, 576)
    pool = torch.randn(len(seq_lens) * PAGES, 1, PAGE, 576, generator=generator)
    table = torch.randperm(len(pool), generator=generator).view(len(seq_lens), PAGES)
    return {
        "query": torch.randn(shape, generator=generator).bfloat16(),
        "kv_cache": pool.bfloat16(),
        "block_tables": table.int(),
        "seq_lens": torch.tensor(seq_lens),
        "max_seq_len": max(seq_lens),
        "layer": LAYER,
    }


def expected(call: dict[str, Any], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and natural LSEs of all query tokens."""
    results = []
    for query, pages, seq_len in zip(
        call["query"].double(), call["block_tables"].long(), call["seq_lens"], strict=True
    ):
        rows = call["kv_cache"].double()[pages, 0].flatten(0, 1)
        for i, token in enumerate(query):
            seen = rows[: max(int(seq_len) - len(query) + i + 1, 0)]
            results.append(attended(token, seen, scale, 512))
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
def test_the_decode_kernel_is_attention(backend: Any, q_len: int, cache: torch.dtype) -> None:
    """Decode steps and the verification of drafts see each token's causal prefix."""
    backend.data_type = cache
    call = inputs((61, 3), q_len)
    call |= {name: call[name].to(cache) for name in ("query", "kv_cache")}

    out = backend._run_decode_kernel(**call)

    want, _ = expected(call, LAYER.scaling * (0.5 if cache == E4M3 else 1.0))
    assert out.shape == (2, q_len, HEADS, 512)
    assert_near(out.view(-1, HEADS, 512), want)


def test_the_lse_of_a_dcp_rank_has_base_2(
    backend: Any, mla: ModuleType, monkeypatch: Patch
) -> None:
    """SGLang merges ranks by base-2 LSEs where it does not know the name of the backend."""
    monkeypatch.setattr(mla, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
    call = inputs((61, 0), 1)

    out, lse = backend._run_decode_kernel(**call, return_lse=True)

    want, want_lse = expected(call, LAYER.scaling)
    assert_near(out.view(-1, HEADS, 512), want)
    assert_near(lse.view(-1, HEADS), want_lse / torch.tensor(2.0).log())


def test_drafts_on_a_dcp_rank_name_the_tokens_of_all_ranks(
    backend: Any, mla: ModuleType, monkeypatch: Patch
) -> None:
    """The causal mask of several query tokens is by the rank and by the lengths on all ranks."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(mla, "decode", lambda *_, **keywords: calls.append(keywords))

    backend._run_decode_kernel(
        **inputs((61, 3), 2),
        causal_seqs=torch.tensor([244, 12]),
        cp_world=4,
        cp_rank=3,
        return_lse=True,
    )

    (keywords,) = calls
    assert keywords["causal_seqlens_kv_global"].tolist() == [244, 12]
    assert keywords["causal_seqlens_kv_global"].dtype == torch.int32
    assert (keywords["enable_dcp"], keywords["cp_world"], keywords["cp_rank"]) == (True, 4, 3)
    assert (keywords["return_lse"], keywords["return_lse_base"]) == (True, "base2")


def test_drafts_on_a_dcp_rank_without_global_lengths_are_refused(
    backend: Any, mla: ModuleType, monkeypatch: Patch
) -> None:
    """A causal mask by the lengths of one rank would be wrong, so there is no result."""
    monkeypatch.setattr(mla, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
    with pytest.raises(NotImplementedError, match="causal_seqs"):
        backend._run_decode_kernel(**inputs((61, 3), 2), return_lse=True)
