"""Decode context parallel over processes that exchange by gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlagen import distributed
from mlagen.distributed import decode_cp, local_seq_lens
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla
from mlagen.values import INT32_MAX
from tests.dcp_ranks import check_errors, check_heads, rank_arguments, run_ranks
from tests.problems.mla import MlaCase, mla_case
from tests.problems.problem import ints
from tests.rejected import rejections, rejects

RANKS = 4
CASES = (
    MlaCase(seq_lens=(70, 3, 0, 9), q_len=2, heads=8, with_sinks=True),
    mla_case("e4m3", seq_lens=(70, 3, 1), q_lens=(2, 5, 0), heads=4),
)


@pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed package")
@pytest.mark.timeout(60)
def test_every_rank_has_its_heads_over_all_tokens(tmp_path: Path) -> None:
    """Four ranks of one or two heads each, with ragged and empty requests and a sink."""
    run_ranks(check_heads, RANKS, "gloo", tmp_path, CASES)


@pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed package")
@pytest.mark.timeout(60)
def test_an_error_of_a_rank_is_one_of_all(tmp_path: Path) -> None:
    """None waits for another, and their next calls pair; a query of all heads or of some."""
    run_ranks(check_errors, 2, "gloo", tmp_path, CASES[:1])


@pytest.fixture
def _second_of_two() -> Iterator[None]:
    """Make this process the second rank of two; what the first one sends is undefined."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the address of the output of each decode."""
    addresses: list[int] = []
    decode = trtllm_batch_decode_with_kv_cache_mla

    def recorded(**arguments: Any) -> Any:
        addresses.append(arguments["out"].data_ptr())
        return decode(**arguments)

    monkeypatch.setattr(distributed, "trtllm_batch_decode_with_kv_cache_mla", recorded)
    return addresses


RANK = MlaCase(seq_lens=(70, 3), heads=4, with_sinks=True, cp_world=2, cp_rank=1)


def test_one_rank_exchanges_nothing() -> None:
    """Its call is the decode of all heads."""
    problem = replace(RANK, cp_world=1, cp_rank=0).build("cpu")
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    try:
        out, lse = decode_cp(**rank_arguments(problem))
        with rejects("max_seq_len: expected an int, 0 or more, got -1"):
            decode_cp(**rank_arguments(problem) | {"max_seq_len": -1})
    finally:
        dist.destroy_process_group()

    problem.check(out, lse)


@pytest.mark.usefixtures("_second_of_two")
def test_a_call_of_no_requests_is_no_error() -> None:
    """Its messages are empty."""
    arguments = rank_arguments(RANK.build("cpu"))
    for name in ("query", "block_tables", "seq_lens", "causal_seqlens_kv_global"):
        arguments[name] = arguments[name][:0]

    out, lse = decode_cp(**arguments)

    assert (len(out), len(lse)) == (0, 0)


@pytest.mark.usefixtures("_second_of_two")
def test_repeated_calls_use_the_same_memory(outputs: list[int]) -> None:
    """So that they replay their launches; each returns new outputs."""
    arguments = rank_arguments(RANK.build("cpu"))

    first, second = (decode_cp(**arguments) for _ in range(2))

    assert outputs[0] == outputs[1]
    assert first[0].data_ptr() != second[0].data_ptr()


@pytest.mark.usefixtures("_second_of_two")
@pytest.mark.parametrize("reason", ["is_capturing", "is_traced", "is_compiling"])
def test_a_graph_has_memory_of_its_own(
    reason: str, outputs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a CUDA graph captures the call or a compiler traces it."""
    arguments = rank_arguments(RANK.build("cpu"))
    decode_cp(**arguments)
    monkeypatch.setattr(distributed, reason, lambda *_: True)

    decode_cp(**arguments)

    assert outputs[0] != outputs[1]


@pytest.mark.usefixtures("_second_of_two")
@rejections(
    [
        ("sinks", torch.zeros(4), ".shape: expected [2] (heads of this rank), got [4]"),
        *(
            (
                name,
                torch._neg_view(torch.ones(shape)),
                ": expected a dense tensor in memory, got ...",
            )
            for name, shape in {"query": (2, 1, 2, 576), "sinks": (2,)}.items()
        ),
        ("return_lse", "no", ": expected a bool, got 'no'"),
        ("group", 5, ": expected a torch.distributed.ProcessGroup, got int"),
        ("kv_lora_rank", 1.5, ": expected an int, 0 or more, got 1.5"),
        ("query", torch.zeros(2, 576), ".ndim: expected 3 or 4, got 2"),
        ("query", torch.zeros(2, 1, 2, 576), ".dtype: expected torch.bfloat16 or ..."),
        (
            *("query", torch.zeros(2, 1, 2, 512, dtype=torch.bfloat16)),
            ".shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_dim), got 512",
        ),
        ("qk_rope_head_dim", "64", ": expected an int, 0 or more, got '64'"),
        (
            *("query", {"query": torch.zeros(2, 1, 3, 576), "query_has_all_heads": True}),
            ".shape[-2]: expected a multiple of 2 (ranks), got 3",
        ),
    ]
)
def test_an_argument_is_rejected_before_an_exchange(
    changes: dict[str, Any], message: str, outputs: list[int]
) -> None:
    """The message has the argument, the rule and the given value."""
    with rejects(message):
        decode_cp(**rank_arguments(RANK.build("cpu")) | changes)

    assert not outputs


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_local_lengths_are_those_of_every_worldth_token(world: int, dtype: torch.dtype) -> None:
    """For every rank and length, also the largest."""
    lengths = [*range(50), INT32_MAX]
    for rank in range(world):
        local = local_seq_lens(torch.tensor(lengths, dtype=dtype), world, rank)

        assert local.dtype is torch.int32
        assert local.tolist() == [len(range(rank, length, world)) for length in lengths]


@rejections(
    [
        ("seq_lens", [3], ": expected a torch.Tensor, got list"),
        ("seq_lens", torch.zeros(2), ".dtype: expected torch.int32 or torch.uint32, got ..."),
        ("seq_lens", ints(1)[None], ".ndim: expected 1, got 2"),
        ("cp_world", 0, ": expected an int, 1 or more, got 0"),
        ("cp_rank", -1, ": expected an int, 0 or more, got -1"),
        ("cp_rank", 2, ": expected less than 2 (cp_world), got 2"),
    ]
)
def test_local_lengths_are_rejected(changes: dict[str, Any], message: str) -> None:
    """The message has the argument, the rule and the given value."""
    given: dict[str, Any] = {"seq_lens": ints(1), "cp_world": 2, "cp_rank": 0}

    with rejects(message):
        local_seq_lens(**given | changes)
