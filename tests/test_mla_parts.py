"""MLA decode with a query in two parts: its results, its launches, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError
from tests.families.launches import Launch, launched, record_launches
from tests.problems.entry_points import decode, decode_with_lse
from tests.problems.mla import MlaCase, mla_case

# Kinds of query and cache whose query may have two parts.
KINDS = ("bf16", "fp16", "e4m3", "bf16 over e4m3", "bf16 over fp8_ds_mla")


class TestMlaParts:
    """Results of a pair, on the device of the fixture."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "facts",
        [{"q_len": 2}, {"q_lens": (1, 3)}, {"top_k": 70}, {"q_len": 2, "cp_world": 3}],
        ids=str,
    )
    def test_a_query_in_two_parts_is_the_joined_query(
        self, kind: str, facts: dict[str, Any], device: str
    ) -> None:
        """A pair of latent and rope part, each with its strides, gives the bits of one tensor."""
        problem = mla_case(kind, seq_lens=(300, 70), with_sinks=True, **facts).build(device)
        query = problem.query
        wide = query.new_zeros(*query.shape[:-1], 128)
        wide[..., :64] = query[..., 512:]
        pair = (query[..., :512].contiguous(), wide[..., :64])
        expected = decode_with_lse(problem)

        for given in (pair, list(pair), (query[..., :512], query[..., 512:])):
            for _ in range(2):
                assert all(map(torch.equal, decode_with_lse(problem, query=given), expected))

    def test_an_empty_rope_part(self, device: str) -> None:
        """Without rope dims the rope part of a pair has width 0."""
        problem = MlaCase(seq_lens=(70, 3), qk_rope_head_dim=0).build(device)

        problem.check(decode(problem, query=(problem.query, problem.query[..., :0])))


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_changes_the_addresses_of_the_query_alone(
    kind: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel reads each part at its address and with its strides, and the cache as before."""
    launches: list[Launch] = record_launches(monkeypatch)
    joined = mla_case(kind, seq_lens=(70, 3), q_len=2).build("cpu").inputs()
    latent, rope = joined.query[..., :512].contiguous(), joined.query[..., 512:].contiguous()
    out = torch.empty_like(latent, dtype=torch.bfloat16 if kind == "e4m3" else latent.dtype)

    for args in (joined, joined._replace(query=latent, query_rope=rope)):
        launched(args._replace(out=out), launches, kernel)

    size = latent.element_size()
    one, other = (launch.values for launch in launches if launch.family != "combine")
    assert (
        one
        | {
            "query": latent.data_ptr(),
            "query_rope": rope.data_ptr(),
            "query_stride": 16 * 512 * size,
            "query_head_stride": 512 * size,
            "query_rope_stride": 16 * 64 * size,
            "query_rope_head_stride": 64 * size,
        }
        == other
    )


_NOPE, _PE = (torch.zeros(2, 1, 16, width, dtype=torch.bfloat16) for width in (512, 64))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ((_NOPE,), "query: expected a torch.Tensor or a pair (q_nope, q_pe), got 1 parts"),
        ((_NOPE, _PE, _PE), "query: expected a torch.Tensor or a pair (q_nope, q_pe), got 3 parts"),
        ((_NOPE, 1), "query[1]: expected a torch.Tensor, got int"),
        ((_PE, _PE), "query[0].shape[-1]: expected 512 (kv_lora_rank), got 64"),
        ((_NOPE, _PE[:1]), "query[1].shape: expected [2, 1, 16, 64], got [1, 1, 16, 64]"),
        (
            (_NOPE, _PE.half()),
            "query[1].dtype: expected torch.bfloat16 (dtype of query[0]), got torch.float16",
        ),
    ],
    ids=["one", "three", "no tensor", "width", "shape", "dtype"],
)
def test_a_pair_that_is_no_query_is_rejected(query: tuple[object, ...], message: str) -> None:
    """The message has the part and the rule, and nothing is written."""
    problem = MlaCase(seq_lens=(70, 3)).build("cpu")
    out = problem.new_out(7.0)

    with pytest.raises(ArgumentError) as caught:
        decode(problem, query=query, out=out)

    assert str(caught.value) == message
    assert (out == 7.0).all()


def test_a_rope_part_without_rope_dims_is_rejected() -> None:
    """A rope part that is not empty has no place in a call without rope dims."""
    problem = MlaCase(seq_lens=(70, 3), qk_rope_head_dim=0).build("cpu")

    with pytest.raises(ArgumentError) as caught:
        decode(problem, query=(problem.query, problem.query[..., :64]))

    rule = "query[1].shape: expected [2, 1, 16, 0] (no rope dims), got [2, 1, 16, 64]"
    assert str(caught.value) == rule
