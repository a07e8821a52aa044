"""The sm80 GQA kernel on a GPU, against float64."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import mlagen.decode
from mlagen.errors import ArgumentError, CaptureError
from mlagen.settings import current_settings
from tests.gqa_cases import DTYPES, Dtypes
from tests.gqa_semantics import GqaSemantics
from tests.gqa_visibility import GqaVisibility
from tests.problems.entry_points import decode_gqa as decode
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.gqa_cases import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_matches_float64(case: GqaCase) -> None:
    """The output is right with NaN and invalid page ids in all memory that must not be read."""
    problem = case.build("cuda")

    out = decode(problem)

    problem.check(out)


class TestGqaOnGpu(GqaSemantics, GqaVisibility):
    """Shared tests, on a GPU."""

    device = "cuda"


def needed_bytes(problem: GqaProblem, **changes: Any) -> int:
    """Return the workspace size of a call, from the error of a call without workspace."""
    nothing = torch.empty(0, dtype=torch.uint8, device="cuda")
    with pytest.raises(ArgumentError) as caught:
        decode(problem, workspace_buffer=nothing, **changes)
    found = re.fullmatch(
        r"workspace_buffer: expected (\d+) bytes or more for this call, got 0 bytes",
        str(caught.value),
    )
    assert found is not None, caught.value
    return int(found[1])


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_nothing_outside_the_result_is_written(dtypes: Dtypes) -> None:
    """Guard bands around output and workspace keep their bytes."""
    case = GqaCase(
        name="",
        seq_lens=(3000, 17),
        q_len=3,
        sink=3.0,
        dtype=dtypes.dtype,
        kv=dtypes.kv,
        out_dtype=dtypes.out_dtype,
    )
    problem = case.build("cuda")
    needed = needed_bytes(problem)
    band = 4096
    workspace = torch.full((band + needed + band,), 0x5A, dtype=torch.uint8, device="cuda")
    out = torch.full((2 + 6 + 2, 8, 128), 7.0, device="cuda").to(case.result_dtype)

    decode(problem, workspace_buffer=workspace[band : band + needed], out=out[2:8])

    problem.check(out[2:8])
    assert needed > 0
    assert (workspace[:band] == 0x5A).all()
    assert (workspace[-band:] == 0x5A).all()
    assert (out[:2].float() == 7.0).all()
    assert (out[-2:].float() == 7.0).all()


def test_inputs_are_not_written() -> None:
    """Caches, tables, lengths, masks and sinks keep their bytes."""
    case = GqaCase(name="", seq_lens=(3000, 17), q_len=3, sink=3.0, mask="random")
    problem = case.build("cuda")
    arguments = problem.arguments()
    names = ("query", "block_tables", "seq_lens", "sinks", "mask")
    tensors = [arguments[name] for name in names] + list(arguments["kv_cache"])
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]

    mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)

    assert all(torch.equal(t.view(torch.uint8), b) for t, b in zip(tensors, before, strict=True))


def test_the_same_plan_gives_the_same_bits() -> None:
    """A repeated call gives a bitwise equal result."""
    problem = GqaCase(name="", seq_lens=(5000, 77, 900), q_len=2).build("cuda")
    first = decode(problem)

    again = [decode(problem) for _ in range(50)]

    assert all(torch.equal(first, other) for other in again)


def test_offsets_beyond_32_bits() -> None:
    """Pages beyond 2^32 bytes of the cache are read correctly."""
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free GPU memory")
    problem = GqaCase(name="", seq_lens=(300,), page_size=64).build("cuda")
    pages, used = 140_000, 5
    high = torch.arange(pages - used, pages, device="cuda")
    caches = []
    for part in (problem.store.key, problem.store.value):
        cache = torch.full((pages, 64, 2, 128), math.nan, dtype=torch.bfloat16, device="cuda")
        cache[high] = part[problem.block_tables[0, :used].long()]
        caches.append(cache)
    tables = problem.block_tables.clone()
    tables[0, :used] = high.int()

    out = decode(problem, kv_cache=caches, block_tables=tables)

    problem.check(out)


@pytest.mark.parametrize("q_lens", [None, (3, 0, 1)], ids=["uniform", "ragged"])
def test_a_replay_follows_changed_lengths_tables_and_content(
    q_lens: tuple[int, ...] | None,
) -> None:
    """A replay is right for the current content of the tensors."""

    def case(seed: int, *seq_lens: int) -> GqaCase:
        lens = q_lens if q_lens is None or seed == 0 else (0, 2, 2)
        mask = "random" if q_lens else None
        return GqaCase(name="", seq_lens=seq_lens, q_lens=lens, sink=3.0, mask=mask, seed=seed)

    # All have equally wide tables and as many pages, whatever their lengths.
    problems = [case(seed, *lens).build("cuda") for seed, lens in enumerate(_LENGTHS)]
    width = max(problem.block_tables.shape[1] for problem in problems)
    pages = max(len(problem.store.key) for problem in problems)
    arguments = [_widened(problem, width, pages) for problem in problems]
    static: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments[0].items()
    }
    static["kv_cache"] = [cache.clone() for cache in arguments[0]["kv_cache"]]
    static["out"] = torch.empty_like(static["query"])
    mlagen.decode.xqa_batch_decode_with_kv_cache(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mlagen.decode.xqa_batch_decode_with_kv_cache(**static)

    for problem, given in zip(problems, arguments, strict=True):
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and name != "workspace_buffer":
                static[name].copy_(value)
        for cache, part in zip(static["kv_cache"], given["kv_cache"], strict=True):
            cache.copy_(part)
        static["workspace_buffer"].fill_(0xFF)
        graph.replay()

        problem.check(static["out"])


_LENGTHS = ((5000, 70, 1), (3, 4000, 64), (17, 0, 5000))


def _widened(problem: GqaProblem, width: int, pages: int) -> dict[str, Any]:
    """Return arguments with a table of ``width`` columns and a cache of ``pages`` pages."""
    tables = torch.full((3, width), -1, dtype=torch.int32, device="cuda")
    tables[:, : problem.block_tables.shape[1]] = problem.block_tables
    caches = []
    for part in (problem.store.key, problem.store.value):
        cache = torch.full((pages, *part.shape[1:]), math.nan, dtype=part.dtype, device="cuda")
        cache[: len(part)] = part
        caches.append(cache)
    longest = {"q_len_per_req": 4} if problem.case.q_lens else {}
    return problem.arguments(block_tables=tables, kv_cache=caches, max_seq_len=5000, **longest)


def test_a_kernel_is_not_compiled_during_capture() -> None:
    """The first call of a kernel raises CaptureError instead of breaking the capture."""
    problem = GqaCase(name="", seq_lens=(70,), head_dim=176, page_size=7).build("cuda")
    arguments = problem.arguments(out=torch.empty_like(problem.query))
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        arguments["out"].zero_()  # torch warns about an empty graph
        with pytest.raises(CaptureError):
            mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)


def test_two_streams_with_separate_workspaces() -> None:
    """Concurrent calls do not affect each other."""
    problems = [
        GqaCase(name="", seq_lens=(5000, 300), seed=seed, q_len=2).build("cuda")
        for seed in range(2)
    ]
    arguments = [problem.arguments() for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]

    for _ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                out = mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments[index])
                outs[index].append(out)
    torch.cuda.synchronize()

    for problem, results in zip(problems, outs, strict=True):
        problem.check(results[0])
        assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("enable_pdl", [None, True, False])
def test_pdl_changes_no_result(enable_pdl: bool | None) -> None:
    """A kernel that launches early waits for its inputs."""
    problem = GqaCase(name="", seq_lens=(5000, 300)).build("cuda")
    arguments = problem.arguments(enable_pdl=enable_pdl)
    query = arguments["query"].clone()

    outs = []
    for _ in range(20):
        arguments["query"] = query * 1.0  # written right before it is read
        outs.append(mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments))

    for out in outs:
        assert torch.equal(out, outs[0])
    problem.check(outs[0])


def test_mlagen_check_reports_an_invalid_page_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MLAGEN_CHECK=1 an invalid page id is rejected before the launch."""
    problem = GqaCase(name="", seq_lens=(70, 3)).build("cuda")
    tables = problem.block_tables.clone()
    tables[0, 2] = -7
    decode(problem)  # cached by its signature
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()

    with pytest.raises(ArgumentError) as caught:
        decode(problem, block_tables=tables)

    pages = len(problem.store.key)
    assert str(caught.value) == (
        f"block_tables[0, 2]: expected 0 to {pages - 1} (pages of the cache), got -7"
    )


def test_a_cached_call_checks_base_addresses() -> None:
    """The alignment of each base address is checked in every call, unlike shapes."""
    problem = GqaCase(name="", seq_lens=(70, 3)).build("cuda")
    decode(problem)
    memory = torch.zeros(problem.query.numel() + 8, dtype=torch.bfloat16, device="cuda")
    moved = memory[1 : 1 + problem.query.numel()].view(problem.query.shape)

    with pytest.raises(ArgumentError, match=r"query.data_ptr\(\): expected a multiple of 16"):
        decode(problem, query=moved)
