"""Fast path of MLA calls, which reads no call signature."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.mla
from mlagen.families.mla import dispatch as mla_call
from mlagen.families.mla.args import MlaArgs
from tests.families.fast_path_calls import TENSOR_CHANGES, EntryPoint, make_entry_point
from tests.families.fast_path_semantics import FastPathSemantics
from tests.problems.mla import MlaCase

FAST_PATH_CASE = MlaCase(name="", seq_lens=(70, 3), heads=16)

NUMBERS: dict[str, tuple[Any, ...]] = {
    "max_seq_len": (1, 1.0, True, 69, 71, 73, 40_000, -1, np.int64(70), torch.tensor(70), "70"),
    "kv_lora_rank": (256, 512.0, True, np.int64(512), torch.tensor(512), [512]),
    "qk_rope_head_dim": (32, 64.0, True, np.int64(64), torch.tensor(64), [64]),
    "sparse_mla_top_k": (64, 0.0, False, np.int64(0), torch.tensor(0), [0]),
    "bmm1_scale": (0.5, 1, True, 0.0, -0.0, math.inf, math.nan, 1e39, "1", torch.tensor(2.0), None),
    "bmm2_scale": (0.5, 1, True, 0.0, -0.0, math.inf, math.nan, 1e39, 10**400, torch.tensor(2.0)),
    "enable_pdl": (True, False, 0, 1, [1], "auto", "no"),
    "backend": ("xqa", "no", None, False),
    "is_var_seq": (False,),
    "uses_shared_paged_kv_idx": (False, 1),
    "return_lse_base": ("basee", "base10", ["base2"], None),
    "max_q_len": (1, 2, True),
    "skip_softmax_threshold_scale_factor": (0.0, 1.0, True),
    "cute_dsl_impl": ("modular",),
    "kv_scale_format": ("arbitrary",),
    "enable_dcp": (True,),
    "cp_world": (2,),
    "cp_rank": (1,),
    "use_fp16_softmax": (True,),
    "qk_nope_head_dim": (64,),
}
TENSORS = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "out")
RARE_ARGUMENTS = (
    "sinks",
    "lse",
    "cum_seq_lens_q",
    "sparse_mla_top_k_lens",
    "multi_ctas_kv_counter_buffer",
    "causal_seqlens_kv_global",
)


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    """Return the entry point with an empty call cache."""
    return make_entry_point(monkeypatch, mla_call, mlagen.mla.trtllm_batch_decode_with_kv_cache_mla)


def fast_path_arguments(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a fast-path call."""
    problem = FAST_PATH_CASE.build("cpu")
    out = torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16)
    given = {"out": out, "workspace_buffer": torch.zeros(1 << 20)}
    return problem.arguments(**(given | changes))


def test_only_the_first_call_reads_the_signature(entry_point: EntryPoint) -> None:
    """The second call hits the guarded entry, the third replays its launches."""
    arguments = fast_path_arguments()

    outcomes = [entry_point.outcome(arguments) for _ in range(4)]

    assert len(entry_point.signatures) == 1
    assert len(entry_point.module._calls._launches) == 1
    assert "mla_sm80" in outcomes[0]
    assert outcomes == outcomes[:1] * 4


def test_other_addresses_need_no_signature(entry_point: EntryPoint) -> None:
    """Another layer's tensors hit the guarded entry, and launch with their own addresses."""
    arguments = fast_path_arguments()
    caches = [arguments["kv_cache"].clone() for _ in range(3)]
    calls = [arguments | {"kv_cache": cache} for cache in caches]
    expected = [entry_point.uncached_outcome(call) for call in calls]
    entry_point.outcome(arguments)
    entry_point.signatures.clear()

    outcomes = [[entry_point.outcome(call) for call in calls] for _ in range(3)]

    assert entry_point.signatures == []
    assert len(set(expected)) == 3
    assert outcomes == [expected] * 3


# Arguments that servers always pass, and arguments that are ignored.
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"out": None},
    {"max_seq_len": 50_000},
    {"backend": "trtllm-gen"},
    {"multi_ctas_kv_counter_buffer": torch.zeros(8, dtype=torch.uint8)},
    {"skip_softmax_threshold_scale_factor": 0.5, "use_fp16_softmax": True},
    {"cute_dsl_impl": "modular", "kv_scale_format": "pow2-fp32"},
)


@pytest.mark.parametrize("changes", _CHANGES, ids=", ".join)
def test_fast_path_calls(changes: dict[str, Any], entry_point: EntryPoint) -> None:
    """With or without an output, with one launch or two, a second call reads no signature."""
    arguments = fast_path_arguments(**changes)

    entry_point.run(**arguments)

    assert not entry_point.reads_signature(arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in NUMBERS.items() for value in values],
    ids=repr,
)
def test_another_scalar_never_hits_the_cached_call(
    name: str, value: Any, entry_point: EntryPoint
) -> None:
    """Launches and messages with another scalar are those of an empty cache."""
    fast_path = fast_path_arguments()

    entry_point.require_independent(fast_path, fast_path | {name: value})


@pytest.mark.parametrize("change", TENSOR_CHANGES.values(), ids=TENSOR_CHANGES)
@pytest.mark.parametrize("name", TENSORS)
def test_another_tensor_never_hits_the_cached_call(
    name: str, change: Any, entry_point: EntryPoint
) -> None:
    """Launches and messages with another tensor property are those of an empty cache."""
    fast_path = fast_path_arguments()

    entry_point.require_independent(fast_path, fast_path | {name: change(fast_path[name])})


@pytest.mark.parametrize("name", RARE_ARGUMENTS)
def test_a_rare_tensor_never_hits_the_cached_call(name: str, entry_point: EntryPoint) -> None:
    """Launches and messages with a rare argument are those of an empty cache."""
    fast_path = fast_path_arguments()

    entry_point.require_independent(
        fast_path, fast_path | {name: torch.zeros(3, dtype=torch.int32)}
    )


@pytest.mark.parametrize("return_lse", [True, 1])
def test_a_requested_lse(return_lse: object, entry_point: EntryPoint) -> None:
    """A requested LSE is written at every call, and at no other call."""
    fast_path = fast_path_arguments()

    entry_point.require_independent(
        fast_path, fast_path | {"return_lse": return_lse, "lse": torch.zeros(2, 16)}
    )


def test_an_allocated_lse(entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with and without an allocated LSE do not hit each other's entry."""
    made = torch.zeros(2, 16)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: made)
    fast_path = fast_path_arguments()
    for _ in range(3):
        entry_point.run(**fast_path)

    for _ in range(3):
        assert entry_point.run(**fast_path, return_lse=True) == (fast_path["out"], made)
        assert entry_point.launches[-1].values["lse"] == made.data_ptr()
        assert entry_point.run(**fast_path) is fast_path["out"]


_INTERNAL_FIELDS = ("rope_cache", "query_rope", "latent_scale", "rope_scale", "is_causal", "bias")


@pytest.mark.parametrize("name", _INTERNAL_FIELDS)
def test_fields_of_other_entry_points(name: str, entry_point: EntryPoint) -> None:
    """Separate parts, their scales, a bias and its length never hit another call's entry."""
    inputs = FAST_PATH_CASE.build("cpu").inputs(
        out=torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16), workspace_buffer=torch.zeros(1 << 20)
    )
    query, cache = inputs.query, inputs.kv_cache
    values = {
        "rope_cache": cache[..., 512:],
        "query_rope": query[..., 512:],
        "latent_scale": 0.5,
        "rope_scale": 0.5,
        "is_causal": False,
        "bias": torch.zeros(2, 1, inputs.max_seq_len),
    }
    fast_path, changed = inputs._asdict(), inputs._asdict() | {name: values[name]}
    of_inputs = replace(entry_point, run=lambda **given: mla_call.run_mla(MlaArgs(**given), True))

    of_inputs.require_independent(fast_path, changed)
    of_inputs.require_independent(changed, changed | {"max_seq_len": inputs.max_seq_len + 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in NUMBERS.items() for value in values],
    ids=repr,
)
def test_another_number_of_a_call_with_an_lse(
    name: str, value: Any, entry_point: EntryPoint
) -> None:
    """Calls without an entry point's key never hit the entry of another number."""
    fast_path = fast_path_arguments(return_lse=True, lse=torch.zeros(2, 16))
    entry_point.run(**fast_path)
    assert not entry_point.reads_signature(fast_path)

    entry_point.require_independent(fast_path, fast_path | {name: value})


def test_one_tensor_as_two_arguments(entry_point: EntryPoint) -> None:
    """A repeated tensor hits its entry, and two distinct tensors do not."""
    arguments = fast_path_arguments()
    arguments["workspace_buffer"] = arguments["kv_cache"]

    outcomes = [entry_point.outcome(arguments) for _ in range(9)]

    assert outcomes == [entry_point.uncached_outcome(arguments)] * 9
    assert not entry_point.reads_signature(arguments)
    entry_point.require_independent(
        arguments, arguments | {"workspace_buffer": arguments["kv_cache"].clone()}
    )


class TestFastPath(FastPathSemantics):
    """The shared tests for this entry point."""

    fast_path_arguments = staticmethod(fast_path_arguments)
    variable = "MLAGEN_MLA_KERNEL"
    sm90_kernel = "mla_sm90"
    sm80_kernel = "mla_sm80"
    fast_path = "mla_sm80"
