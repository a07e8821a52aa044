"""Grids of GQA decode on a GPU: the parameters of FlashInfer's tests and more, as products."""

from __future__ import annotations

import pytest
import torch

from tests.gqa_cases import DTYPES, KINDS, SHAPES, Dtypes
from tests.gqa_variants import check_all, variants
from tests.problems.entry_points import decode_gqa as decode
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.problem import E4M3

DEVICE = "cuda"
RUN = {"decode": decode}
WINDOWS = (0, 128)
SINKS = (False, True)

# With 256 sequences too.
_ALL_SHAPES = (*SHAPES, (256, 1, 64, 4, 8, 128))
_NAMES = [f"{b}x{q}-page{p}-heads{h}x{g}-dim{d}" for b, q, p, h, g, d in _ALL_SHAPES]
_DRAFT_SHAPES = ((2, 32, 2, 4), (4, 64, 4, 2), (5, 16, 2, 8), (4, 32, 2, 16))
_RAGGED = ((1, 3, 2, 4), (5, 1, 3, 2), (1, 4, 2, 3), (5, 0, 3, 2))
_NARROW = [dtypes for dtypes in DTYPES if dtypes.kv in {"int8", "nvfp4"}]
_BOTH = [Dtypes(torch.bfloat16, "16-bit"), Dtypes(torch.bfloat16, "e4m3")]


def _of(dtypes: Dtypes, seq_lens: tuple[int, ...], **facts: object) -> GqaProblem:
    valid: dict[str, object] = {
        "name": "",
        "sink": 3.0,
        "seq_lens": seq_lens,
        "dtype": dtypes.dtype,
        "kv": dtypes.kv,
        "out_dtype": dtypes.out_dtype,
        "output_scale": 1.0 if dtypes.kv == "16-bit" else 0.5,
    }
    return GqaCase(**valid | facts).build(DEVICE)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtypes", DTYPES[:6], ids=str)
@pytest.mark.parametrize("shape", _ALL_SHAPES, ids=_NAMES)
def test_flashinfers_shapes(shape: tuple[int, ...], dtypes: Dtypes) -> None:
    """Every shape and cache dtype, under each window, sink, mask and layout."""
    batch, q_len, page, kv_heads, group, head_dim = shape
    lens = (110, 200, 97, 111) if batch <= 16 else (110, 20, 40, 17, 5, 30, 64, 1)
    problem = _of(
        dtypes,
        tuple(lens[index % len(lens)] for index in range(batch)),
        q_len=q_len,
        page_size=page,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
    )
    windows = WINDOWS if batch <= 128 else (0, 20)
    masks = ("causal", "full") if q_len > 1 else (None,)

    for name, changed in variants(problem, windows=windows, sinks=SINKS, masks=masks):
        check_all(changed, RUN, name)


@pytest.mark.parametrize("length", [300, 30_000])
@pytest.mark.parametrize("dtypes", _BOTH, ids=str)
@pytest.mark.parametrize("shape", _DRAFT_SHAPES, ids=str)
def test_drafts_in_a_window(shape: tuple[int, ...], dtypes: Dtypes, length: int) -> None:
    """Windows of 64 and 128 over draft tokens, with and without sinks, under each mask."""
    q_len, page, kv_heads, group = shape
    lens = (length, 300, 63 + q_len, q_len)
    problem = _of(dtypes, lens, q_len=q_len, page_size=page, kv_heads=kv_heads, group=group)

    masks = (None, "causal", "full", "random")
    for name, changed in variants(problem, windows=(64, 128), sinks=SINKS, masks=masks):
        check_all(changed, RUN, name, layouts=("NHD",) if length > 300 else ("NHD", "HND"))


@pytest.mark.parametrize("length", [300, 30_000])
@pytest.mark.parametrize("dtypes", _BOTH, ids=str)
@pytest.mark.parametrize("q_lens", _RAGGED, ids=str)
def test_ragged_drafts(q_lens: tuple[int, ...], dtypes: Dtypes, length: int) -> None:
    """Sequences with different numbers of draft tokens, one with none, one of them long."""
    is_long = length > 300
    lens = (length, 300, 17, 4)
    problem = _of(dtypes, lens, q_lens=q_lens, kv_heads=1 if is_long else 2)

    layouts = ("NHD",) if is_long else ("NHD", "HND")
    # float64 is slow over all tokens of a long sequence
    masks = ("full",) if is_long else (None, "causal", "full", "random")
    sinks = (True,) if is_long else SINKS
    for name, changed in variants(problem, sinks=sinks, masks=masks):
        check_all(changed, RUN, name, layouts=layouts)
    masks = (None, "causal", "full", "random")
    for name, changed in variants(problem, windows=(128,), sinks=SINKS, masks=masks):
        check_all(changed, RUN, name, layouts=layouts)


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 48, 192, 256, 512])
def test_drafts_of_every_width(head_dim: int, dtypes: Dtypes) -> None:
    """Head dims below and above 128, with draft tokens, masks and windows."""
    for q_len in (2, 5):
        lens = (0, 1, q_len, 70, 130)
        problem = _of(dtypes, lens, q_len=q_len, head_dim=head_dim)

        masks = (None, "full", "random")
        for name, changed in variants(problem, windows=(0, 20), sinks=SINKS, masks=masks):
            check_all(changed, RUN, f"{q_len} drafts, {name}")


@pytest.mark.parametrize("dtypes", _NARROW, ids=str)
@pytest.mark.parametrize("q_lens", [(3, 3, 3), (5, 5, 5), (33, 33, 33), (4, 0, 7)], ids=str)
@pytest.mark.parametrize("length", [90, 3000], ids=["whole", "split"])
def test_drafts_over_quantized_caches(length: int, q_lens: tuple[int, ...], dtypes: Dtypes) -> None:
    """8-bit and 4-bit caches with draft tokens: masks, windows and ragged sequences."""
    is_ragged = len(set(q_lens)) > 1
    lens = (length, 70, q_lens[0])
    drafts = {"q_lens": q_lens} if is_ragged else {"q_len": q_lens[0]}
    problem = _of(dtypes, lens, head_dim=64, kv_heads=1, **drafts)

    masks = (None, "random") if length > 90 else (None, "causal", "full", "random", "blind")
    for name, changed in variants(problem, windows=(0, 30), masks=masks):
        check_all(changed, RUN, name, layouts=("NHD",) if length > 90 else ("NHD", "HND"))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_split_sequences(head_dim: int, dtypes: Dtypes) -> None:
    """Long sequences of each head dim, with one and several query tokens, a window and sinks."""
    for q_len in (1, 2):
        problem = _of(dtypes, (2600, 9), q_len=q_len, head_dim=head_dim, kv_heads=1)

        masks = (None,) if q_len == 1 else ("random",)
        for name, changed in variants(problem, windows=(0, 2550), sinks=SINKS, masks=masks):
            check_all(changed, RUN, f"{q_len} tokens, {name}", layouts=("NHD",))


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("q_len", [1, 3])
def test_long_sequences_beside_short_ones(q_len: int, page: int, dtypes: Dtypes) -> None:
    """A split sequence does not change those of about a page, a query or zero tokens."""
    lens = (4000, 0, 1, page - 1, page, page + 1, q_len, 2600)
    problem = _of(dtypes, lens, q_len=q_len, page_size=page, kv_heads=1, head_dim=64)

    for name, changed in variants(problem, windows=(0, 100), sinks=SINKS):
        check_all(changed, RUN, name)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("length", [70, 3000], ids=["whole", "split"])
def test_dominant_sinks_and_scale_tensors(length: int, dtypes: Dtypes) -> None:
    """Sinks of 30 and of -30, and scales on the device, of zero or one dimension."""
    problem = _of(dtypes, (length, 3, 0), q_len=2, o_scale=0.25)
    assert problem.sinks is not None
    problem.sinks.copy_(torch.tensor([30.0, -30.0] * 4))

    def with_tensors(given: GqaProblem) -> torch.Tensor:
        case = given.case
        return decode(
            given,
            bmm1_scale=torch.tensor([case.scale], device=DEVICE),
            bmm2_scale=torch.tensor(case.output_scale, device=DEVICE),
        )

    check_all(problem, {"numbers": decode, "tensors": with_tensors}, layouts=("NHD",))


@pytest.mark.parametrize("enable_pdl", [None, True, False])
@pytest.mark.parametrize("out_dtype", [None, E4M3], ids=["bf16", "e4m3"])
def test_pdl(out_dtype: torch.dtype | None, enable_pdl: bool | None) -> None:
    """enable_pdl changes nothing, whole or split, for any output dtype."""
    for kv, length in (("16-bit", 70), ("e4m3", 70), ("e4m3", 3000)):
        if kv == "16-bit" and out_dtype is E4M3:
            continue
        problem = _of(Dtypes(torch.bfloat16, kv, out_dtype), (length, 9, 0), q_len=2)

        problem.check(decode(problem, enable_pdl=enable_pdl))
