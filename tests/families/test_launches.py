"""Launches of both families beyond what emulated kernels and GPU tests prove by their results."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError
from mlagen.families.dispatch import GQA, MLA
from mlagen.families.gqa.problem import check_problem
from mlagen.families.gqa.sparse import MAX_TOKENS
from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.settings import current_settings
from tests.families.launches import (
    SCHEDULE_ID,
    Case,
    Launches,
    args_of,
    launched,
    semaphores_of,
)
from tests.fixture_types import Patch
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase
from tests.problems.problem import E4M3

UNIFORM = MlaCase(seq_lens=(70, 3), with_sinks=True)
RAGGED_GQA = GqaCase(seq_lens=(70, 3), q_lens=(1, 4), kv="e4m3", out_dtype=E4M3)
TO_E4M3 = {"kv": "e4m3", "out_dtype": E4M3}
ROOT = 128**-0.5
KERNELS = pytest.mark.parametrize("kernel", ["sm80", "sm90"])
FAMILIES = pytest.mark.parametrize("case", [UNIFORM, RAGGED_GQA], ids=["mla", "gqa"])


@pytest.mark.parametrize(
    ("entry", "changes", "factors"),
    [
        # An o_scale multiplies a 16-bit output, and no other factor applies.
        ("xqa_batch", {}, (1.0, 0, 2.0, 0.3)),
        ("xqa_batch", {"kv": "int8"}, (1.0, 0, 2.0, 0.3)),
        ("xqa_batch", TO_E4M3, (1.0, 0, 2.0, 1.0)),
        # With xqa, scores have 1 / sqrt(head_dim), and kv_scale if the cache is quantized.
        ("xqa", {}, (ROOT, 0, 1.0, 1.0)),
        ("xqa", {"kv": "int8"}, (ROOT, 1, 2.0, 1.0)),
        ("xqa", {"kv": "nvfp4"}, (ROOT, 1, 2.0, 1.0)),
        ("xqa", TO_E4M3, (ROOT, 1, 2.0, 4.0)),
    ],
)
@KERNELS
def test_factors_of_scores_and_outputs(
    entry: str, changes: dict[str, Any], factors: tuple[float, ...], kernel: str, launches: Launches
) -> None:
    """A GQA kernel gets the factors of the entry point."""
    if changes.get("kv") in {"int8", "nvfp4"}:
        kernel = "sm80"
    case = GqaCase(seq_lens=(70,), o_scale=0.3 if entry == "xqa_batch" else 1.0, **changes)
    args = args_of(case, entry, bmm2_scale=2.0, workspace_buffer=torch.zeros(1 << 20))

    values = launched(args, launches, kernel).launches[0].values

    names = ("score_factor", "bmm2_scales_scores", "bmm2_scale", "output_factor")
    assert tuple(values[name] for name in names) == pytest.approx(factors)


@KERNELS
@pytest.mark.parametrize(("base", "factor"), [("base2", 1.0), ("basee", math.log(2))])
def test_an_lse_has_the_factor_of_its_base(
    base: str, factor: float, kernel: str, launches: Launches
) -> None:
    """Every kernel of a split call has it."""
    lse: dict[str, Any] = {"lse": torch.zeros(2, 16), "return_lse": True, "return_lse_base": base}
    args = args_of(UNIFORM, max_seq_len=50_000, **lse)

    call = launched(args, launches, kernel)

    assert call.families == (["mla_sm80", "combine"] if kernel == "sm80" else ["mla_sm90"])
    assert {launch.values["lse_factor"] for launch in call.launches} == {factor}


@pytest.mark.parametrize(
    ("window", "pages", "expected"),
    [(2**31 - 1, 8, MAX_TOKENS), (MAX_TOKENS, 2**23, MAX_TOKENS), (0x7FFEFFFF, 2**23, 0x7FFEFFFF)],
)
def test_a_window_that_hides_no_token_is_the_maximum(
    window: int, pages: int, expected: int
) -> None:
    """A window of a whole table, or that could overflow a position, is the kernel's maximum."""
    tables = torch.zeros(1, pages, dtype=torch.int32).expand(2, -1)
    args = args_of(GqaCase(seq_lens=(70, 3), page_size=256), window=window, block_tables=tables)

    assert check_problem(args).window == expected


@pytest.mark.parametrize(("requests", "schedule_id"), [(256, SCHEDULE_ID), (257, 0)])
def test_schedules_are_cached_for_at_most_one_request_per_thread(
    requests: int, schedule_id: int, launches: Launches
) -> None:
    """A batch above the number of threads has schedule id 0, without cached metadata.

    The semaphores, beside which the metadata lies, are those of the schedule.
    """
    args = args_of(MlaCase(seq_lens=(3,) * requests))

    values = launched(args, launches, "sm90").launches[0].values
    assert values["schedule_id"] == schedule_id
    workspace = args.workspace_buffer.data_ptr()
    assert values["semaphores"] == semaphores_of(0, workspace, schedule_id)


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_a_rank_of_context_parallel_has_its_parameters(kernel: str, launches: Launches) -> None:
    """The global lengths, the ranks and the rank; no schedule is cached, for it depends on them."""
    args = args_of(replace(UNIFORM, cp_world=4, cp_rank=3))
    lengths = args.causal_seqlens_kv_global
    assert lengths is not None

    values = launched(args, launches, kernel).launches[0].values

    assert values["causal_seqlens_kv_global"] == lengths.data_ptr()
    assert (values["cp_world"], values["cp_rank"]) == (4, 3)
    assert values.get("schedule_id", 0) == 0


@KERNELS
def test_options_of_a_variant_are_parameters_of_its_kernel(kernel: str, launches: Launches) -> None:
    """A soft cap, a rank and a second table are constants and addresses; others lack them."""
    case = GqaCase(seq_lens=(70, 3), page_size=64)
    scratch = torch.zeros(1 << 20)
    rank = replace(case, cp_world=4, cp_rank=3, committed=(9, 9))
    plain, capped, of_rank, two_tables = (
        launched(args_of(each, entry, workspace_buffer=scratch), launches, kernel)
        .launches[0]
        .values
        for each, entry in (
            (case, "xqa_batch"),
            (replace(case, soft_cap=30.0), "xqa_batch"),
            (rank, "trtllm_gqa"),
            (replace(case, has_value_tables=True), "trtllm_gqa"),
        )
    )

    assert capped["soft_cap"] == 30.0
    assert (of_rank["cp_world"], of_rank["cp_rank"]) == (4, 3)
    assert of_rank["causal_seqlens_kv_global"]
    assert two_tables["value_tables"] - two_tables["block_tables"] == 5 * 4  # of 5 page ids
    assert two_tables["block_tables_stride"] == 10
    assert plain.keys().isdisjoint({"soft_cap", "cp_world", "value_tables"})


def test_parts_in_one_row_have_one_map(launches: Launches) -> None:
    """Views of one cache are detected by address, and separate tensors too."""
    args = args_of(UNIFORM)
    cache = args.kv_cache
    views = args._replace(kv_cache=cache[..., :512], rope_cache=cache[..., 512:])
    names = ("latent_map", "rope_map", "kv_map", "separate_rope")
    one_tensor, two_views, separate = (
        [launched(each, launches, "sm90").launches[0].values[name] for name in names]
        for each in (args, views, views._replace(rope_cache=cache.clone()[..., 512:]))
    )

    assert two_views == one_tensor
    assert (separate[0], separate[-1]) == (one_tensor[0], 1)
    assert separate[1] != one_tensor[1]


@KERNELS
@FAMILIES
def test_a_query_of_no_tokens_launches_nothing(case: Case, kernel: str, launches: Launches) -> None:
    """Requests without query tokens have an empty output, and need no workspace."""
    args = args_of(replace(case, q_lens=(1, 0)))
    ends, workspace = torch.zeros(3, dtype=torch.int32), args.workspace_buffer[:0]
    empty = {"query": args.query[:0], "cum_seq_lens_q": ends, "workspace_buffer": workspace}

    call = launched(args._replace(**empty, out=None), launches, kernel)

    assert call.launches == []
    assert call.out.shape[0] == 0


@KERNELS
@FAMILIES
def test_a_workspace_too_small_is_rejected_with_both_sizes(
    case: Case, kernel: str, launches: Launches
) -> None:
    """A workspace one byte below the plan's size is rejected."""
    workspace = torch.zeros(64 << 20, dtype=torch.uint8)
    args = args_of(case, max_seq_len=50_000, workspace_buffer=workspace)
    needed = launched(args, launches, kernel).call.plan.workspace_bytes
    launches.clear()

    with pytest.raises(ArgumentError) as caught:
        launched(args._replace(workspace_buffer=workspace[: needed - 1]), launches, kernel)

    assert str(caught.value) == (
        f"workspace_buffer: expected {needed} bytes or more for this call, got {needed - 1} bytes"
    )
    assert launches == []


@pytest.mark.parametrize(
    ("scale", "shown"), [(1e300, "1e+300"), (10**400, "an int of 1329 bits")], ids=["float", "int"]
)
@FAMILIES
def test_a_number_beyond_float32_is_rejected_at_a_cached_call(
    case: Case, scale: float, shown: str, launches: Launches
) -> None:
    """A cached call rejects an invalid float too, though launchers fix no floats."""
    args, calls = args_of(case), MLA if isinstance(case, MlaCase) else GQA
    call: Any = launched(args, launches).call
    launches.clear()

    with pytest.raises(ArgumentError) as caught:
        calls.launch(call, args._replace(bmm1_scale=scale))

    assert str(caught.value) == f"bmm1_scale: expected a number that float32 can hold, got {shown}"
    assert launches == []


def test_a_cached_call_checks_pointers_and_encodes_maps_of_new_caches(
    launches: Launches, monkeypatch: Patch
) -> None:
    """A pointer that is not aligned is rejected by name; a cache has its maps encoded once."""
    args = args_of(UNIFORM)
    call, out, _ = launched(args, launches, "sm90")
    encoded: list[int] = []

    def encode(_: TiledTensor, address: int) -> bytes:
        encoded.append(address)
        return bytes(128)

    monkeypatch.setattr(mla_maps, "encode", encode)
    shifted = torch.zeros(args.kv_cache.numel() + 1, dtype=torch.bfloat16)[1:]
    launches.clear()
    with pytest.raises(ArgumentError, match=r"^kv_cache"):
        call.launch(args._replace(kv_cache=shifted.view_as(args.kv_cache)), out)
    assert launches == []

    other = args.kv_cache.clone()
    for cache in (args.kv_cache, other, other):
        call.launch(args._replace(kv_cache=cache), out)

    assert encoded == [other.data_ptr(), other.data_ptr() + 1024, other.data_ptr()]


def test_cpu_tensors_need_no_kernel(monkeypatch: Patch) -> None:
    """The requested kernel does not affect calls on CPU tensors."""
    problem = UNIFORM.build("cpu")
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "sm90")
    current_settings.cache_clear()

    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments())

    assert isinstance(out, torch.Tensor)
    problem.check(out)
