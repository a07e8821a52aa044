"""The CPU backend: dequantized rows, invalid pages and precision."""

from __future__ import annotations

import pytest
import torch

from mlagen.families.common.reference import dequantized, scaled_groups
from mlagen.spec.dtype import DType
from tests.problems.entry_points import decode, decode_with_lse
from tests.problems.mla import MlaCase
from tests.problems.problem import POISON

FORMATS = [DType.BF16, DType.FP16, DType.E4M3, DType.FP8_DS_MLA, DType.FP8_PER_TOKEN]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_poison_is_nan_in_every_format(dtype: DType) -> None:
    """The poison of tests decodes to NaN in every format."""
    rows = torch.full((3, dtype.row_bytes(576)), POISON, dtype=torch.uint8)

    assert dequantized(rows, dtype).isnan().all()


def test_groups_of_128_elements_have_a_scale_each() -> None:
    """A short latent part does not use the last scales, even if they are NaN."""
    scales = torch.tensor([[2.0, 3.0, float("nan"), float("nan")]])

    elements = scaled_groups(torch.ones(1, 256), scales)

    assert elements.tolist() == [[2.0] * 128 + [3.0] * 128]


def test_an_invalid_page_reads_as_zero() -> None:
    """Tokens of an invalid page id are zero keys and values, as in the kernels."""
    problem = MlaCase(seq_lens=(128,)).build("cpu")
    tables, zeroed = problem.block_tables.clone(), problem.kv_cache.clone()
    zeroed[tables[0, 1].long()] = 0.0
    tables[0, 1] = 2**31 - 1

    out = decode(problem, block_tables=tables)

    assert torch.equal(out, decode(problem, kv_cache=zeroed))


def test_it_computes_in_float32() -> None:
    """The LSE agrees with float64 more closely than 16-bit weights allow."""
    problem = MlaCase(seq_lens=(300, 70), with_sinks=True).build("cpu")

    _, lse = decode_with_lse(problem)

    assert (lse.double() - problem.expected().lse).abs().max() < 1e-5


def test_the_inputs_are_unchanged() -> None:
    """No argument except `out` and `lse` is written."""
    problem = MlaCase(seq_lens=(70, 3), with_sinks=True).build("cpu")
    arguments = problem.arguments()
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    before = {key: value.clone() for key, value in tensors.items()}

    decode(problem, **arguments)

    for key, value in tensors.items():
        # By bytes, as NaN does not compare equal.
        assert torch.equal(value.view(torch.uint8), before[key].view(torch.uint8)), key
