"""NaN in a token reaches the rows that attend to it, and no other, for every device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.problems.entry_points import ENTRY_POINTS, compute, decode_gqa
from tests.problems.gqa import GqaCase
from tests.problems.mla import KINDS, mla_case

DRAFTS = {"seq_lens": (100, 40, 33), "q_len": 33, "head_dim": 64}
NEWEST = {"seq_lens": (100, 64, 33), "q_len": 4}
WINDOW = {"seq_lens": (90, 64), "q_len": 4, "window": 20}
# Problems, and the place of a token, counted from the first new one.
POISONED: list[tuple[Any, int]] = [
    *((mla_case(kind, **NEWEST), 3) for kind in KINDS),
    *(
        (GqaCase(**DRAFTS, kv=kv, mask=mask), 7)  # type: ignore[arg-type]
        for kv in ("16-bit", "e4m3", "nvfp4")
        for mask in ("random", "causal", None)
    ),
    *((GqaCase(**WINDOW, kv=kv), -19) for kv in ("16-bit", "e4m3")),  # type: ignore[arg-type]
]


class TestMaskedTokens:
    """Rules of masks, windows and biases, on the device of the fixture."""

    @pytest.mark.parametrize(("case", "place"), POISONED, ids=str)
    def test_nan_in_a_token_reaches_the_rows_that_attend_to_it(
        self, case: Any, place: int, device: str
    ) -> None:
        """Of the newest token, a draft and the oldest token of a window: others keep every bit."""
        problem = case.build(device)
        shape = (len(case.seq_lens), case.q_len, -1)

        def run() -> torch.Tensor:
            out = decode_gqa(problem) if isinstance(case, GqaCase) else compute(problem)[0]
            return out.view(shape)

        clean = run()
        positions = [length - case.q_len + place for length in case.seq_lens]
        for seq, position in enumerate(positions):
            problem.poison(seq, position)

        out = run()

        for seq, position in enumerate(positions):
            for index in range(case.q_len):
                if problem.sees(seq, index, position):
                    assert out[seq, index].isnan().all()
                else:
                    assert torch.equal(out[seq, index], clean[seq, index])

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
