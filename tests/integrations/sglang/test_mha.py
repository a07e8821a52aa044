"""The decode kernel of ``mlagen_mha``, called as SGLang's forward methods call it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.attended import E4M3, PAGE, assert_near, gqa_attended
from tests.integrations.sglang.conftest import layer, runner

HEADS, KV_HEADS, DIM, SLOTS = 8, 2, 64, 160
SCALE = 0.1  # of the layer
NO_NVFP4 = dict.fromkeys(
    ("decode_uses_native_fp4", "is_nvfp4_kvcache", "uses_trtllm_gen_native_fp4"), False
) | {"_swa_kv_pool": None, "use_fmha_v2": True, "decode_seq_len_splits": 1}
SEQ_LENS = (61, 3, 40)


@pytest.mark.parametrize("cache", [torch.bfloat16, E4M3])
@pytest.mark.parametrize(
    ("q_len", "window", "sinks", "cap"),
    [
        pytest.param(1, -1, None, 0.0, id="decode"),
        pytest.param(1, 7, torch.bfloat16, 0.0, id="window and sinks"),
        pytest.param(1, -1, torch.float32, 0.0, id="sinks"),
        pytest.param(3, -1, None, 0.0, id="verification"),
        pytest.param(1, 7, None, 2.0, id="soft cap"),
        pytest.param(3, 7, torch.bfloat16, 2.0, id="all"),
    ],
)
def test_a_step_is_attention(
    *,
    mha: ModuleType,
    cache: torch.dtype,
    q_len: int,
    window: int,
    sinks: torch.dtype | None,
    cap: float,
) -> None:
    """Steps and the verification of drafts see each token's causal prefix, or its window."""
    generator = torch.Generator().manual_seed(5)
    attention = layer(HEADS, DIM, KV_HEADS, sliding_window_size=window, logit_cap=cap)
    slots = [torch.randn(2 * SLOTS, KV_HEADS, DIM, generator=generator) for _ in range(2)]
    keys, values = (each.to(cache) for each in slots)
    table = torch.randperm(2 * SLOTS // PAGE, generator=generator)[:12].view(3, 4).int()
    query = torch.randn(3 * q_len, HEADS, DIM, generator=generator).bfloat16()
    logits = None if sinks is None else torch.randn(HEADS, generator=generator).to(sinks)
    metadata: dict[str, Any] = {"page_table": table}
    metadata |= {"cache_seqlens_int32": torch.tensor(SEQ_LENS).int()}
    metadata |= {"max_seq_len_q": q_len, "is_ragged_verify": False, "swa_page_table": None}
    backend = mha.MlagenMHABackend(runner(use_mla_backend=False, page_size=PAGE))
    vars(backend).update(
        NO_NVFP4,
        data_type=cache,
        forward_metadata=SimpleNamespace(**metadata),
        token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda _: (keys, values)),
        # SGLang has a mask of drafts where XQA decodes; it sets more bits than are drafts.
        _xqa_spec_dec_mask=torch.full((4, q_len, 2), 0xFFFF, dtype=torch.uint16),
    )
    mode = {"is_target_verify": q_len > 1, "is_draft_extend_v2": False}
    mode |= {"is_context_parallel_extend": False}
    facts = {name: (lambda value=value: value) for name, value in mode.items()}
    batch = SimpleNamespace(forward_mode=SimpleNamespace(**facts))

    forward = backend.forward_extend if q_len > 1 else backend.forward_decode
    out = forward(query.flatten(1), None, None, attention, batch, sinks=logits)

    assert out.dtype == torch.bfloat16
    out = out.view(-1, HEADS, DIM)
    for i, seq_len in enumerate(SEQ_LENS):
        own_keys, own_values = [
            part.view(-1, PAGE, KV_HEADS, DIM)[table[i].long()].flatten(0, 1)[:seq_len]
            for part in (keys.float(), values.float())
        ]
        own = query[i * q_len : (i + 1) * q_len]
        want = gqa_attended(own, own_keys, own_values, SCALE, window, logits, cap)
        assert_near(out[i * q_len : (i + 1) * q_len], want)


def test_the_query_stays_in_16_bits_on_any_gpu(mha: ModuleType) -> None:
    """SGLang's constructor says by the GPU whether the query is converted to FP8, and cannot."""
    backend = mha.MlagenMHABackend(runner(use_mla_backend=False))
    backend.is_xqa_impl = False
    assert backend.is_xqa_impl


def test_an_output_is_written_in_place(mha: ModuleType, monkeypatch: Patch) -> None:
    """Where SGLang passes an output."""
    given: list[Any] = []
    result = torch.zeros(2)

    def spy(*inputs: Any, **_: Any) -> torch.Tensor:
        given.append(inputs[9])
        return result

    monkeypatch.setattr(mha, "decode", spy)
    backend = mha.MlagenMHABackend(runner(use_mla_backend=False))
    scales = {"bmm1_scale": 1.0, "bmm2_scale": 1.0, "window_left": -1, "sinks": None}
    out = torch.zeros(1, dtype=torch.float16)

    for each in (None, out):
        backend._run_fixed_q_len_decode(torch.zeros(1), None, None, None, **scales, out=each)

    assert given == [None, out]
