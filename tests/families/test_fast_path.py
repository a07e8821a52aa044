"""The fast path of every entry point: a replay, which reads no call signature."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import mlagen
from mlagen.settings import current_settings
from tests.families.entry_points import (
    GQA_CASE,
    LENGTHS,
    ROWS,
    TENSOR_CHANGES,
    EntryPoint,
    given_of,
    make_entry_point,
    other_values,
)
from tests.families.planned_runs import planned
from tests.families.rejections import changed
from tests.fixture_types import Patch

PACKAGE = Path(mlagen.__file__).parent


def test_other_addresses_need_no_signature(entry_point: EntryPoint) -> None:
    """Another layer's tensors hit the guarded entry, and launch with their own addresses."""
    arguments, name = entry_point.row.build(), entry_point.row.tensors.split()[0]
    calls = [changed(arguments, name, torch.clone) for _ in range(3)]
    expected = [entry_point.uncached_outcome(call) for call in calls]
    entry_point.outcome(arguments)
    entry_point.plans.clear()

    outcomes = [[entry_point.outcome(call) for call in calls] for _ in range(3)]

    assert entry_point.plans == []
    assert len(set(expected)) == 3
    assert outcomes == [expected] * 3


COUNTER = torch.zeros(8, dtype=torch.uint8)
REPLAYED: dict[str, tuple[dict[str, Any], ...]] = {
    "trtllm": (
        {"out": None},
        {"max_seq_len": 50_000},
        {"backend": "trtllm-gen"},
        {"multi_ctas_kv_counter_buffer": COUNTER},
        {"skip_softmax_threshold_scale_factor": 0.5, "use_fp16_softmax": True},
        {"cute_dsl_impl": "modular", "kv_scale_format": "pow2-fp32"},
        {"bmm2_scale": torch.full((1,), 2.0)},
        {"return_lse": True},
        {"return_lse": True, "out": None, "lse": torch.zeros(2, 16)},
        {"sinks": [torch.zeros(16)]},
    ),
    "trtllm in parts": ({"out": None}, {"return_lse": True}),
    "dsv4": (
        {"out": None},
        {"bmm2_scale": torch.full((1,), 2.0), "sinks": None, "max_q_len": 1},
        {"return_lse": True, "lse": torch.zeros(2, 16), "return_lse_base": "basee"},
        dict.fromkeys(("extra_sparse_indices", "extra_sparse_topk_lens"), None),
    ),
    "xqa_batch_mla": ({"out": None}, {"sinks": torch.zeros(16)}),
    "xqa_mla": ({"enable_pdl": False},),
    "xqa": ({"sinks": None}, {"sliding_win_size": 0}, {"lse": torch.zeros(2, 8)}),
    "xqa_batch": (
        *({"out": None, "sinks": None}, {"window_left": -1}, {"enable_pdl": True}),
        {"return_lse": True, "out": None, "lse": torch.zeros(2, 8), "return_lse_base": "basee"},
    ),
    "trtllm_gqa": (
        *({"lse": torch.zeros(2, 8), "sinks": [torch.zeros(8)]}, {"out_dtype": torch.bfloat16}),
        {"request_order": torch.arange(2, dtype=torch.int32), "length_aware_schedule": True},
    ),
    "batch_decode": ({"out": None}, {"lse": torch.zeros(2, 8)}, {"v_scale": torch.ones(1)}),
    "wrapper": ({"out": None}, {"return_lse": True}, {"lse": torch.zeros(2, 16)}),
    "wrapper packed": ({"out": None},),
    "flare": ({"output": None}, {"num_partitions": 3}),
    "flare with scales": ({"output": None},),
}
# Calls that convert or compute a tensor, so that a replay would use that of an earlier call, or
# that copy their output.
CONVERTED: dict[str, tuple[dict[str, Any], ...]] = {
    "trtllm": (
        {"sinks": torch.zeros(16, dtype=torch.bfloat16)},
        {"seq_lens": None, "sparse_mla_top_k": 5, "block_tables": torch.zeros(2, 1, 5).int()},
        {name: ROWS["trtllm"].build()[name].half() for name in ("query", "kv_cache")},
    ),
    "dsv4": (
        {"out": torch.zeros(2, 32, 512, dtype=torch.bfloat16)[:, :16]},
        {"return_lse": True, "lse": torch.zeros(2, 32)[:, :16]},
    ),
    "xqa_batch": ({"sinks": torch.zeros(8, dtype=torch.float16)},),
    "trtllm_gqa": ({"bmm1_scale_log2": torch.ones(1)},),
    "wrapper": ({"out": torch.zeros(2, 16, 1024, dtype=torch.bfloat16)[..., :512]},),
}


BASE: dict[str, tuple[dict[str, Any], ...]] = {name: ({},) for name in ROWS}


@pytest.mark.parametrize(
    ("name", "changes", "has_replay"),
    [
        (name, changes, table is not CONVERTED)
        for table in (BASE, REPLAYED, CONVERTED)
        for name, rows in table.items()
        for changes in rows
    ],
    ids=str,
)
def test_which_calls_have_a_replay(
    name: str, changes: dict[str, Any], has_replay: bool, monkeypatch: Patch
) -> None:
    """A second call has the launches of the first; one that converts or copies is no replay."""
    entry_point = make_entry_point(monkeypatch, ROWS[name])
    arguments = entry_point.row.build() | changes
    first = entry_point.outcome(arguments)

    assert (entry_point.row.family if changes else entry_point.row.kernel) in first
    assert len(entry_point.plans) == len(entry_point.dispatches) == 1
    assert not entry_point.is_planned(arguments)
    assert entry_point.is_replayed(arguments) is has_replay
    assert not has_replay or entry_point.outcome(arguments) == first


def parameters(of: str) -> list[tuple[str, str]]:
    """Return each entry point with each of its tensors, or of its scalars."""
    return [
        (row, name)
        for row, facts in ROWS.items()
        for name in (facts.tensors.split() if of == "tensors" else facts.scalars())
    ]


@pytest.mark.parametrize(("row", "name"), parameters("tensors"))
def test_another_tensor_never_hits_the_cached_call(row: str, name: str, monkeypatch: Patch) -> None:
    """Launches and messages with another tensor property are those of an empty cache."""
    entry_point = make_entry_point(monkeypatch, ROWS[row])
    arguments = entry_point.row.build()
    for change in TENSOR_CHANGES.values():
        entry_point.require_independent(arguments, changed(arguments, name, change))


def test_scales_elsewhere_never_hit_the_call_of_rows_with_their_scales(monkeypatch: Patch) -> None:
    """Tensors of the same metadata, whose addresses another kernel serves, take that one."""
    entry_point = make_entry_point(monkeypatch, ROWS["xqa_batch"])
    facts: dict[str, Any] = {"kv": "int8", "has_token_scales": True, "cache_layout": "inline"}
    rows, others = (given_of("xqa_batch", replace(GQA_CASE, **facts)) for _ in range(2))
    elsewhere = rows | {"kv_cache_sf": others["kv_cache_sf"]}

    entry_point.require_independent(rows, elsewhere)

    assert "gqa_sm90" in entry_point.outcome(rows)
    assert "gqa_sm80" in entry_point.outcome(elsewhere)


@pytest.mark.parametrize(("row", "name"), parameters("scalars"))
def test_another_scalar_never_hits_the_cached_call(row: str, name: str, monkeypatch: Patch) -> None:
    """Launches and messages with another value of any type are those of an empty cache."""
    entry_point = make_entry_point(monkeypatch, ROWS[row])
    arguments = entry_point.row.build()
    for value in other_values(arguments.get(name, entry_point.row.default_of(name))):
        entry_point.require_independent(arguments, arguments | {name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": False},
        {"sm_scale": 0.25},
        {"page_size": 128},
        {"num_heads": 8},
        {"head_dim_ckv": 256},
        {"q_data_type": torch.float16, "kv_data_type": torch.float16},
        {"qo_indptr": torch.tensor([0, 2, 2], dtype=torch.int32)},
        {"kv_len_arr": torch.tensor([5, 1], dtype=torch.int32)},
        {"enable_pdl": False},
        {"use_sinks": True},
        {"lse_mode": "base2"},
        {"scale_mode": "bmm-scalar"},
    ],
    ids=str,
)
def test_another_plan_never_hits_the_cached_run(
    changes: dict[str, Any], monkeypatch: Patch
) -> None:
    """The runs of a wrapper depend on every value of its plan."""
    entry_point = make_entry_point(monkeypatch, ROWS["wrapper"])
    arguments = planned()

    entry_point.require_independent(
        arguments, arguments | {"wrapper": planned(**changes)["wrapper"]}
    )


def test_zeros_of_both_signs(monkeypatch: Patch) -> None:
    """Zeros compare equal, but each call passes its own sign to the kernel."""
    for row, name in (("trtllm", "bmm1_scale"), ("xqa_batch", "bmm2_scale"), ("flare", "scale")):
        entry_point = make_entry_point(monkeypatch, ROWS[row])
        arguments = entry_point.row.build() | {name: 0.0}
        other = arguments | {name: -0.0}

        assert entry_point.outcome(arguments) != entry_point.outcome(other)
        entry_point.require_independent(arguments, other)
        monkeypatch.undo()


@pytest.mark.parametrize("row", ["flare", "flare with scales"])
def test_a_replay_computes_lengths_again(row: str, monkeypatch: Patch) -> None:
    """The kernel reads lengths that are computed from the present contents of the tensors."""
    entry_point = make_entry_point(monkeypatch, ROWS[row])
    arguments = entry_point.row.build()
    entry_point.call(arguments)
    arguments["cache_lengths"] += 3
    arguments["valid_length"][1] = 0

    assert entry_point.is_replayed(arguments)
    assert LENGTHS[:2].tolist() == [int(arguments["cache_lengths"][0]) + 1, 0]


def test_a_tensor_that_changes_in_place(entry_point: EntryPoint) -> None:
    """A tensor resized in place does not hit its previous entry."""
    names = ("seq_lens", "cache_lengths", "q_nope", "q", "query")
    name = next(name for name in names if name in entry_point.row.tensors.split())
    arguments = changed(entry_point.row.build(), name, torch.clone)
    for _ in range(3):
        entry_point.outcome(arguments)
    arguments[name].resize_(1, *arguments[name].shape[1:])

    assert entry_point.outcome(arguments) == entry_point.uncached_outcome(arguments)
    assert "ArgumentError" in entry_point.outcome(arguments)


def test_storage_that_is_freed(entry_point: EntryPoint) -> None:
    """A cached call with freed storage is rejected, though guards do not detect it."""
    name = entry_point.row.tensors.split()[0]
    arguments = changed(entry_point.row.build(), name, torch.clone)
    for _ in range(3):
        entry_point.call(arguments)
    whole, bracket, _ = name.partition("[")
    tensor = arguments[whole][0] if bracket else arguments[name]
    tensor.untyped_storage().resize_(0)

    assert f"ArgumentError: {name}: expected a dense tensor" in entry_point.outcome(arguments)
    assert entry_point.launches == []


def test_the_requested_kernel_is_launched(entry_point: EntryPoint, monkeypatch: Patch) -> None:
    """A cached call of one kernel is not replayed when the settings request another."""
    arguments, family, taken = entry_point.row.build(), entry_point.row.family, []
    for kernel in ("sm90", "sm80") * 3:
        monkeypatch.setenv(f"MLAGEN_{family.upper()}_KERNEL", kernel)
        current_settings.cache_clear()
        entry_point.outcome(arguments)
        taken.append(entry_point.launches[0].family.removesuffix("_fp8kv"))

    assert taken == [f"{family}_sm90", f"{family}_sm80"] * 3


def test_contents_are_checked_at_every_call(entry_point: EntryPoint, monkeypatch: Patch) -> None:
    """With MLAGEN_CHECK=1 no cached launch is replayed before the checks."""
    arguments = entry_point.row.build()
    for _ in range(3):
        entry_point.call(arguments)
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()
    for _ in range(2):
        assert entry_point.row.kernel in entry_point.outcome(arguments)
    names = [name for name in ("seq_lens", "cache_lengths", "swa_topk_lens") if name in arguments]
    lengths = arguments[names[0]] if names else arguments["wrapper"]._plan.tensors[-1]
    lengths[0] = 10_000

    assert "ArgumentError: " in (outcome := entry_point.outcome(arguments))
    assert "[0]: expected" in outcome
    assert entry_point.launches == []


def files_of(entry_point: EntryPoint, arguments: dict[str, Any]) -> set[str]:
    """Return the modules of the package that a call executes, with that of the launch itself."""
    files = {"runtime/launch.py"}

    def add(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(add)
    try:
        entry_point.call(arguments)
    finally:
        sys.setprofile(None)
    return files


def test_a_call_passes_few_modules(entry_point: EntryPoint) -> None:
    """A first call executes few modules of its entry point and family, and a replay few in all."""
    own = ("gqa/", "mla/", f"families/{entry_point.row.family}/")
    arguments = entry_point.row.build()

    first, replay = (files_of(entry_point, arguments) for _ in range(2))

    assert len([file for file in first if file.startswith(own)]) <= 12
    assert len(replay) <= entry_point.row.max_files
