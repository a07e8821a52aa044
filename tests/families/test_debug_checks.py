"""Content checks with ``MLAGEN_CHECK=1``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlagen.errors import CaptureError
from mlagen.mla import MLAPlanMetadata
from mlagen.mla.flare import run_mla
from mlagen.settings import current_settings
from tests.families.launches import Case
from tests.families.rejections import MLA_CASES, Row, Rows, broken, check, put, valid_call
from tests.fixture_types import Patch
from tests.problems import batch_decode
from tests.problems.batch_mla import batch_case, new_wrapper, plan_arguments, run_arguments
from tests.problems.entry_points import decode_gqa
from tests.problems.gqa import GqaCase
from tests.problems.gqa_cases import CASES
from tests.problems.mla import MlaProblem
from tests.problems.problem import ints


@pytest.fixture(autouse=True)
def checked(monkeypatch: Patch) -> None:
    """Enable the content checks."""
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()


CONTENTS: Rows = {
    "run_mla": [
        ("block_tables", put(0, 1, value=-1), "[0, 1]: expected 0 to 6 (pages of the cache), got"),
        ("block_tables", put(1, 0, value=7), "[1, 0]: expected 0 to 6 (pages of the cache), got 7"),
        ("seq_lens", put(1, value=321), "[1]: expected 320 (capacity of its block table) or less"),
        ("seq_lens", put(1, value=1), "[1]: expected 0, or 2 (its query tokens) or more, got 1"),
        ("seq_lens", put(1, value=-1), "[1]: expected 0 or more, got -1"),
    ],
    "run_mla other pages": [
        ("block_tables", put(1, 1, 0, value=10), "[1, 1, 0]: expected 0 to 9 (pages of the ")
    ],
    "run_mla ragged": [
        ("cum_seq_lens_q", ints(0, 6, 5), "[2]: expected 6 or more (cum_seq_lens_q[1]), got 5"),
        ("cum_seq_lens_q", ints(0, 1, 4), "[-1]: expected 5 (tokens of query), got 4"),
        ("cum_seq_lens_q", ints(1, 2, 5), "[0]: expected 0, got 1"),
    ],
    "run_mla flat": [
        ("block_tables", put(2, value=99), "[2] (request 1, page 0): expected 0 to 6 (pages of t"),
        ("seq_lens", put(0, value=129), "[0]: expected 128 (capacity of its block table) or less"),
        ("kv_indptr", put(2, value=99), "[-1]: expected 11 (page ids) or less, got 99"),
        ("kv_indptr", put(0, value=-1), "[0]: expected 0 or more, got -1"),
        ("kv_indptr", put(1, value=4), "[2]: expected 4 or more (kv_indptr[1]), got 3"),
    ],
    "run_mla sparse ragged": [("seq_lens", put(1, value=-1), "[1]: expected 0 or more, got -1")],
    "run_mla biased": [
        ("max(seq_lens)", {"seq_lens": put(0, value=76)}, ": expected 75 (bias) or less, got 76")
    ],
    "xqa_batch": [
        ("seq_lens", put(1, value=-2), "[1]: expected 0 or more, got -2"),
        ("seq_lens", put(1, value=129), "[1]: expected 128 (capacity of its block table) or less"),
        ("block_tables", put(0, 4, value=10), "[0, 4]: expected 0 to 9 (pages of the cache), got"),
        ("block_tables", put(1, 0, value=-1), "[1, 0]: expected 0 to 9 (pages of the cache), got"),
    ],
    "xqa_batch drafts": [
        ("seq_lens", put(1, value=1), "[1]: expected 0, or 2 (its query tokens) or more, got 1")
    ],
    "trtllm_gqa rank": [
        ("causal_seqlens_kv_global", put(1, value=-1), "[1]: expected 0 or more, got -1"),
        ("seq_lens", put(1, value=-2), "[1]: expected 0 or more, got -2"),
    ],
    "trtllm_gqa two tables": [
        ("block_tables", put(1, 1, 0, value=10), "[1, 1, 0]: expected 0 to 9 (pages of the ")
    ],
    "xqa_batch ragged": [
        ("q_cu_seq_lens", ints(1, 2, 5), "[0]: expected 0, got 1"),
        ("q_cu_seq_lens", ints(0, 2, 4), "[-1]: expected 5 (tokens of query), got 4"),
        ("q_cu_seq_lens", ints(0, 6, 5), "[2]: expected 6 or more (q_cu_seq_lens[1]), got 5"),
        ("q_cu_seq_lens", ints(0, 0, 5), ".diff()[1]: expected 4 (q_len_per_req) or less, got 5"),
    ],
}


@broken(CONTENTS)
def test_inconsistent_contents_are_rejected(row: Row) -> None:
    """The message names request and index, and nothing is written."""
    check(row)


MLA = MLA_CASES[""]
VALID_MLA = [
    *(replace(MLA_CASES[name], name=name) for name in ("flat", "other pages", "sparse", "biased")),
    replace(MLA, name="an empty request with query tokens", seq_lens=(70, 2, 0)),
    replace(MLA, name="ragged", q_lens=(1, 3)),
    replace(MLA, name="sparse, without top-k lengths", top_k=70),
    replace(MLA, name="not causal", seq_lens=(1, 0), q_len=4, is_causal=False),
]
# A request shorter than its drafts is computed, but it is not valid.
VALID_GQA = [
    case
    for case in CASES[::11]
    if max(case.seq_lens) <= 300
    and all(n == 0 or n >= q_len for n, q_len in zip(case.seq_lens, case.lens, strict=True))
]


@pytest.mark.parametrize("case", [*VALID_MLA, *VALID_GQA], ids=str)
def test_valid_contents_pass(case: Case) -> None:
    """Elements that no kernel reads, past the end of a request or of an empty one, pass."""
    problem = case.build("cpu")

    if isinstance(problem, MlaProblem):
        (out,) = run_mla(*problem.inputs())
    else:
        out = decode_gqa(problem)

    problem.check(out)


@pytest.mark.parametrize("form", ["csr", "dense", "tables"])
@pytest.mark.parametrize("q_lens", [(1, 2), (2, 2), (0, 3)], ids=str)
def test_padded_and_short_requests_of_a_plan_pass(form: str, q_lens: tuple[int, int]) -> None:
    """Query tokens before the first key, and those beyond the plan, in any form of metadata."""
    problem = batch_case(tuple(zip(q_lens, (9, 1), strict=True)), page_size=8).build("cpu")
    plan, given = plan_arguments(problem), run_arguments(problem)
    if form != "csr":
        tables = torch.stack((plan["kv_indices"][:2], plan["kv_indices"][1:3].flip(0)))
        others = {"page_table": tables, "kv_len": problem.seq_lens}
        plan["metadata"] = MLAPlanMetadata.dense(plan["qo_indptr"], tables, problem.seq_lens)
        plan |= dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"))
        given |= others if form == "tables" else {}
    wrapper = new_wrapper("cpu")
    wrapper.plan(**plan)
    padded = {name: torch.cat((given[name], given[name][:1])) for name in ("q_nope", "q_pe")}

    for query in ({}, padded):
        out = wrapper.run(**given | query)
        assert isinstance(out, torch.Tensor)
        problem.check(out[: sum(q_lens)])


@pytest.mark.parametrize("q_len", [1, 3])
def test_short_requests_of_a_batch_decode_plan_pass(q_len: int) -> None:
    """A plan accepts requests of fewer tokens than queries, and so do its runs."""
    problem = GqaCase(seq_lens=(2, 0, 40), q_len=q_len).build("cpu")

    problem.check(batch_decode.run(batch_decode.wrapper_of(problem), problem))


def test_unsigned_ids_and_lengths_pass() -> None:
    """A uint32 id or length is compared as an unsigned number."""
    _, problem, valid = valid_call("xqa_batch")
    names = ("block_tables", "seq_lens")

    out = decode_gqa(problem, **{name: valid[name].view(torch.uint32) for name in names})

    problem.check(out)


def test_top_k_lengths_replace_sequence_lengths() -> None:
    """With top-k lengths, sequence lengths are neither read nor checked."""
    problem = MLA_CASES["sparse"].build("cpu")

    (out,) = run_mla(*problem.inputs(seq_lens=ints(-5, 2**31 - 1)))

    problem.check(out)


@pytest.mark.parametrize("call", ["run_mla", "xqa_batch"])
def test_a_checked_call_is_rejected_during_capture(call: str, monkeypatch: Patch) -> None:
    """The checks would wait for the device of the query; nothing is written."""
    is_capturing = torch.device("cpu").__eq__
    monkeypatch.setattr("mlagen.families.common.device_checks.is_capturing", is_capturing)
    row = Row(call, "MLAGEN_CHECK", {}, ": expected 0 while a CUDA graph is captured, got 1; its ")

    check(row, CaptureError)


@pytest.mark.parametrize("call", ["run_mla", "xqa_batch"])
def test_a_call_without_requests_passes(call: str) -> None:
    """A batch of zero has no contents to check."""
    function, _, valid = valid_call(call)
    names = {"query", "seq_lens", "block_tables", "out", "lse"} & valid.keys()
    arguments = valid | {name: valid[name][:0] for name in names}

    function(**arguments)

    assert arguments["out"].shape[0] == 0


def test_without_the_variable_contents_are_not_checked(monkeypatch: Patch) -> None:
    """Without ``MLAGEN_CHECK=1`` no content check runs."""
    monkeypatch.delenv("MLAGEN_CHECK")
    current_settings.cache_clear()
    function, _, valid = valid_call("run_mla")

    out, _ = function(**valid | {"block_tables": put(0, 1, value=-1)(valid["block_tables"])})

    assert out.isfinite().all()
