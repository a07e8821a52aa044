"""NaN in a token reaches the rows that attend to it, and no other, for every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.problems.entry_points import ENTRY_POINTS, compute, decode_gqa
from tests.problems.gqa import GqaCase
from tests.problems.mla import KINDS, mla_case


class TestMaskedTokens:
    """Rules of masks, windows and biases, on the device of the fixture."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_nan_in_a_masked_mla_token_reaches_no_other_row(self, kind: str, device: str) -> None:
        """NaN in the newest token reaches the last query token only."""
        problem = mla_case(kind, seq_lens=(100, 64, 33), q_len=4).build(device)

        _check_poison(problem, 3, lambda given: compute(given)[0])

    @pytest.mark.parametrize("kv", ["16-bit", "e4m3", "nvfp4"])
    @pytest.mark.parametrize("mask", ["random", "causal", None])
    def test_nan_in_a_masked_draft_reaches_no_other_row(
        self, kv: str, mask: str | None, device: str
    ) -> None:
        """NaN in a draft token reaches the rows whose mask bits include it, and no other."""
        entry, lens = ENTRY_POINTS["xqa_batch"], (100, 40, 33)
        problem = entry.build(device, seq_lens=lens, q_len=33, mask=mask, kv=kv, head_dim=64)

        _check_poison(problem, 7, entry.run)

    @pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
    def test_nan_in_the_oldest_token_of_a_window(self, kv: str, device: str) -> None:
        """NaN in the oldest token of row 0's window reaches row 0 only."""
        entry = ENTRY_POINTS["xqa_batch"]
        problem = entry.build(device, seq_lens=(90, 64), q_len=4, window=20, kv=kv)

        _check_poison(problem, -19, entry.run)

    @pytest.mark.parametrize("length", [70, 5000], ids=["whole", "split"])
    @pytest.mark.parametrize(
        ("name", "facts"),
        [
            *(("xqa_batch", {"window": 20, "kv": kv}) for kv in ("16-bit", "e4m3", "nvfp4")),
            *(("flare", KINDS[kind] | {"mask": "window of 3"}) for kind in ("bf16", "e4m3")),
        ],
        ids=str,
    )
    def test_nan_before_the_window_reaches_no_row(
        self, name: str, facts: dict[str, Any], length: int, device: str
    ) -> None:
        """Tokens before the window count as memory that must not be read."""
        entry = ENTRY_POINTS[name]
        problem = entry.build(device, seq_lens=(length, 64), q_len=4, **facts)
        for seq, tokens in enumerate(problem.case.seq_lens):
            oldest = tokens - 3 - problem.case.window if name == "xqa_batch" else tokens - 6
            for position in range(max(0, oldest - 30), oldest):
                problem.poison(seq, position)

        problem.check(entry.run(problem))

    @pytest.mark.parametrize("length", [70, 5000], ids=["whole", "split"])
    @pytest.mark.parametrize("kind", ["bf16", "e4m3"])
    def test_nan_in_a_token_masked_by_bias_reaches_nothing(
        self, kind: str, length: int, device: str
    ) -> None:
        """A bias of minus infinity masks a token for all heads or for some."""
        problem = mla_case(kind, seq_lens=(length,), q_len=2, bias="for each head").build(device)
        bias = torch.zeros(2, 16, length, device=device)
        bias[:, :, 7] = -math.inf
        bias[:, 3:, 40] = -math.inf
        bias[0, 3:, 41] = -math.inf
        expected, _ = compute(problem, bias=bias)
        for position in (7, 40, 41):
            problem.poison(0, position)

        out, _ = compute(problem, bias=bias)

        assert out[0, :, :3].isnan().all()
        assert torch.equal(out[0, 0, 3:], expected[0, 0, 3:])
        assert out[0, 1, 3:].isnan().all()  # the second query token attends to position 41

    @pytest.mark.parametrize("dtype", [torch.uint32, torch.int32])
    def test_masks_as_32_bit_words(self, dtype: torch.dtype, device: str) -> None:
        """The mask may be viewed as 32-bit words, and be flat over query tokens."""
        problem = GqaCase(seq_lens=(70, 50), q_len=33, mask="random").build(device)
        assert problem.mask is not None

        problem.check(decode_gqa(problem, mask=problem.mask.view(dtype).view(66, 2)))

    def test_a_mask_without_drafts_is_not_read(self, device: str) -> None:
        """A single query token attends to itself, whatever the mask."""
        problem = GqaCase(seq_lens=(70, 3)).build(device)
        mask = torch.zeros(1, dtype=torch.uint16, device=device)

        problem.check(decode_gqa(problem, mask=mask))


def _check_poison(problem: Any, draft: int, run: Callable[[Any], torch.Tensor]) -> None:
    """Fail unless NaN in a token, counted from the first draft, reaches the rows that see it."""
    case = problem.case
    shape = (len(case.seq_lens), case.q_len, -1)
    clean = run(problem).view(shape)
    for seq, length in enumerate(case.seq_lens):
        problem.poison(seq, length - case.q_len + draft)

    out = run(problem).view(shape)

    for seq, length in enumerate(case.seq_lens):
        for index in range(case.q_len):
            if problem.sees(seq, index, length - case.q_len + draft):
                assert out[seq, index].isnan().all()
            else:
                assert torch.equal(out[seq, index], clean[seq, index])
