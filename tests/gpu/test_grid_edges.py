"""Tensors of exactly the required size, and contradictory metadata, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.families.gqa import dispatch as gqa_call
from mlagen.families.mla import dispatch as mla_call
from mlagen.families.mla.dispatch import run_mla
from tests.cases import MlaCase
from tests.gqa_cases import KINDS as GQA_KINDS
from tests.gqa_cases import Dtypes
from tests.gqa_problems import GqaCase
from tests.gqa_semantics import decode as decode_gqa
from tests.mla_cases import KINDS, case_of_kind
from tests.mla_semantics import decode

DEVICE = "cuda"
_BIAS_KINDS = {name: KINDS[name] for name in ("bf16", "fp16", "e4m3", "fp8_per_token")}
_FAR_BACK = -20_000_000


def newest_family(calls: Mapping[Any, Any]) -> str:
    """Return the kernel family of the most recently cached call."""
    return str(list(calls.values())[-1].decode.spec.family)


@pytest.mark.parametrize("kind", _BIAS_KINDS.values(), ids=_BIAS_KINDS)
@pytest.mark.parametrize("bias", ["one for all heads", "for each head"])
@pytest.mark.parametrize("heads", [1, 5, 100])
@pytest.mark.parametrize("length", [130, 3000], ids=["whole", "split"])
def test_a_bias_between_nan_rows(
    length: int, heads: int, bias: str, kind: tuple[torch.dtype, str, str]
) -> None:
    """Nothing before or behind a bias of exactly the required size is read."""
    case = case_of_kind(
        kind, name="", seq_lens=(length, 33, 0), q_len=3, heads=heads, bias=bias, with_sinks=True
    )
    problem = case.build(DEVICE)
    exact = problem.extra_args["bias"][:, :, :length]
    guarded = torch.full((len(exact) + 16, *exact.shape[1:]), math.nan, device=DEVICE)
    guarded[8:-8] = exact

    out, lse = run_mla(problem.inputs(bias=guarded[8:-8], return_lse=True), enable_pdl=True)

    problem.check(out, lse)


@pytest.mark.parametrize("name", ["bf16", "e4m3", "bf16 over e4m3", "bf16 over fp8_ds_mla"])
@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize("top_k", [0, 70], ids=["tables", "lists"])
def test_descending_offsets_in_mla(top_k: int, heads: int, name: str) -> None:
    """A sequence that ends before it begins affects no other; sm90 kernels write nothing then."""
    lens, q_lens = (40, 100, 70), (2, 0, 1)
    case = case_of_kind(
        KINDS[name], name="", seq_lens=lens, q_lens=q_lens, heads=heads, top_k=top_k
    )
    problem = case.build(DEVICE)
    mla_call.MLA.cache.clear()
    right = decode(problem)

    for ends in ([0, 2, -5, 3], [0, 2, _FAR_BACK, 3], [0, 2, _FAR_BACK, _FAR_BACK]):
        out = torch.full_like(right, 7.0)
        given = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        decode(problem, cum_seq_lens_q=given, out=out)

        # In sparse calls every query token is a sequence; offsets only select its length.
        is_left = not top_k and "sm90" in newest_family(mla_call.MLA.cache.launchers)
        assert (out == 7.0).all() if is_left else torch.equal(out[:2], right[:2]), ends


@pytest.mark.parametrize("length", [100, 5000], ids=["whole", "split"])
@pytest.mark.parametrize("heads", [5, 128])
def test_a_single_mla_sequence_with_descending_offsets(heads: int, length: int) -> None:
    """Nothing outside the result is written if the only sequence ends before it begins."""
    problem = MlaCase(name="", seq_lens=(length,), q_lens=(2,), heads=heads).build(DEVICE)
    out = torch.full((4, heads, 512), 7.0, dtype=torch.bfloat16, device=DEVICE)
    ends = torch.tensor([0, _FAR_BACK], dtype=torch.int32, device=DEVICE)

    decode(problem, cum_seq_lens_q=ends, out=out[1:3])

    assert (out[[0, 3]] == 7.0).all()


@pytest.mark.parametrize("dtypes", GQA_KINDS, ids=str)
@pytest.mark.parametrize("mask", [None, "random"], ids=["causal", "masked"])
@pytest.mark.parametrize("length", [40, 5000], ids=["whole", "split"])
def test_descending_offsets_in_gqa(length: int, mask: str | None, dtypes: Dtypes) -> None:
    """A sequence that ends before it begins affects no other; sm90 kernels write nothing then."""
    case = GqaCase(
        name="",
        seq_lens=(length, 100, 70),
        q_lens=(2, 0, 1),
        mask=mask,
        dtype=dtypes.dtype,
        kv=dtypes.kv,
    )
    problem = case.build(DEVICE)
    gqa_call.GQA.cache.clear()
    right = decode_gqa(problem)

    for ends in ([0, 2, -5, 3], [0, 2, _FAR_BACK, 3], [0, 2, _FAR_BACK, _FAR_BACK]):
        given = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        out = torch.full_like(right, 7.0)
        decode_gqa(problem, q_cu_seq_lens=given, out=out)

        is_left = "sm90" in newest_family(gqa_call.GQA.cache.launchers)
        assert (out == 7.0).all() if is_left else torch.equal(out[:2], right[:2]), ends


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("heads", [5, 128])
def test_kv_indptr_past_the_page_ids(heads: int, page: int) -> None:
    """A sequence without page ids affects only itself."""
    case = MlaCase(name="", seq_lens=(300, 300), heads=heads, page_size=page, flat_tables=True)
    case = replace(case, separate_rope=True)
    problem = case.build(DEVICE)
    used = -(-300 // page)
    right, _ = run_mla(problem.inputs(), enable_pdl=True)
    changes: dict[str, Any] = {"block_tables": problem.block_tables[: 2 * used]}
    for second in (2 * used, 2000, 2_000_000_000):
        starts = torch.tensor([0, used, second + used], dtype=torch.int32, device=DEVICE)
        far = torch.tensor([second, second + 5, second + 10], dtype=torch.int32, device=DEVICE)

        out, _ = run_mla(problem.inputs(kv_indptr=starts, **changes), enable_pdl=True)
        beyond, _ = run_mla(problem.inputs(kv_indptr=far, **changes), enable_pdl=True)

        assert torch.equal(out[0], right[0]), second
        assert beyond.shape == right.shape


@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_missing_page_ids_of_a_single_sequence(name: str) -> None:
    """An invalid kv_indptr does not fault."""
    case = case_of_kind(KINDS[name], name="", seq_lens=(300,), heads=16, flat_tables=True)
    problem, valid = case.build(DEVICE), MlaCase(name="", seq_lens=(70,)).build(DEVICE)
    starts = torch.tensor([2000, 2005], dtype=torch.int32, device=DEVICE)
    ids = problem.block_tables[:5]

    out, _ = run_mla(problem.inputs(kv_indptr=starts, block_tables=ids), enable_pdl=True)

    assert tuple(out.shape) == (1, 1, 16, 512)
    valid.check(decode(valid))  # the device still works
