"""Merges of attention states against float64, emulated too, and what they reject."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mlagen import cascade
from mlagen.cascade import (
    States,
    combine_states,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.kernel import KernelSpec
from tests.emulator.emulated import COMPILER
from tests.emulator.emulated import launch as emulate
from tests.kernels import SM_80
from tests.odd_values import nested
from tests.problems.problem import bf16
from tests.rejected import rejections, rejects

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
BASES = {"base2": math.log(2), "basee": 1.0}  # in natural units


def states(
    count: int, dtype: torch.dtype, device: str, *, n: int = 3, heads: int = 4, dim: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states ``[n, count, heads, dim]`` with their LSE, some empty and full of NaN."""
    generator = torch.Generator().manual_seed(count)
    v = torch.randn(n, count, heads, dim, generator=generator).to(dtype)
    s = torch.randn(n, count, heads, generator=generator) * 5
    empty = torch.rand(s.shape, generator=generator) < 0.3
    empty[:1, :, 0] = True  # of no keys at all
    v[empty], s[empty] = math.nan, -math.inf
    return v.to(device), s.to(device)


def check_merged(
    merged: tuple[torch.Tensor, torch.Tensor],
    v: torch.Tensor,
    s: torch.Tensor,
    base: str = "base2",
) -> None:
    """Fail unless output and LSE are within the rounding of float64's."""
    exact, lse = v.double().cpu(), s.double().cpu() * BASES[base]
    total = torch.logsumexp(lse, dim=1) if s.shape[1] else lse.new_full(merged[1].shape, -math.inf)
    weights = (lse - total[:, None]).exp().masked_fill(lse == -math.inf, 0.0)
    out = (exact.masked_fill((lse == -math.inf)[..., None], 0.0) * weights[..., None]).sum(dim=1)
    assert merged[0].dtype is v.dtype
    assert merged[1].dtype is torch.float32
    largest = out.abs().clamp(min=1.0)
    assert ((merged[0].double().cpu() - out).abs() <= ROUNDING[v.dtype] * largest).all()
    wanted = (total / BASES[base]).float()
    assert torch.allclose(merged[1].cpu(), wanted, rtol=1e-5, atol=1e-5)


class TestCascade:
    """Merges, on the device of the fixture."""

    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    @pytest.mark.parametrize("count", [0, 1, 2, 3, 17])
    def test_states_merge(self, count: int, dtype: torch.dtype, base: str, device: str) -> None:
        """Any number of states, also none, and empty ones whose output is NaN."""
        v, s = states(count, dtype, device)

        check_merged(merge_states(v, s, base=base), v, s, base)

    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("dtype", ROUNDING, ids=str)
    def test_two_states_merge(self, dtype: torch.dtype, base: str, device: str) -> None:
        """Into new tensors and in place alike."""
        v, s = states(2, dtype, device)
        merged = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1], base=base)
        check_merged(merged, v, s, base)
        out, lse = v[:, 0].clone(), s[:, 0].clone()

        merge_state_in_place(out, lse, v[:, 1].contiguous(), s[:, 1].contiguous(), base=base)

        assert torch.equal(out, merged[0])
        assert torch.equal(lse, merged[1])

    @pytest.mark.parametrize("count", [0, 1, 3])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_an_lse_of_another_dtype_is_converted(
        self, dtype: torch.dtype, count: int, device: str
    ) -> None:
        """Each function merges as if the caller had converted it to fp32."""
        v, s = states(count, torch.bfloat16, device)
        s = (s + 100.0).to(dtype)
        converted, first = s.float(), states(1, torch.bfloat16, device)

        check_merged(merge_states(v, s), v, converted)
        for index in range(count):
            state, (out, lse) = (v[:, index], s[:, index]), (part[:, 0] for part in first)
            both = torch.stack((out, state[0]), dim=1), torch.stack((lse, converted[:, index]), 1)
            check_merged(merge_state(*state, out, lse), *both)
            check_merged(merge_state(out, lse, *state), *both)
            merge_state_in_place(out, lse, *state)
            check_merged((out, lse), *both)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
    def test_a_mask_chooses_the_rows_that_merge(self, dtype: torch.dtype, device: str) -> None:
        """Other rows keep every bit."""
        v, s = states(2, torch.bfloat16, device)
        merged = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        out, lse = v[:, 0].clone(), s[:, 0].clone()
        mask = torch.tensor([True, False, True], device=device)

        merge_state_in_place(out, lse, v[:, 1].clone(), s[:, 1].clone(), mask.to(dtype))

        assert torch.equal(out[mask], merged[0][mask])
        assert torch.equal(lse[mask], merged[1][mask])
        assert torch.equal(out[1].view(torch.int16), v[1, 0].view(torch.int16))
        assert torch.equal(lse[1], s[1, 0])

    def test_rows_do_not_depend_on_strides(self, device: str) -> None:
        """States along any axis, as an all-to-all leaves them, merge to the same bits."""
        v, s = states(4, torch.bfloat16, device)
        wide = torch.full((4, 3, 4, 96), math.nan, dtype=v.dtype, device=device)
        wide[..., :64] = v.transpose(0, 1)
        by_rank = s.transpose(0, 1).contiguous()

        out, lse = merge_states(wide[..., :64].transpose(0, 1), by_rank.transpose(0, 1))

        expected, expected_lse = merge_states(v, s)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)

    def test_one_state_is_copied_into_a_message(self, device: str) -> None:
        """Rows with their LSE behind each keep every bit; an empty one, even NaN, is zeros."""
        v, s = states(1, torch.bfloat16, device)
        message = torch.full((4, 3, 144), 0xFF, dtype=torch.uint8, device=device)
        out = message[..., :128].view(torch.bfloat16).transpose(0, 1)
        lse = message[..., 128:].view(torch.float32)[..., 0].transpose(0, 1)

        nothing = States(v[:, :0], s[:, :0])
        combine_states(States(v[:, 0], s[:, 0]), nothing, "base2", into=States(out, lse))

        assert torch.equal(out, v[:, 0].nan_to_num())
        assert torch.equal(lse, s[:, 0])
        assert (message[..., 132:] == 0xFF).all()

    def test_rows_may_have_gaps_in_a_row(self, device: str) -> None:
        """Elements need not be adjacent."""
        v, s = states(3, torch.bfloat16, device)
        wide = v.repeat_interleave(2, dim=-1)

        check_merged(merge_states(wide[..., ::2], s), v, s)

    @pytest.mark.parametrize("dim", [1, 7, 12, 512, 576])
    def test_any_head_dim_merges(self, dim: int, device: str) -> None:
        """Also rows of fewer than 16 bytes."""
        v, s = states(3, torch.float16, device, dim=dim)

        check_merged(merge_states(v, s), v, s)

    def test_plus_infinity_is_an_empty_state(self, device: str) -> None:
        """As in FlashMLA and FlashAttention-2, it has no weight."""
        v, s = states(3, torch.bfloat16, device)

        out, lse = merge_states(v, torch.where(s == -math.inf, math.inf, s))

        assert torch.equal(out, merge_states(v, s)[0])
        assert torch.equal(lse, merge_states(v, s)[1])

    def test_nan_in_an_lse_is_nan_in_its_row(self, device: str) -> None:
        """And in no other."""
        v, s = states(3, torch.bfloat16, device)
        s[1, 2, 3] = math.nan

        out, lse = merge_states(v, s)

        assert lse.isnan().nonzero().tolist() == [[1, 3]]
        assert out.isnan().any(dim=2).nonzero().tolist() == [[1, 3]]

    def test_distant_states_do_not_overflow(self, device: str) -> None:
        """LSE 10000 apart, and as large, leave the larger state as it is."""
        v, s = states(2, torch.bfloat16, device)
        v, s = v.nan_to_num(1.0), torch.zeros_like(s)
        s[:, 1] = 10000.0

        out, lse = merge_states(v, s)

        assert torch.equal(out, v[:, 1])
        assert torch.equal(lse, s[:, 1])

    def test_no_rows_merge_to_no_rows(self, device: str) -> None:
        """A batch may be empty."""
        v, s = states(2, torch.bfloat16, device, n=0)

        out, lse = merge_states(v, s)

        assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_state_may_interleave_with_the_other(dim: int) -> None:
    """Both may be views of one tensor that share no element."""
    both = torch.randn(3, 4, 64).repeat_interleave(2, dim)
    v, v_other = both.view(*both.shape[:dim], -1, 2, *both.shape[dim + 1 :]).unbind(dim + 1)
    expected = v.clone()

    merge_state_in_place(v, torch.zeros(3, 4), v_other, torch.full((3, 4), -math.inf))

    assert torch.equal(v, expected)


V, S, LONG = bf16(3, 4, 64), torch.zeros(3, 4), torch.zeros(4, 4, 128)


@rejections(
    [
        ("v", V.double(), ".dtype: expected torch.bfloat16 or torch.float16 or torch.float32, ..."),
        ("v", V[0], ".ndim: expected 3, got 2"),
        ("v", nested(V), ": expected a dense tensor in memory, got a nested tensor"),
        ("s", nested(S), ": expected a dense tensor in memory, got a nested tensor"),
        ("s", S.half(), ".dtype: expected torch.float32, got torch.float16"),
        ("s", S[:2], ".shape: expected [3, 4] (rows of v), got [2, 4]"),
        ("v_other", V.half(), ".dtype: expected torch.bfloat16 (dtype of v), got torch.float16"),
        ("v_other", V[:, :2], ".shape: expected [3, 4, 64] (v), got [3, 2, 64]"),
        ("s_other", S.int(), ".dtype: expected torch.float32 or torch.bfloat16 or ..."),
        ("v_other", V, ": expected other memory than the state's, got the same"),
        ("s_other", S, ": expected other memory than the state's, got the same"),
        *(
            ("v_other", {"v": one, "v_other": other}, ": expected other memory than the ...")
            for one, other in (
                (LONG[:3, :, :64], LONG[1:, :, :64]),
                (LONG[1:, :, :64], LONG[:3, :, :64]),
                (LONG[:3, :, :64], LONG[:3, :, 63:127]),
                (LONG[:3, :, ::2], LONG[:3, :, :64]),
            )
        ),
        ("s_other", {"s": LONG[0, :3, :4], "s_other": LONG[0, 1:, :4]}, ": expected other ..."),
        ("v", torch.nn.Parameter(V), ": expected a tensor that may be written in place, got a ..."),
        ("s", S[:, :1].expand(3, 4), ": expected elements that do not overlap, got strides (4, 0)"),
        ("mask", torch.ones(3), ".dtype: expected torch.bool or torch.uint8, got torch.float32"),
        ("mask", torch.ones(2, dtype=torch.bool), ".shape: expected [3] (n), got [2]"),
        ("base", "10", ": expected one of base2, basee, got '10'"),
        ("v_other", None, ": expected a torch.Tensor, got NoneType"),
    ]
)
def test_a_merge_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The message has argument, rule and value."""
    given: dict[str, Any] = {"v": V, "s": S, "v_other": V.clone(), "s_other": S.clone()}

    with rejects(message):
        merge_state_in_place(**given | changes)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
class TestCascadeEmulated(TestCascade):
    """Every merge, by emulated launches where a GPU would launch the kernel."""

    @pytest.fixture(autouse=True)
    def launches(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return the CTAs of each launch."""
        recorded: list[int] = []

        def launch(kernel: LoadedKernel, blocks: int, _: bool, values: tuple[Any, ...]) -> None:
            recorded.append(blocks)
            emulate(kernel.spec, kernel.packing.struct.pack(*values), blocks, 0)

        def loaded(spec: KernelSpec, _: int) -> LoadedKernel:
            return LoadedKernel(spec, 0, ParameterPacking(spec), None, None)

        monkeypatch.setattr(cascade, "_gpu_of", lambda _: 0)
        monkeypatch.setattr(cascade, "arch_of_device", lambda _: SM_80)
        monkeypatch.setattr(cascade, "kernel_for", loaded)
        monkeypatch.setattr(cascade, "launch", launch)
        return recorded

    def test_rows_that_are_aligned_take_the_kernel(self, launches: list[int]) -> None:
        """Also strided ones; four rows for a CTA."""
        self.test_rows_do_not_depend_on_strides("cpu")

        assert launches == [3, 3]
