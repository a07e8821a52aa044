"""The GQA backend: vLLM's FlashInfer implementation with mlagen's decode in the place of XQA."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import assert_near
from tests.integrations.servers import Import, is_installed

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 2, 64, 16, 4
SEQ_LENS = (33, 2)


@pytest.fixture
def gqa(vllm: Import) -> ModuleType:
    """Return the module of the GQA backend."""
    if is_installed("vllm"):
        pytest.importorskip("flashinfer", reason="vLLM's FlashInfer backend needs flashinfer")
    return vllm("mlagen.integrations.vllm.gqa")


@pytest.fixture
def impl(gqa: ModuleType, monkeypatch: Patch) -> Any:
    """Return an implementation, with what vLLM sets at start-up on Hopper."""
    flashinfer = gqa.vllm_flashinfer
    space = torch.empty(1 << 20, dtype=torch.uint8)
    monkeypatch.setattr(flashinfer, "_get_trtllm_workspace_buffer", lambda: space, raising=False)
    made = object.__new__(gqa.MlagenGQAImpl)
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM}
    unset = dict.fromkeys(("bmm1_scale", "bmm2_scale", "o_sf_scale", "logits_soft_cap", "sinks"))
    others = {"window_left": -1, "dcp_world_size": 1, "scale": HEAD_DIM**-0.5}
    cache = {"kv_cache_dtype": "auto", "is_kvcache_nvfp4": False}
    vars(made).update(sizes | unset | others | cache)
    return made


def batch(gqa: ModuleType, q_len: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return query, cache and metadata of a decode batch, as vLLM's builder makes them."""
    generator = torch.Generator().manual_seed(11)
    flashinfer = gqa.vllm_flashinfer
    layout = import_module("vllm.v1.kv_cache_interface").KVCacheLayout.LBHNC
    tokens = len(SEQ_LENS) * q_len
    query = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).bfloat16()
    cache = torch.randn(len(SEQ_LENS) * PAGES, KV_HEADS, PAGE, 2 * HEAD_DIM, generator=generator)
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


@pytest.mark.parametrize("q_len", [1, 2])
def test_the_xqa_call_of_vllm_is_served(gqa: ModuleType, impl: Any, q_len: int) -> None:
    """Each query token attends to its causal prefix, where XQA itself has no GPU to run on."""
    query, cache, metadata = batch(gqa, q_len)
    out = torch.full_like(query, torch.nan)
    layer = SimpleNamespace(_q_scale=None, _q_scale_float=1.0, _k_scale_float=1.0)

    impl.forward(layer, query, None, None, cache, metadata, out)

    keys, values = cache.double().chunk(2, dim=-1)
    for token, seq_len in enumerate(n for n in SEQ_LENS for _ in range(q_len)):
        request, seen = token // q_len, seq_len - q_len + token % q_len + 1
        pages = slice(request * PAGES, (request + 1) * PAGES)
        heads = [
            kv[pages].transpose(1, 2).flatten(0, 1)[:seen].repeat_interleave(HEADS // KV_HEADS, 1)
            for kv in (keys, values)
        ]
        scores = torch.einsum("hd,nhd->hn", query[token].double(), heads[0]) * HEAD_DIM**-0.5
        assert_near(out[token], torch.einsum("hn,nhd->hd", scores.softmax(-1), heads[1]))


def test_another_backend_keeps_its_xqa(gqa: ModuleType, impl: Any, monkeypatch: Patch) -> None:
    """Only calls of this backend reach mlagen, also after one of them has failed."""
    flashinfer = gqa.vllm_flashinfer
    xqa = flashinfer.flashinfer_xqa_batch_decode_with_kv_cache
    seen: list[Any] = []

    def fail(*_: Any, **__: Any) -> None:
        seen.append(flashinfer.flashinfer_xqa_batch_decode_with_kv_cache)
        raise RuntimeError("failed")

    monkeypatch.setattr(flashinfer.FlashInferImpl, "forward", fail)
    with pytest.raises(RuntimeError, match="failed"):
        impl.forward()

    assert seen == [gqa.xqa_batch_decode_with_kv_cache]
    assert flashinfer.flashinfer_xqa_batch_decode_with_kv_cache is xqa


def test_the_implementation_is_of_that_backend(gqa: ModuleType) -> None:
    """VLLM builds layers of this class, and still finds FlashInfer's in it."""
    assert gqa.MlagenGQABackend.get_impl_cls() is gqa.MlagenGQAImpl
    assert issubclass(gqa.MlagenGQAImpl, gqa.vllm_flashinfer.FlashInferImpl)
