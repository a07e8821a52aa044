"""Which kernel a grouped-query call takes, and what the Hopper one is handed; without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.api import gqa_maps, gqa_plan
from mlagen.api import gqa_sm90_launcher as gqa_sm90_calls
from mlagen.api.gqa_maps import GqaCacheMaps, GqaTensorMapLayout
from mlagen.api.gqa_sm80_launcher import GqaSm80Launcher
from mlagen.api.gqa_sm90_launcher import GqaSm90Launcher
from mlagen.errors import DriverError, UnsupportedError
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.spec.dtype import DType
from mlagen.spec.gqa_sm90 import GqaSm90Spec
from tests.api.gqa_launches import args_of, launches_of, xqa_inputs_of
from tests.api.launches import COUNTERS, map_of, scratch_of
from tests.gqa_problems import E4M3, GqaCase
from tests.kernels import gqa_sm90

UNIFORM = GqaCase(name="", seq_lens=(70, 3), q_len=2, mask="random", sink=3.0, window=50)

COVERED_BY_IT = {
    "bf16": UNIFORM,
    "fp16": replace(UNIFORM, dtype=torch.float16),
    "e4m3": replace(UNIFORM, kv="e4m3", out_dtype=E4M3),
    "ragged": GqaCase(name="", seq_lens=(70, 3), q_lens=(1, 4)),
    "strided": GqaCase(name="", seq_lens=(70, 3), form="strided", layout="HND"),
    "head dim 256": GqaCase(name="", seq_lens=(70, 3), head_dim=256),
    "pages of 48": GqaCase(name="", seq_lens=(70, 3), page_size=48),
}
NOT_COVERED = {
    "int8": replace(UNIFORM, kv="int8"),
    "nvfp4": replace(UNIFORM, kv="nvfp4"),
    "head dim 96": replace(UNIFORM, head_dim=96),
    "pages of 8": replace(UNIFORM, page_size=8),
}


@pytest.mark.parametrize("case", COVERED_BY_IT.values(), ids=COVERED_BY_IT)
@pytest.mark.parametrize("kernel", ["auto", "sm80", "sm90"])
def test_what_both_kernels_cover_takes_the_one_that_is_asked_for(
    case: GqaCase, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it takes the sm90 kernel."""
    call, _, launches = launches_of(
        args_of(case, monkeypatch, workspace_buffer=room()), monkeypatch, kernel
    )

    assert isinstance(call, GqaSm80Launcher if kernel == "sm80" else GqaSm90Launcher)
    assert launches[0].family == ("gqa_sm80" if kernel == "sm80" else "gqa_sm90")


@pytest.mark.parametrize("case", NOT_COVERED.values(), ids=NOT_COVERED)
def test_what_the_kernel_does_not_cover_takes_the_other(
    case: GqaCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself; asked for by name it is rejected, before anything is launched."""
    inputs = args_of(case, monkeypatch, workspace_buffer=room())

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


def test_a_cache_that_the_driver_makes_no_map_of_takes_the_portable_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked for by name, the sm90 kernel says what the driver said."""

    def reject(*_: object) -> bytes:
        raise DriverError("cuTensorMapEncodeTiled failed: X", symbol="cuTensorMapEncodeTiled")

    inputs = args_of(UNIFORM, monkeypatch, workspace_buffer=room())
    with monkeypatch.context() as patches:
        patches.setattr("tests.api.launches.map_of", reject)
        call, _, _ = launches_of(inputs, monkeypatch, "auto")
        with pytest.raises(UnsupportedError, match=r"^MLAGEN_GQA_KERNEL=sm90: cuTensorMapEnc"):
            launches_of(inputs, monkeypatch, "sm90")

    assert isinstance(call, GqaSm80Launcher)


def test_more_work_than_blocks_can_count_takes_the_portable_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table that wide is asked for by nobody, but none must be computed wrong."""
    inputs = args_of(UNIFORM, monkeypatch, workspace_buffer=room())
    monkeypatch.setattr(gqa_sm90_calls, "fits_in_int32", lambda *_: False)

    call, _, _ = launches_of(inputs, monkeypatch, "auto")
    with pytest.raises(UnsupportedError, match=r"expected fewer than 2\^32 tiles of 128 tokens"):
        launches_of(inputs, monkeypatch, "sm90")

    assert isinstance(call, GqaSm80Launcher)


def test_where_tiles_of_several_heads_are_too_many_a_block_takes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their tiles have fewer tokens, so that there are more of them to count."""
    case = replace(UNIFORM, kv="e4m3", page_size=64)
    monkeypatch.setattr(gqa_plan, "heads_of_block", lambda *_: 2)
    gqa_plan.plan_gqa_sm90_call.cache_clear()
    heads = []
    for fits in (True, False):
        inputs = args_of(case, monkeypatch, workspace_buffer=room())
        can_count = {2: fits, 1: True}
        monkeypatch.setattr(
            gqa_sm90_calls, "fits_in_int32", lambda spec, *_, of=can_count: of[spec.heads_per_cta]
        )
        call, _, _ = launches_of(inputs, monkeypatch, "auto")
        assert isinstance(call, GqaSm90Launcher)
        spec = call.decode.spec
        assert isinstance(spec, GqaSm90Spec)
        heads.append(spec.heads_per_cta)
    gqa_plan.plan_gqa_sm90_call.cache_clear()

    assert heads == [2, 1]


def test_a_call_launches_one_kernel_with_every_value_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pointers, strides, counts and scales are those of the arguments."""
    scale = torch.tensor(2.0)
    case = replace(UNIFORM, page_size=64)
    inputs = args_of(case, monkeypatch, bmm1_scale=0.25, bmm2_scale=scale, workspace_buffer=room())

    call, out, launches = launches_of(inputs, monkeypatch, "sm90")

    ((family, blocks, enable_pdl, values),) = launches
    assert isinstance(call, GqaSm90Launcher)
    spec = call.decode.spec
    assert isinstance(spec, GqaSm90Spec)
    assert inputs.mask is not None
    assert inputs.sinks is not None
    assert inputs.value_cache is not None
    # Two requests, each by a team of two kv heads.
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
        "draft_mask": inputs.mask.data_ptr(),
        "bmm1_scale_tensor": 0,
        "bmm2_scale_tensor": scale.data_ptr(),
        "sinks": inputs.sinks.data_ptr(),
        "out": out.data_ptr(),
        "partial_out": scratch,
        "partial_rows": scratch + 2 * 4 * 8 * 128 * 4,
        "semaphores": inputs.workspace_buffer.data_ptr() + COUNTERS,
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
        "scores_take_bmm2": 0,
        "bmm1_scale": 0.25,
        "bmm2_scale": 0.0,
        "score_factor": 1.0,
        "output_factor": 1.0,
    }
    assert values == expected


def test_ragged_queries_have_no_length_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks read where each begins."""
    case = COVERED_BY_IT["ragged"]
    inputs = args_of(case, monkeypatch, workspace_buffer=room())

    _, _, launches = launches_of(inputs, monkeypatch, "sm90")

    values = launches[0].values
    assert inputs.cum_seq_lens_q is not None
    assert values["cu_seqlens_q"] == inputs.cum_seq_lens_q.data_ptr()
    assert (values["q_len"], values["row_tiles"], values["tokens"]) == (0, 0, 5)


def test_xqa_scales_as_it_always_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors are the same for either kernel."""
    case = GqaCase(name="", seq_lens=(70, 3), kv="e4m3")
    inputs = xqa_inputs_of(case, monkeypatch, workspace_buffer=room())

    _, _, launches = launches_of(inputs, monkeypatch, "sm90")

    assert launches[0].values["scores_take_bmm2"] == 1
    assert launches[0].values["score_factor"] == 128**-0.5


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
def test_maps_are_of_lines(
    spec: GqaSm90Spec,
    sizes: tuple[int, ...],
    box: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values are cut into lines of 128 bytes, or 64 where a token has no more."""
    asked: list[tuple[TiledTensor, int]] = []

    def encode(tensor: TiledTensor, address: int) -> bytes:
        asked.append((tensor, address))
        return map_of(tensor, address)

    monkeypatch.setattr(gqa_maps, "encode", encode)
    signature = GqaTensorMapLayout(
        spec=spec, num_pages=9, kv_heads=1, key_strides=(800, 80, 7), value_strides=(900, 90, 7)
    )
    maps = GqaCacheMaps(signature)

    packed = maps[1 << 20, 1 << 30]

    assert packed is maps[1 << 20, 1 << 30]
    assert len(packed) == 256
    assert [address for _, address in asked] == [1 << 20, 1 << 30]
    for (tensor, _), (page, token) in zip(asked, ((800, 80), (900, 90)), strict=True):
        assert tensor.dtype is spec.variant.kv_dtype
        assert tensor.sizes == (*sizes, 1, 9)
        assert tensor.box == (*box, 1, 1)
        # The stride of a single head means nothing.
        assert tensor.strides == (token, spec.line_bytes, spec.row_bytes, page)


def room() -> torch.Tensor:
    """Return a workspace that is large enough."""
    return torch.empty(1 << 22, dtype=torch.uint8)
