"""MLA decode: rules of its own entry points."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mlagen
from mlagen.families.dispatch import MLA
from mlagen.families.mla.args import MlaArgs
from tests.families.launches import Launch, launched, record_launches
from tests.problems.entry_points import compute, decode, decode_with_lse
from tests.problems.mla import MlaCase, mla_case
from tests.problems.problem import ints

SMALL = MlaCase(seq_lens=(70, 3))
# Kinds of query and cache whose query may have two parts.
KINDS = ("bf16", "fp16", "e4m3", "bf16 over e4m3", "bf16 over fp8_ds_mla")


class TestMla:
    """Rules of ``trtllm_batch_decode_with_kv_cache_mla``, on the device of the fixture."""

    def test_topk_lengths_are_clamped(self, device: str) -> None:
        """Lengths beyond topk mean all indices, and negative lengths mean none."""
        problem = MlaCase(seq_lens=(300, 300), top_k=70).build(device)
        given, clamped = ints(1000, -3).to(device), ints(70, 0).to(device)

        out, lse = decode_with_lse(problem, sparse_mla_top_k_lens=given)

        expected, expected_lse = decode_with_lse(problem, sparse_mla_top_k_lens=clamped)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        assert (out[1] == 0).all()
        assert (lse[1] == -math.inf).all()

    def test_repeated_topk_indices_count_repeatedly(self, device: str) -> None:
        """With a sink in the denominator, a repeated token has twice the weight."""
        problem = MlaCase(seq_lens=(4,), top_k=4, heads=8, with_sinks=True).build(device)
        sinks = torch.zeros(8, device=device)
        entry = int(problem.block_tables.flatten().clamp(min=-1).amax())
        lists = problem.block_tables.new_tensor([[[entry, -1, entry, entry]]])

        _, lse = decode_with_lse(problem, block_tables=lists, sinks=sinks, bmm1_scale=0.0)

        assert torch.allclose(lse, torch.full_like(lse, 2.0), atol=2**-10)

    def test_fp8_per_token_scales_are_optional(self, device: str) -> None:
        """Omitted scales of the query or of the cache count as 1."""
        problem = mla_case("fp8_per_token", seq_lens=(70, 3), score_scale=1e-4).build(device)
        ones = torch.ones(2, device=device)
        all_ones = torch.ones_like(problem.extra_args["kv_scales"])

        without, _ = compute(problem, query_scales=None, kv_scales=None)

        assert without.isfinite().all()
        assert torch.equal(without, compute(problem, query_scales=ones, kv_scales=all_ones)[0])

    @pytest.mark.parametrize("kind", ["e4m3", "fp8_per_token"])
    def test_an_fp8_query_writes_a_bf16_output(self, kind: str, device: str) -> None:
        """The caller's output of an FP8 query is bf16, and needs no axis of query tokens."""
        problem = mla_case(kind, seq_lens=(70, 3)).build(device)
        given = torch.full((2, 16, 512), math.nan, dtype=torch.bfloat16, device=device)

        made, _ = compute(problem)
        compute(problem, out=given)

        problem.check(given)
        assert torch.equal(made[:, 0], given)

    def test_lengths_beyond_flat_tables_are_clamped(self, device: str) -> None:
        """A length beyond the sequence's page ids is clamped to their capacity."""
        problem = MlaCase(seq_lens=(128, 64), flat_tables=True).build(device)
        too_long = torch.tensor([1000, 640], dtype=torch.int32, device=device)

        problem.check(compute(problem, seq_lens=too_long)[0])

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


@pytest.mark.parametrize("is_output", [True, False], ids=["an element", "a token too many"])
def test_the_check_sees_an_error(is_output: bool) -> None:
    """One wrong element among thousands is reported by index, and a wider mask is noticed."""
    problem = MlaCase(seq_lens=(70, 3), q_len=1 if is_output else 2).build("cpu")
    shifted = {"seq_lens": problem.seq_lens + 1, "kv_cache": problem.kv_cache.nan_to_num(0.0)}
    out = decode(problem, **({} if is_output else shifted))
    message = "elements off"
    if is_output:
        out[1, 0, 7, 300] += 0.1
        message = r"out: 1 of 16384 elements off; first at \(1, 7, 300\)"

    with pytest.raises(AssertionError, match=message):
        problem.check(out)


# By position after `sinks`: skip_softmax_threshold_scale_factor, enable_pdl and backend in the
# newer order, enable_pdl and backend in the older one.
ORDERS: list[tuple[object, ...]] = [
    *((None, True, "xqa"), (0.0, False)),
    *((True, "xqa"), (None, "trtllm-gen"), (False,)),
]


@pytest.mark.parametrize("tail", ORDERS, ids=str)
def test_both_positional_orders_mean_the_same(
    tail: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `sinks`, either positional order of FlashInfer passes enable_pdl to the kernel."""
    problem = MlaCase(seq_lens=(70, 3), with_sinks=True).build("cpu")
    leading = list(problem.arguments().values())
    seen = []

    run = MLA.run

    def record(inputs: MlaArgs, *rest: Any) -> tuple[torch.Tensor, ...]:
        seen.append(inputs.enable_pdl)
        return run(inputs, *rest)

    monkeypatch.setattr(MLA, "run", record)
    entry_point: Any = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla

    out = entry_point(*leading[:9], 0, None, *leading[9:], *tail)

    problem.check(out)
    assert seen == [False not in tail]


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
    changed = {"query": latent.data_ptr(), "query_rope": rope.data_ptr()}
    changed |= {"query_stride": 16 * 512 * size, "query_head_stride": 512 * size}
    changed |= {"query_rope_stride": 16 * 64 * size, "query_rope_head_stride": 64 * size}
    assert one | changed == other
