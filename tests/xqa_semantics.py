"""Tests of the entry points of flashinfer.xqa for every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import mlagen.xqa
from tests.cases import MlaCase, MlaProblem
from tests.gqa_problems import E4M3, GqaCase, GqaProblem

E4M3_FACTOR = 4.0  # rcp_out_scale


def xqa_arguments(problem: GqaProblem, **changes: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``xqa``, from those of ``xqa_batch_decode_with_kv_cache``."""
    case = problem.case
    given = problem.arguments()
    device, batch = problem.query.device, len(case.seq_lens)
    query = problem.query
    if case.q_lens is None:
        leading = (batch, 1) if case.q_len == 1 else (batch, 1, case.q_len)
        query = query.view(*leading, case.heads, case.head_dim)
    k_cache, v_cache = given["kv_cache"]
    k_sf_cache, v_sf_cache = given["kv_cache_sf"] or (None, None)
    factor = E4M3_FACTOR if case.result_dtype is E4M3 else 1.0
    kv_scale = case.result_scale / factor
    q_scale = case.scale * math.sqrt(case.head_dim) / kv_scale
    if case.kv == "16-bit":
        assert kv_scale == 1.0
        kv_scale = 3.0  # ignored
    arguments = {
        "q": query,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": given["block_tables"],
        "seq_lens": problem.seq_lens[:, None],
        "output": torch.full(query.shape, math.nan, dtype=torch.float32, device=device).to(
            case.result_dtype
        ),
        "workspace_buffer": given["workspace_buffer"],
        "semaphores": torch.full((8,), 7, dtype=torch.int32, device=device).view(torch.uint32),
        "num_kv_heads": case.kv_heads,
        "page_size": case.page_size,
        "sinks": problem.sinks.view(case.kv_heads, -1) if problem.sinks is not None else None,
        "q_scale": q_scale,
        "kv_scale": kv_scale,
        "sliding_win_size": case.window,
        "kv_layout": case.layout,
        "rcp_out_scale": E4M3_FACTOR,
        "q_seq_len": case.longest_q,
        "mask": problem.mask,
        "q_cu_seq_lens": problem.cum_seq_lens_q,
        "k_sf_cache": k_sf_cache,
        "v_sf_cache": v_sf_cache,
    }
    return arguments | changes


def run_xqa(problem: GqaProblem, **changes: Any) -> torch.Tensor:
    """Return the output for a problem, with some arguments replaced."""
    arguments = xqa_arguments(problem, **changes)
    mlagen.xqa.xqa(**arguments)
    output: torch.Tensor = arguments["output"]
    return output


def xqa_mla_arguments(problem: MlaProblem, **changes: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``xqa_mla``."""
    case, device = problem.case, problem.query.device
    given = problem.arguments()
    out_dtype = torch.bfloat16 if case.dtype is E4M3 else case.dtype
    shape = (*problem.query.shape[:-1], 512)
    arguments = {
        "q": problem.query,
        "k_cache": problem.kv_cache,
        "v_cache": problem.extra_args.get("value_cache", problem.kv_cache),
        "page_table": problem.block_tables,
        "seq_lens": problem.seq_lens[:, None],
        "output": torch.full(shape, math.nan, dtype=out_dtype, device=device),
        "workspace_buffer": given["workspace_buffer"],
        "semaphores": torch.full((8,), 7, dtype=torch.int32, device=device),
        "page_size": case.page_size,
        "q_scale": case.score_scale,
        "kv_scale": case.output_scale,
    }
    return arguments | changes


def run_xqa_mla(problem: MlaProblem, **changes: Any) -> torch.Tensor:
    """Return the output for a problem, with some arguments replaced."""
    arguments = xqa_mla_arguments(problem, **changes)
    mlagen.xqa.xqa_mla(**arguments)
    output: torch.Tensor = arguments["output"]
    return output


MLA_CASE = MlaCase(
    name="", dtype=E4M3, seq_lens=(70, 3, 0), output_scale=0.5, scores_take_bmm2=True
)


class XqaSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @pytest.mark.parametrize("kv", ["16-bit", "e4m3", "int8", "nvfp4"])
    @pytest.mark.parametrize("length", [70, 5000], ids=["whole", "split"])
    def test_scales_may_be_tensors(self, kv: str, length: int) -> None:
        """A scale in an fp32 tensor of zero or one dimension equals the float."""
        scale = 1.0 if kv == "16-bit" else 0.5
        case = GqaCase(name="", seq_lens=(length, 3), kv=kv, output_scale=scale)
        problem = case.build(self.device)
        given = xqa_arguments(problem)

        out = run_xqa(
            problem,
            q_scale=torch.tensor(given["q_scale"], device=self.device),
            kv_scale=torch.tensor([given["kv_scale"]], device=self.device),
        )

        problem.check(out)

    def test_kv_scale_is_ignored_for_a_16_bit_cache(self) -> None:
        """As in FlashInfer, a 16-bit cache ignores kv_scale, even NaN."""
        problem = GqaCase(name="", seq_lens=(70, 3)).build(self.device)

        out = run_xqa(problem, kv_scale=math.nan)

        problem.check(out)

    def test_the_output_is_written_in_place(self) -> None:
        """`xqa` returns None."""
        problem = GqaCase(name="", seq_lens=(70, 3)).build(self.device)
        arguments = xqa_arguments(problem)

        entry_point: Callable[..., object] = mlagen.xqa.xqa
        assert entry_point(**arguments) is None

        problem.check(arguments["output"])

    def test_semaphores_are_not_accessed(self) -> None:
        """The semaphores are neither read nor written."""
        problem = GqaCase(name="", seq_lens=(5000, 3)).build(self.device)
        arguments = xqa_arguments(problem)

        mlagen.xqa.xqa(**arguments)

        assert (arguments["semaphores"].view(torch.int32) == 7).all()

    def test_flat_lengths_and_sinks(self) -> None:
        """Lengths `[batch]` and sinks `[heads]` equal those of two dimensions."""
        problem = GqaCase(name="", seq_lens=(70, 3), sink=3.0).build(self.device)

        out = run_xqa(problem, seq_lens=problem.seq_lens, sinks=problem.sinks)

        problem.check(out)

    @pytest.mark.parametrize("sm_count", [1, 7, 132])
    def test_sm_count_changes_nothing(self, sm_count: int) -> None:
        """The result is bitwise equal for any sm_count."""
        problem = GqaCase(name="", seq_lens=(5000, 3)).build(self.device)

        out = run_xqa(problem, sm_count=sm_count)

        assert torch.equal(out, run_xqa(problem))

    def test_a_window_below_one_is_off(self) -> None:
        """Zero and negative windows disable the window."""
        problem = GqaCase(name="", seq_lens=(70, 3)).build(self.device)

        out = run_xqa(problem, sliding_win_size=-1)

        problem.check(out)

    def test_mla_scales_may_be_tensors(self) -> None:
        """A scale in an fp32 tensor of zero or one dimension equals the float."""
        problem = MLA_CASE.build(self.device)

        out = run_xqa_mla(
            problem,
            q_scale=torch.tensor(192**-0.5, device=self.device),
            kv_scale=torch.tensor([0.5], device=self.device),
        )

        problem.check(out)

    def test_mla_scales_may_be_ints(self) -> None:
        """A scale of 1 equals 1.0."""
        case = MlaCase(name="", dtype=E4M3, seq_lens=(70, 3), score_scale=1.0)
        problem = case.build(self.device)

        out = run_xqa_mla(problem, q_scale=1, kv_scale=1)

        problem.check(out)

    def test_mla_values_may_be_a_view_of_the_keys(self) -> None:
        """V may be the first 512 elements of each token, in the same memory."""
        problem = MLA_CASE.build(self.device)

        out = run_xqa_mla(problem, v_cache=problem.kv_cache[..., :512])

        problem.check(out)

    def test_mla_lengths_may_be_flat(self) -> None:
        """`[batch]` equals `[batch, 1]`."""
        problem = MLA_CASE.build(self.device)

        out = run_xqa_mla(problem, seq_lens=problem.seq_lens)

        problem.check(out)
