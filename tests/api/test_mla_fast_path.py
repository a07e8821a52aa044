"""Usual MLA calls, which are found again without reading their form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.mla
from mlagen.api import mla_call
from mlagen.api.mla_args import MlaArgs
from tests.api.fast_path_calls import TENSOR_CHANGES, Door, open_door
from tests.api.fast_path_semantics import UsualSemantics
from tests.cases import MlaCase

USUAL = MlaCase(name="", seq_lens=(70, 3), heads=16)

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
SELDOM = (
    "sinks",
    "lse",
    "cum_seq_lens_q",
    "sparse_mla_top_k_lens",
    "multi_ctas_kv_counter_buffer",
    "causal_seqlens_kv_global",
)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    """Return the entry point, where nothing is remembered."""
    return open_door(monkeypatch, mla_call, mlagen.mla.trtllm_batch_decode_with_kv_cache_mla)


def usual_arguments(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a usual call."""
    problem = USUAL.build("cpu")
    out = torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16)
    given = {"out": out, "workspace_buffer": torch.zeros(1 << 20)}
    return problem.arguments(**(given | changes))


def test_only_the_first_call_reads_the_form(door: Door) -> None:
    """The second finds the call by its key and tensors, the third what it launched."""
    arguments = usual_arguments()

    outcomes = [door.outcome(arguments) for _ in range(4)]

    assert len(door.forms) == 1
    assert len(door.module._calls._launches) == 1
    assert "mla_sm80" in outcomes[0]
    assert outcomes == outcomes[:1] * 4


def test_tensors_elsewhere_need_no_form_either(door: Door) -> None:
    """Every layer has a cache of its own: what is launched has the addresses of its tensors."""
    arguments = usual_arguments()
    caches = [arguments["kv_cache"].clone() for _ in range(3)]
    calls = [arguments | {"kv_cache": cache} for cache in caches]
    expected = [door.outcome_of_first(call) for call in calls]
    door.outcome(arguments)
    door.forms.clear()

    outcomes = [[door.outcome(call) for call in calls] for _ in range(3)]

    assert door.forms == []
    assert len(set(expected)) == 3
    assert outcomes == [expected] * 3


# What servers pass in every call, and what changes nothing.
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
def test_usual_calls(changes: dict[str, Any], door: Door) -> None:
    """With an output or without, of one launch or two, a second call reads no form."""
    arguments = usual_arguments(**changes)

    door.run(**arguments)

    assert not door.reads_form(arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in NUMBERS.items() for value in values],
    ids=repr,
)
def test_another_number_or_word_is_never_taken_for_the_usual_one(
    name: str, value: Any, door: Door
) -> None:
    """What is launched or said is as if nothing were remembered."""
    fast_path = usual_arguments()

    door.require_as_at_first(fast_path, fast_path | {name: value})


@pytest.mark.parametrize("change", TENSOR_CHANGES.values(), ids=TENSOR_CHANGES)
@pytest.mark.parametrize("name", TENSORS)
def test_another_tensor_is_never_taken_for_the_usual_one(
    name: str, change: Any, door: Door
) -> None:
    """The same of every fact of every tensor."""
    fast_path = usual_arguments()

    door.require_as_at_first(fast_path, fast_path | {name: change(fast_path[name])})


@pytest.mark.parametrize("name", SELDOM)
def test_a_tensor_that_is_seldom_given(name: str, door: Door) -> None:
    """It is looked at, whatever it is."""
    fast_path = usual_arguments()

    door.require_as_at_first(fast_path, fast_path | {name: torch.zeros(3, dtype=torch.int32)})


@pytest.mark.parametrize("asked", [True, 1])
def test_an_lse_that_is_asked_for(asked: object, door: Door) -> None:
    """It is written at every such call, and at no other."""
    fast_path = usual_arguments()

    door.require_as_at_first(
        fast_path, fast_path | {"return_lse": asked, "lse": torch.zeros(2, 16)}
    )


def test_an_lse_that_is_made(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that returns one is not taken for one that does not."""
    made = torch.zeros(2, 16)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: made)
    fast_path = usual_arguments()
    for _ in range(3):
        door.run(**fast_path)

    for _ in range(3):
        assert door.run(**fast_path, return_lse=True) == (fast_path["out"], made)
        assert door.launches[-1].values["lse"] == made.data_ptr()
        assert door.run(**fast_path) is fast_path["out"]


_APART = ("rope_cache", "query_rope", "latent_scale", "rope_scale", "is_causal", "bias")


@pytest.mark.parametrize("name", _APART)
def test_what_only_other_entry_points_pass(name: str, door: Door) -> None:
    """Parts, scales of parts and a bias are looked at, and so is the length that a bias covers."""
    inputs = USUAL.build("cpu").inputs(
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
    of_inputs = replace(door, run=lambda **given: mla_call.run_mla(MlaArgs(**given), True))

    of_inputs.require_as_at_first(fast_path, changed)
    of_inputs.require_as_at_first(changed, changed | {"max_seq_len": inputs.max_seq_len + 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in NUMBERS.items() for value in values],
    ids=repr,
)
def test_another_number_of_a_call_with_an_lse(name: str, value: Any, door: Door) -> None:
    """The same of calls that the entry point has no key for."""
    fast_path = usual_arguments(return_lse=True, lse=torch.zeros(2, 16))
    door.run(**fast_path)
    assert not door.reads_form(fast_path)

    door.require_as_at_first(fast_path, fast_path | {name: value})


def test_one_tensor_in_two_places(door: Door) -> None:
    """They are found again as any others, and two tensors are not taken for them."""
    arguments = usual_arguments()
    arguments["workspace_buffer"] = arguments["kv_cache"]

    outcomes = [door.outcome(arguments) for _ in range(9)]

    assert outcomes == [door.outcome_of_first(arguments)] * 9
    assert not door.reads_form(arguments)
    door.require_as_at_first(
        arguments, arguments | {"workspace_buffer": arguments["kv_cache"].clone()}
    )


class TestUsualCalls(UsualSemantics):
    """What does not depend on the entry point."""

    usual_arguments = staticmethod(usual_arguments)
    variable = "MLAGEN_MLA_KERNEL"
    hopper = "mla_sm90"
    portable = "mla_sm80"
    fast_path = "mla_sm80"
