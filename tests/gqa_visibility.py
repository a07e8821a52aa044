"""What grouped-query decode promises of masks and windows; the tests of each device inherit it."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch

from tests.gqa_problems import GqaCase, GqaProblem
from tests.gqa_semantics import SHORT_AND_LONG, decode


class GqaVisibility:
    """The tests; a subclass names the device."""

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
    def test_the_mask_decides_and_nothing_else(
        self, kv_heads: int, group: int, dtype: torch.dtype, kv: str, window: int, q_len: int
    ) -> None:
        """With equal scores, a row is the average of one-hot values: it shows what the row saw."""
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
            seen = problem.visible(0, token, token)
            expected = torch.zeros(192)
            expected[seen] = 1 / len(seen)
            assert torch.allclose(
                out[token].float(), expected.expand(case.heads, -1), rtol=2**-7, atol=0
            )

    @pytest.mark.parametrize("kv", ["16-bit", "e4m3", "nvfp4"])
    @pytest.mark.parametrize("mask", ["random", "causal", None])
    def test_a_hidden_draft_with_nan_reaches_no_row_that_may_not_see_it(
        self, kv: str, mask: str | None
    ) -> None:
        """NaN in a draft is seen by the rows whose bits say so, and by no other."""
        case = GqaCase(name="", seq_lens=(100, 40, 33), q_len=33, mask=mask, kv=kv, head_dim=64)
        problem = case.build(self.device)
        clean = decode(problem)
        draft = 7
        for request, length in enumerate(case.seq_lens):
            _poison(problem, request, length - 33 + draft)

        out = decode(problem)

        for request in range(3):
            for token in range(33):
                position = case.seq_lens[request] - 33 + draft
                seen = problem.visible(request, token, request * 33 + token)
                if position in seen:
                    assert out[request, token].isnan().all()
                else:
                    assert torch.equal(out[request, token], clean[request, token])

    @SHORT_AND_LONG
    @pytest.mark.parametrize("kv", ["16-bit", "e4m3", "nvfp4"])
    def test_nan_before_the_window_reaches_no_row(self, kv: str, length: int) -> None:
        """Tokens that left the window count as memory that must not be read."""
        case = GqaCase(name="", seq_lens=(length, 64), q_len=4, window=20, kv=kv)
        problem = case.build(self.device)
        for request, tokens in enumerate(case.seq_lens):
            for position in range(max(0, tokens - 3 - 20 - 30), tokens - 3 - 20):
                _poison(problem, request, position)

        out = decode(problem)

        problem.check(out)

    def test_a_token_that_leaves_the_window_of_the_later_rows_only(self) -> None:
        """NaN in the oldest token that row 0 sees is seen by row 0 alone."""
        case = GqaCase(name="", seq_lens=(90, 64), q_len=4, window=20)
        problem = case.build(self.device)
        clean = decode(problem)
        for request, tokens in enumerate(case.seq_lens):
            _poison(problem, request, tokens - 4 + 1 - 20)

        out = decode(problem)

        assert out[:, 0].isnan().all()
        assert torch.equal(out[:, 1:], clean[:, 1:])

    @pytest.mark.parametrize("dtype", [torch.uint32, torch.int32])
    def test_masks_of_whole_words(self, dtype: torch.dtype) -> None:
        """The bytes of a mask may be viewed as 32-bit words, and lie flat over query tokens."""
        case = GqaCase(name="", seq_lens=(70, 50), q_len=33, mask="random")
        problem = case.build(self.device)
        assert problem.mask is not None

        out = decode(problem, mask=problem.mask.view(dtype).view(66, 2))

        problem.check(out)

    def test_a_mask_without_drafts_is_not_looked_at(self) -> None:
        """A single query token sees itself, whatever is given for a mask."""
        problem = GqaCase(name="", seq_lens=(70, 3)).build(self.device)
        mask = torch.zeros(1, dtype=torch.uint16, device=self.device)

        out = decode(problem, mask=mask)

        problem.check(out)


def _poison(problem: GqaProblem, request: int, position: int) -> None:
    """Make one token of a request NaN, in keys and values."""
    store, page_size = problem.store, problem.case.page_size
    page = int(problem.block_tables[request, position // page_size])
    slot = page, position % page_size
    if store.key_scale is not None and store.value_scale is not None:
        store.key_scale[slot] = store.value_scale[slot] = 0x7F
    elif problem.case.kv == "e4m3":
        store.key.view(torch.uint8)[slot] = store.value.view(torch.uint8)[slot] = 0x7F
    else:
        store.key[slot] = store.value[slot] = math.nan
