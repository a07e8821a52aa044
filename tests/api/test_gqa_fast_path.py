"""Usual grouped-query calls, which are found again without reading their form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.decode
from mlagen.api import gqa_call
from tests.api.fast_path_calls import TENSOR_CHANGES, Door, open_door
from tests.api.fast_path_semantics import UsualSemantics
from tests.gqa_problems import GqaCase

USUAL = GqaCase(name="", seq_lens=(70, 3), sink=3.0, window=50, page_size=16)

NUMBERS: dict[str, tuple[Any, ...]] = {
    "max_seq_len": (
        1,
        1.0,
        True,
        69,
        71,
        73,
        4000,
        -1,
        np.int64(70),
        torch.tensor(70),
        "70",
        2**40,
    ),
    "window_left": (-1, -7, 0, 49.0, True, 12, np.int64(49), 2**31, torch.tensor(49), "49"),
    "q_len_per_req": (2, 1.0, True, 0, np.int64(1), torch.tensor(1), [1]),
    "bmm1_scale": (0.5, 1, True, 0.0, -0.0, math.inf, math.nan, 1e39, "1", torch.tensor(2.0), None),
    "bmm2_scale": (0.5, 1, True, 0.0, -0.0, math.inf, math.nan, 1e39, 10**400, torch.tensor(2.0)),
    "o_scale": (0.5, 1, True, 0.0, -0.0, math.inf, math.nan, 1e39, -1.0, torch.tensor(2.0)),
    "kv_layout": ("HND", "nhd", None, ["NHD"], 1),
    "enable_pdl": (True, False, 0, 1, [1], "no"),
    "kv_cache": ("a word", (), []),
}
TENSORS = (
    "query",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "out",
    "sinks",
    "keys",
    "values",
)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    """Return the entry point, where nothing is remembered."""
    return open_door(monkeypatch, gqa_call, mlagen.decode.xqa_batch_decode_with_kv_cache)


def usual_arguments(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a usual call."""
    problem = USUAL.build("cpu")
    given = {"out": torch.zeros_like(problem.query), "workspace_buffer": torch.zeros(1 << 20)}
    return problem.arguments(**(given | changes))


def with_tensor(arguments: dict[str, Any], name: str, change: Any) -> dict[str, Any]:
    """Return the arguments with one of their tensors changed."""
    if name in ("keys", "values"):
        pair = list(arguments["kv_cache"])
        pair[name == "values"] = change(pair[name == "values"])
        return arguments | {"kv_cache": tuple(pair)}
    return arguments | {name: change(arguments[name])}


def test_a_mask_of_drafts(door: Door) -> None:
    """One query token has no drafts; two have."""
    two = {"query": torch.zeros(2, 8, 128, dtype=torch.bfloat16), "q_len_per_req": 2}
    one_request = {"block_tables": torch.zeros(1, 9, dtype=torch.int32)}
    lengths = {"seq_lens": torch.full((1,), 70, dtype=torch.int32)}
    fast_path = usual_arguments(out=None, **two, **one_request, **lengths)
    masked = fast_path | {"mask": torch.zeros(1, 2, 2, dtype=torch.uint16)}

    assert door.outcome(fast_path) != door.outcome(masked)
    door.require_as_at_first(fast_path, masked)


def test_only_the_first_call_reads_the_form(door: Door) -> None:
    """The second finds the call by its key and tensors, the third what it launched."""
    arguments = usual_arguments()

    outcomes = [door.outcome(arguments) for _ in range(4)]

    assert len(door.forms) == 1
    assert len(door.module._calls._launches) == 1
    assert "gqa_sm90" in outcomes[0]
    assert outcomes == outcomes[:1] * 4


def test_tensors_elsewhere_need_no_form_either(door: Door) -> None:
    """Every layer has a cache of its own: what is launched has the addresses of its tensors."""
    arguments = usual_arguments()
    caches = [tuple(map(torch.clone, arguments["kv_cache"])) for _ in range(3)]
    calls = [arguments | {"kv_cache": cache} for cache in caches]
    expected = [door.outcome_of_first(call) for call in calls]
    door.outcome(arguments)
    door.forms.clear()

    outcomes = [[door.outcome(call) for call in calls] for _ in range(3)]

    assert door.forms == []
    assert len(set(expected)) == 3
    assert outcomes == [expected] * 3


@pytest.mark.parametrize(
    "changes", [{}, {"out": None}, {"sinks": None}, {"window_left": -1}], ids=str
)
def test_usual_calls(changes: dict[str, Any], door: Door) -> None:
    """With sinks, a window and an output or without, a second call reads no form."""
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

    door.require_as_at_first(fast_path, with_tensor(fast_path, name, change))


@pytest.mark.parametrize("name", ["mask", "kv_cache_sf", "q_cu_seq_lens"])
def test_a_tensor_that_is_seldom_given(name: str, door: Door) -> None:
    """It is looked at, whatever it is."""
    fast_path = usual_arguments()

    door.require_as_at_first(fast_path, fast_path | {name: torch.zeros(3, dtype=torch.int32)})


@pytest.mark.parametrize(
    "form", [list, lambda pair: (*pair, pair[0]), lambda pair: pair[:1], torch.stack]
)
def test_caches_of_another_kind(form: Any, door: Door) -> None:
    """A list, too many or too few, and one tensor."""
    fast_path = usual_arguments()

    door.require_as_at_first(fast_path, fast_path | {"kv_cache": form(fast_path["kv_cache"])})


def test_one_tensor_in_two_places(door: Door) -> None:
    """They are found again as any others, and two tensors are not taken for them."""
    arguments = usual_arguments()
    arguments["kv_cache"] = (arguments["kv_cache"][0],) * 2

    outcomes = [door.outcome(arguments) for _ in range(9)]

    assert outcomes == [door.outcome_of_first(arguments)] * 9
    assert not door.reads_form(arguments)
    door.require_as_at_first(
        arguments,
        arguments | {"kv_cache": (arguments["kv_cache"][0], arguments["kv_cache"][0].clone())},
    )


class TestUsualCalls(UsualSemantics):
    """What does not depend on the entry point."""

    usual_arguments = staticmethod(usual_arguments)
    variable = "MLAGEN_GQA_KERNEL"
    hopper = "gqa_sm90"
    portable = "gqa_sm80"
    fast_path = "gqa_sm90"
