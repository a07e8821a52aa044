"""Rules that the entry points share, each written once over their adapters, for every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.problems.entry_points import ENTRY_POINTS, EntryPoint
from tests.problems.extremes import extreme_sinks
from tests.problems.problem import ints

WHOLE_AND_SPLIT = pytest.mark.parametrize("lens", [(70, 3), (5000, 3)], ids=["whole", "split"])
DECODES = ["trtllm", "xqa_batch"]
DENSE_TABLES = [*DECODES, "xqa_batch_mla", "xqa_mla", "planless", "xqa"]
QUANTIZED = [{"kv": kv, "output_scale": 0.5} for kv in ("e4m3", "int8", "nvfp4")]


def over(*names: str) -> Callable[[Any], Any]:
    """Run a test over entry points."""
    return pytest.mark.parametrize("entry", [ENTRY_POINTS[name] for name in names], ids=names)


class TestEntryPoints:
    """Rules over entry points, on the device of the fixture."""

    @WHOLE_AND_SPLIT
    @pytest.mark.parametrize(
        ("name", "facts"),
        [
            *((name, {"output_scale": 1.5}) for name in (*DECODES, "xqa_batch_mla", "xqa_mla")),
            *(("xqa_batch", facts | {"o_scale": 2.0}) for facts in QUANTIZED),
            *(("xqa", facts) for facts in ({}, *QUANTIZED)),
        ],
        ids=str,
    )
    def test_scales_may_be_tensors(
        self, name: str, facts: dict[str, Any], lens: tuple[int, ...], device: str
    ) -> None:
        """A scale in an fp32 tensor of zero or one dimension equals the float."""
        entry = ENTRY_POINTS[name]
        problem = entry.build(device, seq_lens=lens, **facts)
        given = entry.arguments(problem)
        numbers = (given[entry.names[each]] for each in ("score_scale", "value_scale"))
        score_scale, value_scale = (torch.tensor(number, device=device) for number in numbers)

        out = entry.run(problem, score_scale=score_scale, value_scale=value_scale[None])

        problem.check(out)

    @over(*DECODES, "xqa_mla")
    def test_scales_may_be_ints(self, entry: EntryPoint, device: str) -> None:
        """A scale of 1 is 1.0."""
        problem = entry.build(device, seq_lens=(70, 3), score_scale=1.0)

        problem.check(entry.run(problem, score_scale=1, value_scale=1))

    @WHOLE_AND_SPLIT
    @over(*(name for name, entry in ENTRY_POINTS.items() if "out" in entry.names))
    def test_caller_provided_outputs(
        self, entry: EntryPoint, lens: tuple[int, ...], device: str
    ) -> None:
        """`out` is written in place and returned; the functions of `xqa` return None."""
        problem = entry.build(device, seq_lens=lens)
        out = entry.new_out(problem)

        result = entry.call(problem, out=out)

        assert result is (None if entry.name in {"xqa", "xqa_mla"} else out)
        problem.check(out)

    @WHOLE_AND_SPLIT
    @pytest.mark.parametrize(
        ("name", "base", "facts"),
        [
            ("trtllm", {"return_lse_base": "basee"}, {"heads": 20}),
            ("wrapper", {"return_lse_base_on_e": True}, {"heads": 20}),
            ("xqa_batch", {"return_lse_base": "basee"}, {"kv_heads": 4, "group": 5}),
            ("trtllm_gqa", {}, {"kv_heads": 4, "group": 5}),
        ],
    )
    def test_caller_provided_lse(
        self,
        name: str,
        base: dict[str, Any],
        facts: dict[str, Any],
        lens: tuple[int, ...],
        device: str,
    ) -> None:
        """`lse` is written in place and returned, in the natural base on request."""
        entry = ENTRY_POINTS[name]
        problem = entry.build(device, seq_lens=(*lens, 0), **facts)
        out, lse = entry.new_out(problem), torch.full((3, 20), math.nan, device=device)

        result = entry.call(problem, out=out, lse=lse, return_lse=True, **base)

        assert result[0] is out
        assert result[1] is lse
        problem.check(out, lse, natural=bool(base))

    @pytest.mark.parametrize(
        ("name", "facts", "shape", "lse"),
        [
            ("trtllm", {"q_len": 2, "heads": 5}, (2, 2, 5, 512), (4, 5)),
            ("trtllm", {"q_lens": (1, 3), "heads": 5}, (4, 5, 512), (4, 5)),
            ("xqa_batch_mla", {"heads": 5}, (2, 1, 5, 512), None),
            ("wrapper", {"q_lens": (1, 3), "heads": 5}, (4, 5, 512), (4, 5)),
            ("wrapper", {"q_len": 1, "heads": 5}, (2, 5, 512), (2, 5)),
            ("planless", {"heads": 128}, (2, 128, 512), None),
            ("flare", {"q_lens": (1, 3), "heads": 5}, (4, 5, 512), None),
            ("xqa_batch", {}, (2, 8, 128), None),
            ("xqa_batch", {}, (2, 8, 128), (2, 8)),
            ("xqa_batch", {"q_len": 2}, (2, 2, 8, 128), (2, 2, 8)),
            ("xqa_batch", {"q_lens": (1, 3)}, (4, 8, 128), (4, 8)),
            ("trtllm_gqa", {"q_len": 2}, (4, 8, 128), (4, 8)),
            ("trtllm_gqa", {"q_lens": (1, 3)}, (4, 8, 128), None),
        ],
    )
    def test_allocated_outputs(
        self,
        name: str,
        facts: dict[str, Any],
        shape: tuple[int, ...],
        lse: tuple[int, ...] | None,
        device: str,
    ) -> None:
        """An allocated output is shaped like the query; an LSE of MLA is flat over tokens."""
        entry = ENTRY_POINTS[name]
        problem = entry.build(device, seq_lens=(70, 3), **facts)

        result = entry.call(problem, **({"return_lse": True} if lse else {}))

        made = result if lse else (result,)
        assert [tuple(part.shape) for part in made] == [shape, *([lse] if lse else [])]
        problem.check(*made)

    @over(*DENSE_TABLES)
    def test_invalid_page_ids_do_not_fault(self, entry: EntryPoint, device: str) -> None:
        """An invalid page id affects only its own sequence."""
        problem = entry.build(device, seq_lens=(200, 200, 5000))
        expected = entry.run(problem)
        tables = problem.block_tables.clone()
        for ids in ((-1, 2**31 - 1, -(2**31)), (len(problem.keys),) * 3):
            tables[0, :3] = ints(*ids).to(device)

            out = entry.run(problem, block_tables=tables)

            assert torch.equal(out[1:], expected[1:])

    @over(*DENSE_TABLES)
    def test_lengths_are_clamped(self, entry: EntryPoint, device: str) -> None:
        """A length beyond the block table is clamped to its capacity, a negative one is 0."""
        problem = entry.build(device, seq_lens=(128, 64, 0), spare_pages=0)

        out = entry.run(problem, seq_lens=ints(1000, 64, -5).to(device))

        problem.check(out)

    @over(*(name for name in ENTRY_POINTS if name != "flare, padded"))
    def test_unsigned_metadata(self, entry: EntryPoint, device: str) -> None:
        """Lengths, page ids and query offsets may be uint32."""
        ragged = {"q_lens": (2, 1)} if "offsets" in entry.names else {}
        problem = entry.build(device, seq_lens=(70, 3), spare_pages=0, **ragged)
        given = entry.arguments(problem)
        given |= given.get("plan", {})
        names = [each for each in ("block_tables", "seq_lens", "offsets") if each in entry.names]
        unsigned = {each: given[entry.names[each]].view(torch.uint32) for each in names}

        problem.check(entry.run(problem, **unsigned))

    @over("trtllm", "xqa_batch", "xqa")
    @pytest.mark.parametrize("mask", [None, "random"], ids=["causal", "masked"])
    def test_offsets_outside_the_query_do_not_fault(
        self, entry: EntryPoint, mask: str | None, device: str
    ) -> None:
        """A sequence whose query tokens are out of bounds affects only itself."""
        facts = {"mask": mask} if mask and entry.name != "trtllm" else {}
        problem = entry.build(device, seq_lens=(5, 100), q_lens=(2, 3), **facts)
        expected = entry.run(problem)

        out = entry.run(problem, offsets=ints(0, 2, 900).to(device))

        assert torch.equal(out[:2], expected[:2])

    @over("trtllm", "flare")
    def test_query_tokens_past_the_last_sequence_are_ignored(
        self, entry: EntryPoint, device: str
    ) -> None:
        """They read no block table, with any mask, and affect no sequence."""
        facts = {"mask": "window of 3"} if entry.name == "flare" else {}
        problem = entry.build(device, seq_lens=(5, 100), q_lens=(2, 3), **facts)
        query = torch.cat([problem.query, torch.full_like(problem.query, math.nan)])

        problem.check(entry.call(problem, query=query)[:5])

    @over("trtllm", "xqa_batch_mla", "xqa_batch", "xqa")
    @pytest.mark.parametrize("lens", [(70, 1, 0), (5000, 0)], ids=["whole", "split"])
    def test_sinks_may_be_any_number(
        self, entry: EntryPoint, lens: tuple[int, ...], device: str
    ) -> None:
        """For sinks of any size, infinite or NaN, the result matches float64 in either base."""
        facts = {} if "mla" in entry.name or entry.name == "trtllm" else {"group": 8}
        problem = replace(entry.build(device, seq_lens=lens, **facts), sinks=extreme_sinks(device))

        problem.check(entry.run(problem))
        if entry.name == "trtllm":
            for base in ("base2", "basee"):
                result = entry.call(problem, return_lse=True, return_lse_base=base)
                problem.check(*result, natural=base == "basee")

    @over(*DECODES)
    def test_a_strided_query(self, entry: EntryPoint, device: str) -> None:
        """Heads of a query may be strided, as in a larger tensor."""
        problem = entry.build(device, seq_lens=(70, 3), q_len=2)
        *outer, heads, width = problem.query.shape
        shape = (*outer, heads + 3, width + 64)
        wide = torch.full(shape, math.nan, dtype=torch.bfloat16, device=device)
        wide[..., 2 : 2 + heads, 64:] = problem.query

        out = entry.run(problem, query=wide[..., 2 : 2 + heads, 64:])

        problem.check(out)

    @over(*(name for name in DENSE_TABLES if name != "planless"))
    def test_an_empty_batch(self, entry: EntryPoint, device: str) -> None:
        """No sequences give an empty result of the right shape."""
        problem = entry.build(device, seq_lens=(70,))
        given, own = entry.arguments(problem), entry.names
        empty = {each: given[own[each]][:0] for each in ("query", "block_tables", "seq_lens")}
        if own["out"] == "output":
            empty["out"] = given["output"][:0]
        shape = (0, *entry.run(problem).shape[1:])

        assert tuple(entry.run(problem, **empty).shape) == shape

    @over(*DECODES)
    @pytest.mark.parametrize("longest", [0, 1, 100_000])
    def test_max_seq_len_changes_no_result(
        self, entry: EntryPoint, longest: int, device: str
    ) -> None:
        """max_seq_len only decides the splits; a wrong one is no error."""
        problem = entry.build(device, seq_lens=(700, 3, 0), q_len=2)

        problem.check(entry.run(problem, max_seq_len=longest))

    @over(*DECODES)
    @pytest.mark.parametrize(("length", "batch"), [(200, 200), (5000, 4)], ids=["whole", "split"])
    def test_no_token_is_skipped(
        self, entry: EntryPoint, length: int, batch: int, device: str
    ) -> None:
        """A query that matches one token gives its value, at any position."""
        one = {"heads": 1} if entry.name == "trtllm" else {"kv_heads": 1, "group": 1}
        scale = {} if entry.name == "trtllm" else {"score_scale": 1.0}
        problem = entry.build(device, seq_lens=(length,) * batch, **one, **scale)
        quiet, tables = problem.keys.clone(), problem.block_tables
        problem = replace(problem, block_tables=tables.cpu())

        edges = range(64, length, 64 if device == "cuda" else 640)
        positions = range(length) if length == batch else [p for e in edges for p in (e - 1, e)]
        for first in range(0, len(positions), batch):
            chosen = positions[first : first + batch]
            problem.keys.copy_(quiet)
            wanted = [problem.attract(seq, position) for seq, position in enumerate(chosen)]

            out = entry.run(problem, block_tables=tables)[: len(chosen)]

            rows = out.reshape(len(chosen), -1)
            assert torch.allclose(rows, torch.stack(wanted), rtol=2**-7, atol=2**-7), chosen

    @WHOLE_AND_SPLIT
    @over(*DECODES)
    def test_nan_in_a_query_stays_in_its_head(
        self, entry: EntryPoint, lens: tuple[int, ...], device: str
    ) -> None:
        """A NaN in the query of one head makes that head NaN, and its LSE of MLA, and no other."""
        problem = entry.build(device, seq_lens=lens[:1])
        problem.query[..., 3, 100] = math.nan

        result = entry.call(problem, return_lse=entry.name == "trtllm")

        out = (result[0] if entry.name == "trtllm" else result).flatten(0, -3)
        assert out[0].isnan().all(dim=1).nonzero().tolist() == [[3]]
        assert out.isnan().sum() == out.shape[-1]
        if entry.name == "trtllm":
            assert result[1][0].isnan().nonzero().tolist() == [[3]]
