"""What the Hopper MLA kernel for e4m3 promises besides: sums of any length, and any scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mlagen
from tests.cases import E4M3, MlaCase
from tests.hopper_tiles import taking_hopper_kernels
from tests.mla_semantics import compute, decode

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

_LONG = 131_072  # tokens
_REQUESTS = 264  # two for each SM of an H200, so that none is computed in many pieces


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every call of this file take the sm90 kernel, and the tile for its rows."""
    with taking_hopper_kernels(monkeypatch):
        yield


def _uncut(query: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
    """Return [requests, heads, 512], of so many requests that none is cut in many pieces.

    `query` is [heads, 576], or one for each request before that; `cache` is what all of them see,
    [tokens, 576], whole pages.
    """
    tokens = len(cache)
    tables = torch.arange(tokens // 64, dtype=torch.int32, device="cuda").repeat(_REQUESTS, 1)
    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        query=query.expand(_REQUESTS, -1, -1).unsqueeze(1).contiguous(),
        kv_cache=cache.view(-1, 64, 576),
        workspace_buffer=torch.empty(64 << 20, dtype=torch.uint8, device="cuda"),
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=tables,
        seq_lens=torch.full((_REQUESTS,), tokens, dtype=torch.int32, device="cuda"),
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
def test_sums_of_positive_values_are_not_too_small(heads: int, tokens: int, scale: float) -> None:
    """The tensor cores cut sums off; as many as a block of 64 tokens has lose less than 2^-11."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(tokens, 576, device="cuda", generator=generator)
    rows[:, :512] = rows[:, :512].abs()
    query = torch.randn(heads, 576, device="cuda", generator=generator).to(E4M3)
    cache = rows.to(E4M3)

    expected = _expected(query, cache, scale)
    error = (_uncut(query, cache, scale)[0].double() - expected) / expected
    assert abs(error.mean().item()) < 2.0**-11
    assert error.square().mean().sqrt().item() < 1.5e-2


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_tokens_beside_one_with_half_of_the_weight_keep_theirs(heads: int) -> None:
    """As those beside an attention sink: each has some 2^-12 of its weight.

    Beside one of 2^7 they are rounded in e4m3 by 2^-4 at the most, some up and some down, so that
    of 4095 less is left than of rounding to bf16, 2^-8 at the most. Beside one of 2^3, most would
    be 2^-9 or nothing, and sums 7 % off.
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
    error = (_uncut(query, cache, 1 / 24)[0].double() - expected) / expected
    assert error.square().mean().sqrt().item() < 2.0**-8


@pytest.mark.parametrize(
    ("heads", "bound"), [(16, 1.55e-2), (32, 1.55e-2), (64, 1.75e-2), (128, 1.75e-2)]
)
def test_errors_of_normal_scores_are_those_documented(heads: int, bound: float) -> None:
    """Maxima are exact where references move often, as they do with few rows."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    cache = torch.randn(4096, 576, device="cuda", generator=generator).to(E4M3)
    query = torch.randn(_REQUESTS, heads, 576, device="cuda", generator=generator).to(E4M3)

    out = _uncut(query, cache, 192**-0.5)

    expected = _expected(query[:32], cache, 192**-0.5)
    error = out[:32].double() - expected
    assert (error.norm() / expected.norm()).item() < bound


def test_a_token_that_outweighs_all_others_is_not_rounded() -> None:
    """Probabilities are added up as they are multiplied, so one alone has weight 1."""
    problem = MlaCase(name="", seq_lens=(640,), heads=64, dtype=E4M3).build("cuda")
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

    # 2^(576 * 0.1 * log2(e)) times as much as any other.
    assert torch.equal(exact, torch.ones_like(exact))


@pytest.mark.parametrize("magnitude", [10.0, 100.0])
@pytest.mark.parametrize("heads", [16, 64])
def test_large_scores_are_right(heads: int, magnitude: float) -> None:
    """References move far and often, and scores lie far from zero."""
    case = MlaCase(name="", seq_lens=(3000, 700, 64), heads=heads, dtype=E4M3, with_sinks=True)
    problem = replace(case, query_magnitude=magnitude).build("cuda")

    out, _ = compute(problem)

    problem.check(out)


def test_scores_that_grow_are_right() -> None:
    """The reference moves with every block of tokens, and all sums before it are multiplied."""
    problem = MlaCase(name="", seq_lens=(2048,), heads=64, dtype=E4M3).build("cuda")
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


def _counted(lengths: list[int], heads: int, found: int) -> tuple[torch.Tensor, int]:
    """Return the output of a call of such lengths, and what its blocks have counted.

    The word that they count in is `found` before.
    """
    problem = MlaCase(name="", seq_lens=tuple(lengths), heads=heads, dtype=E4M3).build("cuda")
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    scratch = 2 * sms * heads * (512 * 2 + 16)  # two pieces of each CTA, at the end
    place = workspace.numel() - scratch + heads * 512 * 2  # behind one piece
    word = workspace[place : place + 4].view(torch.int32)
    word.fill_(found)
    out = decode(problem, workspace_buffer=workspace)
    assert isinstance(out, torch.Tensor)
    return out.clone(), (int(word) - found) % 2**32


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_what_blocks_count_in_may_be_anything(heads: int) -> None:
    """How far all have come is a difference; it ends with all blocks of tokens."""
    requests = torch.cuda.get_device_properties(0).multi_processor_count
    lengths = [1024] * requests
    expected, grown = _counted(lengths, heads, 0)
    assert grown == requests * 1024 // 64

    for found in (-1, 2**31 - 1, -(2**31), 12_345):
        result, grown = _counted(lengths, heads, found)
        assert torch.equal(result, expected)
        assert grown == requests * 1024 // 64


@pytest.mark.parametrize(
    "lengths",
    [[100_000], [5000] * 7, [70, 9000, 640, 0, 3000] * 30],
    ids=["one", "seven", "ragged"],
)
def test_no_piece_is_left_where_blocks_count(lengths: list[int]) -> None:
    """The word is what no merge reads or writes; where work differs nobody counts."""
    expected, grown = _counted(lengths, 16, 0)
    result, again = _counted(lengths, 16, 99)

    are_alike = len(set(lengths)) == 1
    assert grown == again
    assert grown <= (sum(-(-length // 64) for length in lengths) if are_alike else 0)
    assert torch.equal(result, expected)
