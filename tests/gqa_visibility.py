"""Tests of masks and windows of GQA decode for every device."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch

from tests.gqa_problems import GqaCase, GqaProblem
from tests.gqa_semantics import SHORT_AND_LONG, decode


class GqaVisibility:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @pytest.mark.parametrize("q_len", [5, 33, 64])
    @pytest.mark.parametrize("window", [0, 30])
    @pytest.mark.parametrize(
        ("kv_heads", "group", "dtype", "kv"),
        [
            (1, 3, torch.bfloat16, "16-bit"),
            (3, 4, torch.float16, "e4m3"),
            (2, 16, torch.bfloat16, "e4m3"),
            (2, 4, torch.float16, "16-bit"),
        ],
        ids=["1 x 3 of bf16", "3 x 4, fp16 over e4m3", "2 x 16, bf16 over e4m3", "2 x 4 of fp16"],
    )
    def test_only_the_mask_decides_attention(
        self, kv_heads: int, group: int, dtype: torch.dtype, kv: str, window: int, q_len: int
    ) -> None:
        """With equal scores and one-hot values, the output shows the attended tokens of a row."""
        prefix = 100
        case = GqaCase(
            name="",
            seq_lens=(prefix + q_len,),
            q_len=q_len,
            mask="random",
            head_dim=192,
            group=group,
            kv_heads=kv_heads,
            dtype=dtype,
            kv=kv,
            window=window,
            seed=q_len,
        )
        problem = case.build(self.device)
        problem.query.zero_()
        keys, values = problem.store.key, problem.store.value
        page = torch.arange(prefix + q_len) // 16
        slots = problem.block_tables[0].cpu()[page], torch.arange(prefix + q_len) % 16
        one_hot = torch.eye(prefix + q_len, 192)[:, None].expand(-1, kv_heads, -1).to(dtype)
        bytes_of = torch.uint8 if kv == "e4m3" else torch.int16  # e4m3 cannot be indexed
        keys.view(bytes_of)[slots] = 0
        values.view(bytes_of)[slots] = one_hot.to(values).view(bytes_of)

        out = decode(problem).view(q_len, case.heads, 192).cpu()

        for token in range(q_len):
            visible = problem.visible(0, token, token)
            expected = torch.zeros(192)
            expected[visible] = 1 / len(visible)
            assert torch.allclose(
                out[token].float(), expected.expand(case.heads, -1), rtol=2**-7, atol=0
            )

    @pytest.mark.parametrize("kv", ["16-bit", "e4m3", "nvfp4"])
    @pytest.mark.parametrize("mask", ["random", "causal", None])
    def test_nan_in_a_masked_draft_reaches_no_other_row(self, kv: str, mask: str | None) -> None:
        """NaN in a draft token reaches the rows whose mask bits include it, and no other."""
        case = GqaCase(name="", seq_lens=(100, 40, 33), q_len=33, mask=mask, kv=kv, head_dim=64)
        problem = case.build(self.device)
        clean = decode(problem)
        draft = 7
        for seq, length in enumerate(case.seq_lens):
            _poison(problem, seq, length - 33 + draft)

        out = decode(problem)

        for seq in range(3):
            for token in range(33):
                position = case.seq_lens[seq] - 33 + draft
                visible = problem.visible(seq, token, seq * 33 + token)
                if position in visible:
                    assert out[seq, token].isnan().all()
                else:
                    assert torch.equal(out[seq, token], clean[seq, token])

    @SHORT_AND_LONG
    @pytest.mark.parametrize("kv", ["16-bit", "e4m3", "nvfp4"])
    def test_nan_before_the_window_reaches_no_row(self, kv: str, length: int) -> None:
        """Tokens before the window count as memory that must not be read."""
        case = GqaCase(name="", seq_lens=(length, 64), q_len=4, window=20, kv=kv)
        problem = case.build(self.device)
        for seq, tokens in enumerate(case.seq_lens):
            for position in range(max(0, tokens - 3 - 20 - 30), tokens - 3 - 20):
                _poison(problem, seq, position)

        out = decode(problem)

        problem.check(out)

    def test_a_token_before_the_window_of_later_rows(self) -> None:
        """NaN in the oldest token of row 0's window reaches row 0 only."""
        case = GqaCase(name="", seq_lens=(90, 64), q_len=4, window=20)
        problem = case.build(self.device)
        clean = decode(problem)
        for seq, tokens in enumerate(case.seq_lens):
            _poison(problem, seq, tokens - 4 + 1 - 20)

        out = decode(problem)

        assert out[:, 0].isnan().all()
        assert torch.equal(out[:, 1:], clean[:, 1:])

    @pytest.mark.parametrize("dtype", [torch.uint32, torch.int32])
    def test_masks_as_32_bit_words(self, dtype: torch.dtype) -> None:
        """The mask may be viewed as 32-bit words, and be flat over query tokens."""
        case = GqaCase(name="", seq_lens=(70, 50), q_len=33, mask="random")
        problem = case.build(self.device)
        assert problem.mask is not None

        out = decode(problem, mask=problem.mask.view(dtype).view(66, 2))

        problem.check(out)

    def test_a_mask_without_drafts_is_not_read(self) -> None:
        """A single query token attends to itself, whatever the mask."""
        problem = GqaCase(name="", seq_lens=(70, 3)).build(self.device)
        mask = torch.zeros(1, dtype=torch.uint16, device=self.device)

        out = decode(problem, mask=mask)

        problem.check(out)


def _poison(problem: GqaProblem, seq: int, position: int) -> None:
    """Set one token of a sequence to NaN, in keys and values."""
    store, page_size = problem.store, problem.case.page_size
    page = int(problem.block_tables[seq, position // page_size])
    slot = page, position % page_size
    if store.key_scale is not None and store.value_scale is not None:
        store.key_scale[slot] = store.value_scale[slot] = 0x7F
    elif problem.case.kv == "e4m3":
        store.key.view(torch.uint8)[slot] = store.value.view(torch.uint8)[slot] = 0x7F
    else:
        store.key[slot] = store.value[slot] = math.nan
