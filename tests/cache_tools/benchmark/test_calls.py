"""Formats, inputs and reference of cases, and outcomes of calls; tests/gpu has those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import mlagen
import tests.problems.reference
from cache_tools.benchmark import gpu
from cache_tools.benchmark.calls import Call, mlagen_call
from cache_tools.benchmark.gpu import outcomes_of, smi_facts
from cache_tools.benchmark.inputs import (
    Inputs,
    attend,
    dequantize,
    make_inputs,
    random_cache,
    random_token_rows,
    relative_error,
)
from cache_tools.benchmark.outcomes import Outcome
from cache_tools.benchmark.selection import case_of
from mlagen.spec.dtype import DType
from tests.cache_tools.conftest import raising
from tests.fixture_types import Patch

KV_DTYPES = (
    *("bf16", "fp16", "e4m3", "fp8_ds_mla", "int8", "nvfp4"),
    *("int8_per_token_head", "fp8_per_token_head"),
)


BLOCKS = {"top_k": 256, "sparse_block": 128, "page_size": 128, "seq_len": 386}


def inputs_of(family: str, sets: int = 2, **facts: Any) -> Inputs:
    """Return small inputs, ragged without top-k indices, with pages of 16 tokens."""
    shared = {"batch": 3, "seq_len": 70, "heads": 8, "page_size": 16}
    shared["is_ragged"] = "top_k" not in facts
    return make_inputs(case_of(family, **{**shared, **facts}), sets, "cpu")


def in_float64(inputs: Inputs) -> torch.Tensor:
    """Return the output of the first set, one query token and KV head at a time."""
    case, family = inputs.case, inputs.case.family
    group = case.heads // case.kv_heads
    keys = dequantize(case.kv_dtype, inputs.keys[0])
    values = dequantize(case.kv_dtype, inputs.values[0])[..., : case.head_dim_vo]
    out = torch.zeros(case.batch, case.q_len, case.heads, case.head_dim_vo, dtype=torch.float64)
    for request, seq_len in enumerate(case.seq_lens):
        slots = [divmod(token, case.page_size) for token in range(seq_len)]
        rows = [(int(inputs.block_tables[request, page]), slot) for page, slot in slots]
        for token in range(case.q_len):
            end = seq_len - case.q_len + token + 1
            start = 0 if case.window_left < 0 else max(0, end - 1 - case.window_left)
            seen = rows[start:end]
            if inputs.topk_indices is not None and family == "mla":
                listed = inputs.topk_indices[request, token].tolist()
                seen = [divmod(slot, case.page_size) for slot in listed]
            for head in range(case.kv_heads):
                if inputs.topk_indices is not None and family == "gqa":
                    lists = inputs.topk_indices[request, token]
                    entries = lists[head if len(lists) > 1 else 0].tolist()
                    block = case.sparse_block
                    tokens = [block * entry + i for entry in entries for i in range(block)]
                    seen = [rows[t] for t in tokens if block == 1 or t < end]
                heads = slice(head * group, (head + 1) * group)
                result = tests.problems.reference.attend(
                    inputs.queries[0][request, token, heads].float(),
                    torch.stack([keys[page, slot, head] for page, slot in seen]),
                    torch.stack([values[page, slot, head] for page, slot in seen]),
                    score_scale=inputs.scale,
                )
                out[request, token, heads] = result.out
    return out


@pytest.mark.parametrize(
    ("family", "facts"),
    [
        ("mla", {}),
        ("mla", {"q_len": 3, "kv_dtype": "e4m3"}),
        ("mla", {"dtype": "fp16"}),
        ("mla", {"dtype": "e4m3"}),
        ("mla", {"top_k": 40, "q_len": 2}),
        ("mla", {"top_k": 40, "kv_dtype": "fp8_ds_mla", "q_len": 2}),
        ("mla", {"top_k": 40, "kv_dtype": "fp8_ds_mla", "dtype": "e4m3"}),
        ("mla", {"qk_rope_head_dim": 0, "q_len": 2}),
        ("mla", {"qk_rope_head_dim": 0, "top_k": 40, "kv_dtype": "fp8_ds_mla"}),
        ("gqa", {}),
        ("gqa", {"q_len": 3, "kv_dtype": "e4m3", "head_dim": 64, "kv_heads": 4}),
        ("gqa", {"q_len": 3, "window_left": 20, "kv_heads": 2}),
        ("gqa", {"q_len": 3, "window_left": 3, "kv_dtype": "int8"}),
        ("gqa", {"window_left": 0, "kv_dtype": "nvfp4"}),
        ("gqa", {"kv_dtype": "nvfp4"}),
        ("gqa", {"kv_dtype": "int8_per_token_head"}),
        ("gqa", {"top_k": 42, "kv_dtype": "nvfp4", "kv_heads": 2, "q_len": 2}),
        ("gqa", {**BLOCKS, "kv_heads": 2, "q_len": 3}),
        ("gqa", {**BLOCKS, "kv_dtype": "int8"}),
    ],
    ids=str,
)
def test_reference_and_call_are_attention_in_float64(family: str, facts: dict[str, Any]) -> None:
    """The reference differs by fp32 rounding; mlagen gives it for its set, and not for another."""
    inputs = inputs_of(family, **facts)
    expected, call = attend(inputs), mlagen_call(inputs)
    out = call(0)
    assert relative_error(expected, in_float64(inputs)) < 1e-6
    assert relative_error(out, expected) < (5e-2 if facts.get("dtype") == "e4m3" else 4e-3)
    assert out.dtype is (torch.float16 if facts.get("dtype") == "fp16" else torch.bfloat16)
    assert relative_error(call(1), expected) > 0.5


def test_an_error_is_relative_to_the_norm() -> None:
    """Differences of 3 and 4 with a norm of 50 are an error of 0.1; a missing token is found."""
    expected = torch.tensor([[30.0, 40.0], [0.0, 0.0]])
    assert relative_error(torch.tensor([30.0, 43.0, 4.0, 0.0]), expected) == pytest.approx(0.1)
    inputs = inputs_of("mla")
    inputs.seq_lens.sub_(1)
    error = relative_error(mlagen_call(inputs)(0), attend(inputs))
    assert error > 4 * inputs.case.error_bound


def test_every_request_has_pages_of_its_own() -> None:
    """No two requests share a page, and pages are in random order; values of MLA are its keys."""
    inputs = inputs_of("mla")

    used = [
        int(page)
        for request, pages in enumerate(inputs.pages)
        for page in inputs.block_tables[request, :pages]
    ]
    assert inputs.pages == [7, 6, 4]  # of 105, 94 and 63 tokens
    assert sorted(used) == list(range(17))
    assert used != sorted(used)
    assert inputs.keys[0].data.shape == (17, 16, 1, 576)
    assert inputs.values[0] is inputs.keys[0]


def test_scales_are_those_of_models_and_tables_cover_a_multiple_of_128_tokens() -> None:
    """Before absorption DeepSeek-V3 has 192 dims, GLM-5.3-Flash 256; XQA requires such tables."""
    assert inputs_of("mla", 1).scale == 192**-0.5
    assert inputs_of("mla", 1, qk_rope_head_dim=0).scale == 1 / 16
    assert inputs_of("gqa", 1, head_dim=64).scale == 1 / 8
    for page_size, width in ((16, 8), (64, 2), (1, 128), (256, 1)):
        assert inputs_of("gqa", page_size=page_size).block_tables.shape == (3, width)


def test_sets_differ_in_content_alone_and_are_reproducible() -> None:
    """Sets have equal shapes and separate memory, and the same case has the same inputs."""
    inputs, again = (inputs_of("gqa", dtype="fp16", kv_dtype="e4m3", head_dim=64) for _ in range(2))
    keys, values = ([each.data for each in stored] for stored in (inputs.keys, inputs.values))
    for one, other in (inputs.queries, keys, values):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert not torch.equal(one.float(), other.float())
    assert (inputs.queries[0].dtype, keys[0].dtype) == (torch.float16, torch.float8_e4m3fn)
    assert not torch.equal(keys[0].float(), values[0].float())
    assert torch.equal(keys[1].float(), again.keys[1].data.float())


def test_indices_are_slots_of_the_request() -> None:
    """A query token has distinct tokens, all in pages of its own request."""
    inputs = inputs_of("mla", 1, seq_len=40, q_len=2, top_k=30)
    assert inputs.topk_indices is not None
    assert inputs.topk_indices.shape == (3, 2, 30)
    for request, lists in enumerate(inputs.topk_indices):
        pages = set(inputs.block_tables[request, :3].tolist())
        for slots in lists:
            assert len(set(slots.tolist())) == 30
            assert set((slots // 16).tolist()) == pages


def test_indices_of_gqa_are_runs_of_tokens_or_blocks_of_a_kv_head() -> None:
    """Tokens are distinct and four follow each other; a block of the token's own comes first."""
    tokens = inputs_of("gqa", 1, top_k=40, kv_heads=2, seq_len=72).topk_indices
    blocks = inputs_of("gqa", 1, **BLOCKS, q_len=3, kv_heads=2, batch=9).topk_indices
    assert tokens is not None
    assert blocks is not None
    assert tokens.shape == (3, 1, 1, 40)
    for listed in tokens.view(3, 10, 4):
        first = listed[:, :1]
        assert torch.equal(listed, first // 4 * 4 + torch.arange(4))
        assert len(set(first.flatten().tolist())) == 10
        assert int(listed.max()) < 72
    assert blocks.shape == (9, 3, 2, 2)
    assert torch.equal(blocks[0, :, :, 0], torch.tensor([[2, 2], [3, 3], [3, 3]]))
    assert set(blocks[:, 1:, :, 1].flatten().tolist()) == {0, 1, 2}
    assert not torch.equal(blocks[:, 1, 0], blocks[:, 1, 1])


@pytest.mark.parametrize("dtype", [DType(name) for name in KV_DTYPES], ids=str)
def test_values_have_about_unit_variance(dtype: DType) -> None:
    """Every format stands for numbers like those of a normal distribution."""
    generator = torch.Generator().manual_seed(0)
    if dtype.has_token_scales:
        stored = random_token_rows(dtype, (64,), (576, 576), generator)[0]
    else:
        stored = random_cache(dtype, (64, 576), generator)
    values = dequantize(dtype, stored)
    assert values.shape == (64, 576)
    assert float(values.mean()) == pytest.approx(0, abs=0.05)
    assert float(values.std()) == pytest.approx(1, rel=0.1)


class Times:
    """Times that encode the number of sets and the number of measurements before."""

    taken: ClassVar[list[str]] = []

    def __init__(self, _call: Call, sets: int) -> None:
        self.sets = sets

    def median_us(self, mode: str) -> float:
        """Return another time for every measurement."""
        self.taken.append(mode)
        return 100.0 * len(self.taken) + self.sets


@pytest.fixture
def inputs(monkeypatch: Patch) -> Inputs:
    """Return three small input sets, before any measurement."""
    monkeypatch.setattr(gpu, "Replays", Times)
    Times.taken.clear()
    return make_inputs(case_of("mla", batch=1, seq_len=20, heads=4), 3, "cpu")


def measure(inputs: Inputs, **makes: Callable[[Inputs], Call]) -> dict[str, Outcome]:
    """Return the outcomes of the libraries."""
    (outcomes,) = outcomes_of(makes, inputs, attend(inputs), ["model"])
    return outcomes


def test_libraries_are_timed_by_turns(inputs: Inputs) -> None:
    """Each is timed twice, the second time in reverse, and the mean of both is its time."""
    outcomes = measure(inputs, a=mlagen_call, b=mlagen_call)
    assert [outcome.us for outcome in outcomes.values()] == [253.0, 253.0]
    assert Times.taken == ["model"] * 4
    for outcome in outcomes.values():
        assert outcome.error is not None
        assert 0 < outcome.error < inputs.case.error_bound


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (mlagen.UnsupportedError("no MLA decode kernel"), "no MLA decode kernel"),
        (AssertionError("head_dim\nand more"), "AssertionError: head_dim"),
        (RuntimeError("x" * 500), f"RuntimeError: {'x' * 160}"),
    ],
    ids=["of mlagen", "of several lines", "long"],
)
def test_an_error_is_reported_on_one_line(error: Exception, problem: str, inputs: Inputs) -> None:
    """An exception of a library is the problem of its case only, and stops no other."""
    outcomes = measure(inputs, a=raising(error), b=mlagen_call)

    assert outcomes["a"] == Outcome(problem=problem)
    assert outcomes["b"].us == 153.0


def test_a_failure_while_timed_or_nan_has_no_time(inputs: Inputs, monkeypatch: Patch) -> None:
    """A call that fails in its second measurement has no result; NaN is not timed."""
    median_us = Times.median_us

    def fail_late(self: Times, mode: str) -> float:
        if len(Times.taken) == 1:
            raise RuntimeError("captured")
        return median_us(self, mode)

    monkeypatch.setattr(Times, "median_us", fail_late)
    assert measure(inputs, a=mlagen_call)["a"] == Outcome(problem="RuntimeError: captured")

    Times.taken.clear()
    problem = "result: expected finite numbers, got NaN or infinity"
    nan = attend(inputs) * torch.nan
    assert measure(inputs, a=lambda _: lambda _: nan) == {"a": Outcome(problem=problem)}
    assert Times.taken == []


def test_a_time_of_0_or_less_is_no_result(inputs: Inputs, monkeypatch: Patch) -> None:
    """The difference of two times may be below 0; a rate or a ratio of it means nothing."""
    monkeypatch.setattr(Times, "median_us", lambda *_: -0.25)
    problem = "time: expected more than 0 us, got -0.2"
    assert measure(inputs, a=mlagen_call) == {"a": Outcome(problem=problem)}


FACTS = ("driver", "power_limit_w", "max_sm_mhz", "max_memory_mhz")


@pytest.mark.parametrize(
    ("printed", "facts"),
    [(None, (None,) * 4), ("580.1, 700.00, 1980, [N/A]", ("580.1", 700.0, 1980.0, None))],
)
def test_facts_are_those_of_nvidia_smi(
    printed: str | None, facts: tuple[object, ...], monkeypatch: Any, tmp_path: Path
) -> None:
    """The driver is text, limits are numbers; what it does not report, or without it, is None."""
    if printed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{printed}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1"))
    assert smi_facts(0) == dict(zip(FACTS, facts, strict=True))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("out", "expected", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [0.0, 5.0], 0.6),
        ([0.0, 2.0], [0.0, 0.0], 2.0),
        ([-INF, 4.0], [-INF, 4.0], 0.0),
        ([NAN, 4.0], [3.0, 4.0], INF),
        ([3.0, 4.0], [3.0, INF], INF),
    ],
)
def test_the_relative_error(out: list[float], expected: list[float], error: float) -> None:
    """Elements that are not finite must be the same in both."""
    got = relative_error(torch.tensor(out), torch.tensor(expected))
    assert got == pytest.approx(error)
