"""flare_mla_decoding: rules of its own, and what it rejects."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.mla.flare import flare_mla_decoding
from mlagen.mla.masks import CausalMask, MaterializedMask, OrMask
from tests.problems.flare import (
    FORMS,
    SCALE,
    cached_lengths,
    decode,
    decode_flare,
    flare_arguments,
    flare_case,
)
from tests.problems.masks import MASKS
from tests.problems.mla import KINDS

RAGGED = flare_case()
PACKED = flare_case(**KINDS["fp8_per_token"])


class TestFlare:
    """Rules of the entry point, on the device of the fixture."""

    def test_query_scales_are_optional(self, device: str) -> None:
        """Without query scales each counts as 1."""
        problem = PACKED.build(device)
        ones = torch.ones_like(problem.extra_args["query_scales"])

        assert torch.equal(decode(problem, q_scale=None), decode(problem, q_scale=ones))

    def test_a_caller_provided_output_with_padding(self, device: str) -> None:
        """`output` is written in place, including its padding."""
        problem = RAGGED.build(device)
        given = torch.full((6, 5, 6, 512), math.nan, dtype=torch.bfloat16, device=device)

        problem.check(decode(problem, pad_to=5, output=given))

        assert given.isnan().sum() == 0

    @pytest.mark.parametrize("axis", [1, 2])
    def test_a_cache_with_a_head_axis(self, axis: int, device: str) -> None:
        """The cache may have an axis for its one KV head, and the scales an axis per head."""
        problem = replace(PACKED, mask="window of 3").build(device)
        scales = problem.extra_args["kv_scales"][..., None, None]

        problem.check(decode(problem, blocks=problem.kv_cache.unsqueeze(axis), scales=scales))

    def test_a_materialized_mask_may_have_an_offset(self, device: str) -> None:
        """With a start position a materialized mask applies to the rows from there on."""
        problem, lens = RAGGED.build(device), RAGGED.lens
        numbers = torch.randn(6, 6, 4, 120, device=device)
        cached = cached_lengths(problem)
        rows = [(seq, index) for seq in range(6) for index in range(lens[seq])]

        out = decode(problem, mask=MaterializedMask(numbers, start_pos=cached))
        none = decode(problem, mask=MaterializedMask(numbers[:, :, 1:], start_pos=1))

        bias = [torch.full((6, RAGGED.seq_lens[seq]), -math.inf).double() for seq, _ in rows]
        for own, (seq, index) in zip(bias, rows, strict=True):
            if index < 4:
                own[:] = numbers[seq, :, index, : own.shape[1]].cpu()
        problem.with_bias(bias).check(out)
        is_inside = torch.tensor([1 <= int(cached[seq]) + index < 4 for seq, index in rows])
        assert (none[~is_inside.to(device)] == 0).all()

    @pytest.mark.parametrize("largest", [3.4e38, -3.4e38])
    def test_a_bias_may_be_as_large_as_float32_allows(self, largest: float, device: str) -> None:
        """One token then has all the weight of a row, or none."""
        problem = RAGGED.build(device)
        numbers = torch.zeros(6, 6, 5, 120, device=device)
        numbers[..., 0] = largest

        out = decode(problem, mask=MaterializedMask(numbers, start_pos=cached_lengths(problem)))

        row = numbers[0, :, 0].double().cpu()
        problem.with_bias([row[:, : len(tokens.keys)] for tokens in problem.visible]).check(out)

    def test_a_masked_bias_may_be_nan(self, device: str) -> None:
        """A bias that another mask hides may be NaN."""
        problem = flare_case(mask="causal").build(device)
        positions = torch.arange(100, device=device)
        numbers = torch.where(positions <= positions[:, None], 0.0, math.nan).expand(6, -1, -1)
        both = OrMask(MaterializedMask(numbers, start_pos=0), CausalMask())

        problem.check(decode(problem, mask=both))

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("mask", ["all", "window of 3"])
    def test_an_empty_batch(self, mask: str, form: str, device: str) -> None:
        """An empty batch gives an empty output, whatever the mask."""
        facts: dict[str, Any] = {"seq_lens": (70,), "page_size": 70, "mask": mask}
        arguments = flare_arguments(flare_case(**facts).build(device))
        names = ("q", "block_table", "cache_lengths")
        empty = {name: arguments[name][:0] for name in names}
        empty |= {"valid_length": arguments["valid_length"][:1]}
        empty |= {"mask": MASKS[mask].mask(0, 6, device)}

        out = decode_flare(**arguments | empty | FORMS[form][1])

        assert tuple(out.shape) == (0, 6, 512)

    @pytest.mark.parametrize("mask", ["all", "causal", "window of 3"])
    def test_empty_dense_keys(self, mask: str, device: str) -> None:
        """Sequences without keys give zeros."""
        q = torch.randn(2, 3, 4, 576, device=device).bfloat16()
        k = torch.zeros(2, 0, 1, 576, device=device).bfloat16()

        out = flare_mla_decoding(q, k, MASKS[mask].mask(2, 4, device), None, SCALE)

        assert tuple(out.shape) == (2, 3, 4, 512)
        assert (out == 0).all()
