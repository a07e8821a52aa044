"""Numerics and CTA throttling of the sm90 FP8 MLA kernel."""

from __future__ import annotations

import pytest
import torch

import mlagen
from tests.problems.entry_points import decode
from tests.problems.mla import MlaCase
from tests.problems.problem import E4M3
from tests.sm90_tiles import needs_sm90

pytestmark = [needs_sm90, pytest.mark.usefixtures("sm90")]

_LONG = 131_072  # tokens
_SEQUENCES = 264  # two per SM of an H200, so that none has many splits


def _in_few_splits(query: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
    """Return [sequences, heads, 512], for so many sequences that none has many splits.

    `query` is [heads, 576], or one per sequence before that; `cache` is shared by all of them,
    [tokens, 576], in whole pages.
    """
    tokens = len(cache)
    tables = torch.arange(tokens // 64, dtype=torch.int32, device="cuda").repeat(_SEQUENCES, 1)
    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        query=query.expand(_SEQUENCES, -1, -1).unsqueeze(1).contiguous(),
        kv_cache=cache.view(-1, 64, 576),
        workspace_buffer=torch.empty(64 << 20, dtype=torch.uint8, device="cuda"),
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=tables,
        seq_lens=torch.full((_SEQUENCES,), tokens, dtype=torch.int32, device="cuda"),
        max_seq_len=tokens,
        bmm1_scale=scale,
        bmm2_scale=1.0,
    )
    assert isinstance(out, torch.Tensor)
    return out[:, 0]


def _expected(query: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
    """Return [..., heads, 512] in float64."""
    keys = cache.double()
    return torch.softmax(query.double() @ keys.T * scale, dim=-1) @ keys[:, :512]


@pytest.mark.parametrize("scale", [192**-0.5, 1e-4], ids=["sharp", "flat"])
@pytest.mark.parametrize("tokens", [4096, _LONG])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_sums_of_positive_values_are_not_biased(heads: int, tokens: int, scale: float) -> None:
    """MMAs truncate sums; over a KV block of 64 tokens they lose less than 2^-11."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(tokens, 576, device="cuda", generator=generator)
    rows[:, :512] = rows[:, :512].abs()
    query = torch.randn(heads, 576, device="cuda", generator=generator).to(E4M3)
    cache = rows.to(E4M3)

    expected = _expected(query, cache, scale)
    error = (_in_few_splits(query, cache, scale)[0].double() - expected) / expected
    assert abs(error.mean().item()) < 2.0**-11
    assert error.square().mean().sqrt().item() < 1.5e-2


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_tokens_beside_a_dominant_token_keep_their_weight(heads: int) -> None:
    """Tokens beside an attention sink have some 2^-12 of its weight each.

    With a maximum of 2^7 they are rounded to e4m3 by at most 2^-4, some up and some down, so that
    the error over 4095 of them is below that of rounding to bf16, at most 2^-8. With a maximum of
    2^3, most would be 2^-9 or zero, and sums 7 % off.
    """
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(4096, 576, device="cuda", generator=generator)
    rows[:, :512] = rows[:, :512].abs()
    rows[:, 512:] = 0.0
    rows[0, 512] = 13.0
    query = torch.randn(heads, 576, device="cuda", generator=generator)
    query[:, 512] = 16.0
    query, cache = query.to(E4M3), rows.to(E4M3)

    expected = _expected(query, cache, 1 / 24)
    error = (_in_few_splits(query, cache, 1 / 24)[0].double() - expected) / expected
    assert error.square().mean().sqrt().item() < 2.0**-8


@pytest.mark.parametrize(
    ("heads", "bound"), [(16, 1.55e-2), (32, 1.55e-2), (64, 1.75e-2), (128, 1.75e-2)]
)
def test_errors_of_normal_scores_match_the_documentation(heads: int, bound: float) -> None:
    """With few rows the row max is updated often and exact."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    cache = torch.randn(4096, 576, device="cuda", generator=generator).to(E4M3)
    query = torch.randn(_SEQUENCES, heads, 576, device="cuda", generator=generator).to(E4M3)

    out = _in_few_splits(query, cache, 192**-0.5)

    expected = _expected(query[:32], cache, 192**-0.5)
    error = out[:32].double() - expected
    assert (error.norm() / expected.norm()).item() < bound


def test_a_dominant_token_is_not_rounded() -> None:
    """The row sum adds P as rounded for the MMA, so a single token has weight 1."""
    problem = MlaCase(seq_lens=(640,), heads=64, dtype=E4M3).build("cuda")
    query, cache = problem.query.float(), problem.kv_cache.float()
    cache[cache.isnan()] = 0.0
    pages = problem.block_tables[0, :10].long()
    cache[pages] = 0.0
    cache[pages[5], 17] = 1.0
    query[:] = 1.0
    exact = decode(
        problem,
        query=query.to(E4M3),
        kv_cache=cache.to(E4M3),
        bmm1_scale=0.1,
        sinks=None,
    )

    # 2^(576 * 0.1 * log2(e)) times the weight of any other
    assert torch.equal(exact, torch.ones_like(exact))


def test_increasing_scores_are_right() -> None:
    """Every KV block updates the row max, which rescales all previous sums."""
    problem = MlaCase(seq_lens=(2048,), heads=64, dtype=E4M3).build("cuda")
    query, cache = problem.query.float(), problem.kv_cache.float()
    cache[cache.isnan()] = 0.0
    pages = problem.block_tables[0, :32].long()
    growth = torch.linspace(-8, 8, 2048, device="cuda").view(32, 64)
    cache[pages, :, 512] = growth.to(E4M3).float()
    query[..., 512] = 64.0
    query, cache = query.to(E4M3), cache.to(E4M3)

    out = decode(problem, query=query, kv_cache=cache, sinks=None)

    keys = cache[pages].view(-1, 576).double()
    weights = torch.softmax(query[0, 0].double() @ keys.T * 192**-0.5, dim=-1)
    expected = weights @ keys[:, :512]
    error = (out[0, 0].double() - expected).norm() / expected.norm()
    assert error.item() < 4e-2


def _throttle_progress(lengths: list[int], heads: int, initial: int) -> tuple[torch.Tensor, int]:
    """Return the output of a call of such lengths, and the progress that its CTAs report.

    The word of the throttle is `initial` before the launch.
    """
    problem = MlaCase(seq_lens=tuple(lengths), heads=heads, dtype=E4M3).build("cuda")
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    partials = 2 * sms * heads * (512 * 2 + 16)  # two splits per CTA, at the end
    offset = workspace.numel() - partials + heads * 512 * 2  # behind one split
    word = workspace[offset : offset + 4].view(torch.int32)
    word.fill_(initial)
    out = decode(problem, workspace_buffer=workspace)
    assert isinstance(out, torch.Tensor)
    return out.clone(), (int(word) - initial) % 2**32


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_the_initial_progress_may_be_anything(heads: int) -> None:
    """Progress is a difference; it ends at the number of all KV blocks."""
    sequences = torch.cuda.get_device_properties(0).multi_processor_count
    lengths = [1024] * sequences
    expected, progress = _throttle_progress(lengths, heads, 0)
    assert progress == sequences * 1024 // 64

    for initial in (-1, 2**31 - 1, -(2**31), 12_345):
        result, progress = _throttle_progress(lengths, heads, initial)
        assert torch.equal(result, expected)
        assert progress == sequences * 1024 // 64


@pytest.mark.parametrize(
    "lengths",
    [[100_000], [5000] * 7, [70, 9000, 640, 0, 3000] * 30],
    ids=["one", "seven", "ragged"],
)
def test_the_throttle_word_holds_no_split(lengths: list[int]) -> None:
    """No combine reads or writes the word; with unequal work CTAs report no progress."""
    expected, progress = _throttle_progress(lengths, 16, 0)
    result, again = _throttle_progress(lengths, 16, 99)

    are_equal = len(set(lengths)) == 1
    assert progress == again
    assert progress <= (sum(-(-length // 64) for length in lengths) if are_equal else 0)
    assert torch.equal(result, expected)
