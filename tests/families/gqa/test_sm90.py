"""Kernel choice of grouped-query calls, and parameters of the sm90 kernel; needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.errors import DriverError, UnsupportedError
from mlagen.families.gqa import launch_sm90 as gqa_sm90_launcher
from mlagen.families.gqa import select as gqa_plan
from mlagen.families.gqa import tensor_maps as gqa_maps
from mlagen.families.gqa.launch_sm80 import GqaSm80Launcher
from mlagen.families.gqa.launch_sm90 import GqaSm90Launcher
from mlagen.families.gqa.tensor_maps import GqaCacheMaps, GqaTensorMapLayout
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from tests.families.gqa_launches import args_of, launches_of, xqa_args_of
from tests.families.launches import SEMAPHORES, map_of, scratch_of
from tests.kernels import gqa_sm90
from tests.problems.gqa import GqaCase
from tests.problems.problem import E4M3

UNIFORM = GqaCase(name="", seq_lens=(70, 3), q_len=2, mask="random", sink=3.0, window=50)

SUPPORTED = {
    "bf16": UNIFORM,
    "fp16": replace(UNIFORM, dtype=torch.float16),
    "e4m3": replace(UNIFORM, kv="e4m3", out_dtype=E4M3),
    "ragged": GqaCase(name="", seq_lens=(70, 3), q_lens=(1, 4)),
    "strided": GqaCase(name="", seq_lens=(70, 3), cache_layout="strided", layout="HND"),
    "head dim 256": GqaCase(name="", seq_lens=(70, 3), head_dim=256),
    "pages of 48": GqaCase(name="", seq_lens=(70, 3), page_size=48),
}
UNSUPPORTED = {
    "int8": replace(UNIFORM, kv="int8"),
    "nvfp4": replace(UNIFORM, kv="nvfp4"),
    "head dim 96": replace(UNIFORM, head_dim=96),
    "pages of 8": replace(UNIFORM, page_size=8),
}


@pytest.mark.parametrize("case", SUPPORTED.values(), ids=SUPPORTED)
@pytest.mark.parametrize("kernel", ["auto", "sm80", "sm90"])
def test_calls_that_both_kernels_support_use_the_requested_one(
    case: GqaCase, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request the sm90 kernel is used."""
    call, _, launches = launches_of(
        args_of(case, monkeypatch, workspace_buffer=large_workspace()), monkeypatch, kernel
    )

    assert isinstance(call, GqaSm80Launcher if kernel == "sm80" else GqaSm90Launcher)
    assert launches[0].family == ("gqa_sm80" if kernel == "sm80" else "gqa_sm90")


@pytest.mark.parametrize("case", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_calls_use_the_sm80_kernel(
    case: GqaCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that the sm90 kernel does not support are rejected only if the settings force it."""
    inputs = args_of(case, monkeypatch, workspace_buffer=large_workspace())

    call, _, _ = launches_of(inputs, monkeypatch, "auto")
    with pytest.raises(UnsupportedError) as caught:
        launches_of(inputs, monkeypatch, "sm90")

    assert isinstance(call, GqaSm80Launcher)
    variant = call.problem.variant
    assert str(caught.value) == (
        f"MLAGEN_GQA_KERNEL=sm90: no such kernel for sm_90a, query {variant.query_dtype}, "
        f"cache {variant.kv_dtype}, head_dim {variant.head_dim}, page_size {variant.page_size}; "
        f"covered: sm_90a, cache as the query or e4m3, head_dim 64, 128, 256, page_size a "
        f"multiple of 16, strides of the cache below 2^40 bytes"
    )


def test_a_cache_whose_tensor_map_fails_uses_the_sm80_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the settings force the sm90 kernel, the message has the driver's error."""

    def reject(*_: object) -> bytes:
        raise DriverError("cuTensorMapEncodeTiled failed: X", symbol="cuTensorMapEncodeTiled")

    inputs = args_of(UNIFORM, monkeypatch, workspace_buffer=large_workspace())
    with monkeypatch.context() as patches:
        patches.setattr("tests.families.launches.map_of", reject)
        call, _, _ = launches_of(inputs, monkeypatch, "auto")
        with pytest.raises(UnsupportedError, match=r"^MLAGEN_GQA_KERNEL=sm90: cuTensorMapEnc"):
            launches_of(inputs, monkeypatch, "sm90")

    assert isinstance(call, GqaSm80Launcher)


def test_a_schedule_beyond_32_bits_uses_the_sm80_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A schedule beyond 32 bits is never launched on the sm90 kernel."""
    inputs = args_of(UNIFORM, monkeypatch, workspace_buffer=large_workspace())
    monkeypatch.setattr(gqa_sm90_launcher, "fits_in_int32", lambda *_: False)

    call, _, _ = launches_of(inputs, monkeypatch, "auto")
    with pytest.raises(
        UnsupportedError, match=r"expected fewer than 2\^31 KV blocks of 128 tokens"
    ):
        launches_of(inputs, monkeypatch, "sm90")

    assert isinstance(call, GqaSm80Launcher)


def test_a_cta_takes_one_head_if_tiles_of_several_heads_exceed_32_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One head per CTA makes larger KV tiles, so that their number fits in 32 bits."""
    case = replace(UNIFORM, kv="e4m3", page_size=64)
    monkeypatch.setattr(gqa_plan, "choose_heads_per_cta", lambda *_: 2)
    gqa_plan.plan_gqa_sm90_call.cache_clear()
    heads = []
    for fits in (True, False):
        inputs = args_of(case, monkeypatch, workspace_buffer=large_workspace())
        can_count = {2: fits, 1: True}
        monkeypatch.setattr(
            gqa_sm90_launcher,
            "fits_in_int32",
            lambda spec, *_, of=can_count: of[spec.heads_per_cta],
        )
        call, _, _ = launches_of(inputs, monkeypatch, "auto")
        assert isinstance(call, GqaSm90Launcher)
        spec = call.decode.spec
        assert isinstance(spec, GqaSm90Spec)
        heads.append(spec.heads_per_cta)
    gqa_plan.plan_gqa_sm90_call.cache_clear()

    assert heads == [2, 1]


def test_a_call_launches_one_kernel_with_all_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pointers, strides, sizes and scales are those of the arguments."""
    scale = torch.tensor(2.0)
    case = replace(UNIFORM, page_size=64)
    inputs = args_of(
        case, monkeypatch, bmm1_scale=0.25, bmm2_scale=scale, workspace_buffer=large_workspace()
    )

    call, out, launches = launches_of(inputs, monkeypatch, "sm90")

    ((family, blocks, enable_pdl, values),) = launches
    assert isinstance(call, GqaSm90Launcher)
    spec = call.decode.spec
    assert isinstance(spec, GqaSm90Spec)
    assert inputs.mask is not None
    assert inputs.sinks is not None
    assert inputs.value_cache is not None
    # Two requests, each with a CTA group of two KV heads.
    assert (family, blocks, enable_pdl) == ("gqa_sm90", 2 * 2, True)
    scratch = scratch_of(inputs.workspace_buffer, 2 * 4 * 8 * (128 * 4 + 8))
    strides = (64 * 2 * 128 * 2, 2 * 128 * 2, 128 * 2)
    pages = len(inputs.key_cache)
    signature = GqaTensorMapLayout(
        spec=spec, num_pages=pages, kv_heads=2, key_strides=strides, value_strides=strides
    )
    maps = GqaCacheMaps(signature)[inputs.key_cache.data_ptr(), inputs.value_cache.data_ptr()]
    expected: dict[str, Any] = {
        "key_map": maps[:128],
        "value_map": maps[128:],
        "query": inputs.query.data_ptr(),
        "value_cache": inputs.value_cache.data_ptr(),
        "block_tables": inputs.block_tables.data_ptr(),
        "seq_lens": inputs.seq_lens.data_ptr(),
        "cu_seqlens_q": 0,
        "kv_indptr": 0,
        "draft_mask": inputs.mask.data_ptr(),
        "bmm1_scale_tensor": 0,
        "bmm2_scale_tensor": scale.data_ptr(),
        "sinks": inputs.sinks.data_ptr(),
        "out": out.data_ptr(),
        "lse": 0,
        "partial_out": scratch,
        "partial_states": scratch + 2 * 4 * 8 * 128 * 4,
        "semaphores": inputs.workspace_buffer.data_ptr() + SEMAPHORES,
        "query_stride": 8 * 128,
        "query_head_stride": 128,
        "value_page_stride": strides[0],
        "value_token_stride": strides[1],
        "value_head_stride": strides[2],
        "tokens": 4,
        "num_seqs": 2,
        "kv_heads": 2,
        "group_size": 4,
        "q_len": 2,
        "row_tiles": 1,
        "num_tiles": 1,
        "num_cta_groups": 2,
        "cta_group_size": 2,
        "mask_words": 1,
        "window": 50,
        "max_pages": inputs.block_tables.shape[1],
        "max_tokens": inputs.block_tables.shape[1] * 64,
        "block_tables_stride": inputs.block_tables.stride(0),
        "num_pages": pages,
        "is_causal": 1,
        "bmm2_scales_scores": 0,
        "bmm1_scale": 0.25,
        "bmm2_scale": 0.0,
        "score_factor": 1.0,
        "lse_factor": 1.0,
        "output_factor": 1.0,
    }
    assert values == expected


def test_ragged_queries_have_offsets_and_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ragged call passes q_len 0 and the pointer of the offsets."""
    case = SUPPORTED["ragged"]
    inputs = args_of(case, monkeypatch, workspace_buffer=large_workspace())

    _, _, launches = launches_of(inputs, monkeypatch, "sm90")

    values = launches[0].values
    assert inputs.cum_seq_lens_q is not None
    assert values["cu_seqlens_q"] == inputs.cum_seq_lens_q.data_ptr()
    assert (values["q_len"], values["row_tiles"], values["tokens"]) == (0, 0, 5)


def test_xqa_has_its_own_score_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """``xqa`` multiplies the scores by 1 / sqrt(head_dim) and kv_scale."""
    case = GqaCase(name="", seq_lens=(70, 3), kv="e4m3")
    inputs = xqa_args_of(case, monkeypatch, workspace_buffer=large_workspace())

    _, _, launches = launches_of(inputs, monkeypatch, "sm90")

    assert launches[0].values["bmm2_scales_scores"] == 1
    assert launches[0].values["score_factor"] == pytest.approx(128**-0.5, rel=2**-24)


@pytest.mark.parametrize(
    ("spec", "sizes", "box"),
    [
        (gqa_sm90(), (64, 64, 2), (64, 64, 2)),
        (gqa_sm90(head_dim=64, page_size=16), (64, 16, 1), (64, 16, 1)),
        (gqa_sm90(head_dim=256, page_size=256), (64, 256, 4), (64, 128, 4)),
        (gqa_sm90(kv_dtype=DType.E4M3), (128, 64, 1), (128, 64, 1)),
        (gqa_sm90(kv_dtype=DType.E4M3, head_dim=64, page_size=512), (64, 512, 1), (64, 256, 1)),
    ],
    ids=["bf16", "d64", "d256", "e4m3", "e4m3 d64"],
)
def test_tensor_maps_have_columns_of_128_bytes(
    spec: GqaSm90Spec,
    sizes: tuple[int, ...],
    box: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The maps divide tokens into columns of 128 bytes, or of 64 for smaller tokens."""
    encoded: list[tuple[TiledTensor, int]] = []

    def encode(tensor: TiledTensor, address: int) -> bytes:
        encoded.append((tensor, address))
        return map_of(tensor, address)

    monkeypatch.setattr(gqa_maps, "encode", encode)
    signature = GqaTensorMapLayout(
        spec=spec, num_pages=9, kv_heads=1, key_strides=(800, 80, 7), value_strides=(900, 90, 7)
    )
    maps = GqaCacheMaps(signature)

    packed_maps = maps[1 << 20, 1 << 30]

    assert packed_maps is maps[1 << 20, 1 << 30]
    assert len(packed_maps) == 256
    assert [address for _, address in encoded] == [1 << 20, 1 << 30]
    for (tensor, _), (page, token) in zip(encoded, ((800, 80), (900, 90)), strict=True):
        assert tensor.dtype is spec.variant.kv_dtype
        assert tensor.sizes == (*sizes, 1, 9)
        assert tensor.box == (*box, 1, 1)
        # The stride of a single head is arbitrary.
        assert tensor.strides == (token, spec.line_bytes, spec.row_bytes, page)


def large_workspace() -> torch.Tensor:
    """Return a workspace of sufficient size."""
    return torch.empty(1 << 22, dtype=torch.uint8)
