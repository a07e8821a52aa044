"""Fast path of grouped-query calls, which reads no call signature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.decode
from mlagen.families.gqa import dispatch as gqa_call
from tests.families.fast_path_calls import TENSOR_CHANGES, EntryPoint, make_entry_point
from tests.families.fast_path_semantics import FastPathSemantics
from tests.problems.gqa import GqaCase

FAST_PATH_CASE = GqaCase(name="", seq_lens=(70, 3), sink=3.0, window=50, page_size=16)

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
def entry_point(monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    """Return the entry point with an empty call cache."""
    return make_entry_point(monkeypatch, gqa_call, mlagen.decode.xqa_batch_decode_with_kv_cache)


def fast_path_arguments(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a fast-path call."""
    problem = FAST_PATH_CASE.build("cpu")
    given = {"out": torch.zeros_like(problem.query), "workspace_buffer": torch.zeros(1 << 20)}
    return problem.arguments(**(given | changes))


def with_tensor(arguments: dict[str, Any], name: str, change: Any) -> dict[str, Any]:
    """Return the arguments with one tensor changed."""
    if name in ("keys", "values"):
        pair = list(arguments["kv_cache"])
        pair[name == "values"] = change(pair[name == "values"])
        return arguments | {"kv_cache": tuple(pair)}
    return arguments | {name: change(arguments[name])}


def test_a_mask_of_drafts(entry_point: EntryPoint) -> None:
    """A mask matters with two query tokens, and not with one."""
    two = {"query": torch.zeros(2, 8, 128, dtype=torch.bfloat16), "q_len_per_req": 2}
    one_request = {"block_tables": torch.zeros(1, 9, dtype=torch.int32)}
    lengths = {"seq_lens": torch.full((1,), 70, dtype=torch.int32)}
    fast_path = fast_path_arguments(out=None, **two, **one_request, **lengths)
    masked = fast_path | {"mask": torch.zeros(1, 2, 2, dtype=torch.uint16)}

    assert entry_point.outcome(fast_path) != entry_point.outcome(masked)
    entry_point.require_independent(fast_path, masked)


def test_only_the_first_call_reads_the_signature(entry_point: EntryPoint) -> None:
    """The second call hits the guarded entry, the third replays its launches."""
    arguments = fast_path_arguments()

    outcomes = [entry_point.outcome(arguments) for _ in range(4)]

    assert len(entry_point.signatures) == 1
    assert len(entry_point.module._calls._launches) == 1
    assert "gqa_sm90" in outcomes[0]
    assert outcomes == outcomes[:1] * 4


def test_other_addresses_need_no_signature(entry_point: EntryPoint) -> None:
    """Another layer's tensors hit the guarded entry, and launch with their own addresses."""
    arguments = fast_path_arguments()
    caches = [tuple(map(torch.clone, arguments["kv_cache"])) for _ in range(3)]
    calls = [arguments | {"kv_cache": cache} for cache in caches]
    expected = [entry_point.uncached_outcome(call) for call in calls]
    entry_point.outcome(arguments)
    entry_point.signatures.clear()

    outcomes = [[entry_point.outcome(call) for call in calls] for _ in range(3)]

    assert entry_point.signatures == []
    assert len(set(expected)) == 3
    assert outcomes == [expected] * 3


@pytest.mark.parametrize(
    "changes", [{}, {"out": None}, {"sinks": None}, {"window_left": -1}], ids=str
)
def test_fast_path_calls(changes: dict[str, Any], entry_point: EntryPoint) -> None:
    """With or without sinks, window and output, a second call reads no signature."""
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

    entry_point.require_independent(fast_path, with_tensor(fast_path, name, change))


@pytest.mark.parametrize("name", ["mask", "kv_cache_sf", "q_cu_seq_lens"])
def test_a_rare_tensor_never_hits_the_cached_call(name: str, entry_point: EntryPoint) -> None:
    """Launches and messages with a rare argument are those of an empty cache."""
    fast_path = fast_path_arguments()

    entry_point.require_independent(
        fast_path, fast_path | {name: torch.zeros(3, dtype=torch.int32)}
    )


@pytest.mark.parametrize(
    "convert", [list, lambda pair: (*pair, pair[0]), lambda pair: pair[:1], torch.stack]
)
def test_caches_of_another_type(convert: Any, entry_point: EntryPoint) -> None:
    """A list, a tuple of another length or one tensor never hits the cached call."""
    fast_path = fast_path_arguments()

    entry_point.require_independent(
        fast_path, fast_path | {"kv_cache": convert(fast_path["kv_cache"])}
    )


def test_one_tensor_as_two_arguments(entry_point: EntryPoint) -> None:
    """A repeated tensor hits its entry, and two distinct tensors do not."""
    arguments = fast_path_arguments()
    arguments["kv_cache"] = (arguments["kv_cache"][0],) * 2

    outcomes = [entry_point.outcome(arguments) for _ in range(9)]

    assert outcomes == [entry_point.uncached_outcome(arguments)] * 9
    assert not entry_point.reads_signature(arguments)
    entry_point.require_independent(
        arguments,
        arguments | {"kv_cache": (arguments["kv_cache"][0], arguments["kv_cache"][0].clone())},
    )


class TestFastPath(FastPathSemantics):
    """The shared tests for this entry point."""

    fast_path_arguments = staticmethod(fast_path_arguments)
    variable = "MLAGEN_GQA_KERNEL"
    sm90_kernel = "gqa_sm90"
    sm80_kernel = "gqa_sm80"
    fast_path = "gqa_sm90"
