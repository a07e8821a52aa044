"""Invalid pages, precision and side effects of the CPU backend."""

from __future__ import annotations

import torch

from tests.problems.entry_points import decode, decode_with_lse
from tests.problems.mla import MlaCase


def test_an_invalid_page_reads_as_zero() -> None:
    """Tokens of an invalid page id are zero keys and values, as in the kernels."""
    problem = MlaCase(name="", seq_lens=(128,)).build("cpu")
    tables = problem.block_tables.clone()
    zeroed = problem.kv_cache.clone()
    zeroed[tables[0, 1].long()] = 0.0
    tables[0, 1] = 2**31 - 1

    out = decode(problem, block_tables=tables)

    assert torch.equal(out, decode(problem, kv_cache=zeroed))


def test_it_computes_in_float32() -> None:
    """The LSE agrees with float64 more closely than 16-bit weights allow."""
    problem = MlaCase(name="", seq_lens=(300, 70), with_sinks=True).build("cpu")

    _, lse = decode_with_lse(problem)

    error = (lse.double() - problem.expected().lse).abs().max()
    assert error < 1e-5


def test_the_inputs_are_unchanged() -> None:
    """No argument except `out` and `lse` is written."""
    problem = MlaCase(name="", seq_lens=(70, 3), with_sinks=True).build("cpu")
    arguments = problem.arguments()
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    before = {key: value.clone() for key, value in tensors.items()}

    decode(problem, **arguments)

    changed = [
        key for key, value in tensors.items() if not torch.equal(bits(value), bits(before[key]))
    ]
    assert changed == []


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, as NaN does not compare equal."""
    return tensor.contiguous().view(torch.uint8)
