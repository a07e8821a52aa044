"""The CPU backend where it is more than its results: what it reads, and how well it computes."""

from __future__ import annotations

import torch

from tests.cases import MlaCase
from tests.mla_semantics import decode, decode_with_lse


def test_a_page_that_does_not_exist_reads_as_zero() -> None:
    """The tokens of a wild id count as keys and values of zero, as in the kernels."""
    problem = MlaCase(name="", seq_lens=(128,)).build("cpu")
    tables = problem.block_tables.clone()
    zeroed = problem.kv_cache.clone()
    zeroed[tables[0, 1].long()] = 0.0
    tables[0, 1] = 2**31 - 1

    out = decode(problem, block_tables=tables)

    assert torch.equal(out, decode(problem, kv_cache=zeroed))


def test_it_computes_in_float32() -> None:
    """Its LSE agrees with float64 far closer than 16-bit weights would."""
    problem = MlaCase(name="", seq_lens=(300, 70), with_sinks=True).build("cpu")

    _, lse = decode_with_lse(problem)

    error = (lse.double() - problem.expected().lse).abs().max()
    assert error < 1e-5


def test_the_inputs_are_left_as_they_are() -> None:
    """No argument but `out` and `lse` is written."""
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
    """Return the bytes of a tensor, since a NaN equals nothing."""
    return tensor.contiguous().view(torch.uint8)
