"""Tensors of exactly the required size, and contradictory metadata, on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mlagen.families.dispatch import GQA, MLA
from tests.problems.entry_points import ENTRY_POINTS, compute, decode
from tests.problems.gqa import KINDS as GQA_KINDS
from tests.problems.gqa import SOME_KINDS
from tests.problems.mla import KINDS, MlaCase, mla_case
from tests.sm90_tiles import launchers_of

_FAR_BACK = -20_000_000


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", "fp8_per_token"])
@pytest.mark.parametrize("bias", ["one for all heads", "for each head"])
@pytest.mark.parametrize("heads", [1, 5, 100])
@pytest.mark.parametrize("length", [130, 3000], ids=["whole", "split"])
def test_a_bias_between_nan_rows(length: int, heads: int, bias: str, kind: str) -> None:
    """Nothing before or behind a bias of exactly the required size is read."""
    facts: dict[str, Any] = {"q_len": 3, "heads": heads, "bias": bias, "with_sinks": True}
    problem = mla_case(kind, seq_lens=(length, 33, 0), **facts).build("cuda")
    exact = problem.extra_args["bias"][:, :, :length]
    guarded = torch.full((len(exact) + 16, *exact.shape[1:]), math.nan, device="cuda")
    guarded[8:-8] = exact

    problem.check(*compute(problem, bias=guarded[8:-8]))


DESCENDING: list[tuple[str, dict[str, Any]]] = [
    *(
        ("trtllm", {"heads": heads, "top_k": top_k, **KINDS[kind]})
        for kind in ("bf16", "e4m3", "bf16 over e4m3", "bf16 over fp8_ds_mla")
        for heads in (5, 16, 128)
        for top_k in (0, 70)
    ),
    *(
        ("xqa_batch", {"mask": mask, **GQA_KINDS[kind]})
        for kind in SOME_KINDS
        for mask in (None, "random")
    ),
]


@pytest.mark.parametrize(("name", "facts"), DESCENDING, ids=str)
@pytest.mark.parametrize("length", [40, 5000], ids=["whole", "split"])
def test_descending_offsets(length: int, name: str, facts: dict[str, Any]) -> None:
    """A sequence that ends before it begins affects no other; sm90 kernels write nothing then."""
    entry = ENTRY_POINTS[name]
    calls: Any = MLA if name == "trtllm" else GQA
    problem = entry.build("cuda", seq_lens=(length, 100, 70), q_lens=(2, 0, 1), **facts)
    calls.clear()
    right = entry.run(problem)

    for ends in ([0, 2, -5, 3], [0, 2, _FAR_BACK, 3], [0, 2, _FAR_BACK, _FAR_BACK]):
        out = torch.full_like(right, 7.0)
        entry.run(problem, offsets=torch.tensor(ends, dtype=torch.int32, device="cuda"), out=out)

        # In sparse calls every query token is a sequence; offsets only select its length.
        newest = launchers_of(calls)[-1]
        is_left = not facts.get("top_k") and "sm90" in newest.decode.spec.family
        assert (out == 7.0).all() if is_left else torch.equal(out[:2], right[:2]), ends


@pytest.mark.parametrize("length", [100, 5000], ids=["whole", "split"])
@pytest.mark.parametrize("heads", [5, 128])
def test_a_single_mla_sequence_with_descending_offsets(heads: int, length: int) -> None:
    """Nothing outside the result is written if the only sequence ends before it begins."""
    problem = MlaCase(seq_lens=(length,), q_lens=(2,), heads=heads).build("cuda")
    out = torch.full((4, heads, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([0, _FAR_BACK], dtype=torch.int32, device="cuda")

    decode(problem, cum_seq_lens_q=ends, out=out[1:3])

    assert (out[[0, 3]] == 7.0).all()


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("heads", [5, 128])
def test_kv_indptr_past_the_page_ids(heads: int, page: int) -> None:
    """A sequence without page ids affects only itself."""
    facts: dict[str, Any] = {"flat_tables": True, "separate_rope": True, "page_size": page}
    problem = MlaCase(seq_lens=(300, 300), heads=heads, **facts).build("cuda")
    used = -(-300 // page)
    right, _ = compute(problem)
    changes: dict[str, Any] = {"block_tables": problem.block_tables[: 2 * used]}
    for second in (2 * used, 2000, 2_000_000_000):
        starts = torch.tensor([0, used, second + used], dtype=torch.int32, device="cuda")
        far = torch.tensor([second, second + 5, second + 10], dtype=torch.int32, device="cuda")

        out, _ = compute(problem, kv_indptr=starts, **changes)
        beyond, _ = compute(problem, kv_indptr=far, **changes)

        assert torch.equal(out[0], right[0]), second
        assert beyond.shape == right.shape


@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_missing_page_ids_of_a_single_sequence(name: str) -> None:
    """An invalid kv_indptr does not fault."""
    case = mla_case(name, seq_lens=(300,), heads=16, flat_tables=True)
    problem, valid = case.build("cuda"), MlaCase(seq_lens=(70,)).build("cuda")
    starts = torch.tensor([2000, 2005], dtype=torch.int32, device="cuda")
    ids = problem.block_tables[:5]

    out, _ = compute(problem, kv_indptr=starts, block_tables=ids)

    assert tuple(out.shape) == (1, 1, 16, 512)
    valid.check(decode(valid))  # the device still works
