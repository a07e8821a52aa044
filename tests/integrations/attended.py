"""Attention of query tokens in float64, as the tests of the servers' plugins expect it."""

from __future__ import annotations

import torch

HEADS, PAGE = 3, 16
E4M3 = torch.float8_e4m3fn
_PAGES = 4


def attended(
    query: torch.Tensor, rows: torch.Tensor, scale: float, dim_vo: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the natural LSE of ``query [heads, dim]`` over ``rows [tokens, dim]``.

    Without a row, zeros and minus infinity.
    """
    if not len(rows):
        return torch.zeros(len(query), dim_vo).double(), torch.full((len(query),), -torch.inf)
    scores = query.double() @ rows.double().T * scale
    return scores.softmax(-1) @ rows[:, :dim_vo].double(), scores.logsumexp(-1)


def gqa_attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Return attention of ``query [q_len, heads, dim]``, the last of ``keys [tokens, ...]``."""
    group, rows = query.shape[1] // keys.shape[1], []
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
    for token, each in enumerate(query.double()):
        end = len(keys) - len(query) + token + 1
        seen = slice(0 if window < 0 else max(0, end - 1 - window), end)
        scores = torch.einsum("hd,thd->ht", each, keys[seen]) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : len(keys[seen])]
        rows.append(torch.einsum("ht,thd->hd", weights, values[seen]))
    return torch.stack(rows)


def assert_near(got: torch.Tensor | None, want: torch.Tensor) -> None:
    """Require a 16-bit result within its rounding of values of about one."""
    assert got is not None
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=2e-2)


class Batch:
    """A decode batch over a paged cache: the query tokens of each request are its last ones."""

    def __init__(self, width: int, q_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(7)
        pages = len(seq_lens) * _PAGES
        self.q_lens, self.seq_lens = q_lens, seq_lens
        order = torch.randperm(pages, generator=generator)
        self.table = order.view(len(seq_lens), _PAGES).int()
        self.cache = torch.randn(pages, PAGE, width, generator=generator).bfloat16()
        self.query = torch.randn(sum(q_lens), HEADS, width, generator=generator).bfloat16()

    def expected(
        self, query: torch.Tensor, cache: torch.Tensor, scale: float, dim_vo: int = 512
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs and natural LSEs of all query tokens, over their causal prefixes."""
        results, first = [], 0
        for pages, q_len, seq_len in zip(self.table, self.q_lens, self.seq_lens, strict=True):
            rows = cache.double()[pages.long()].flatten(0, 1)
            results += [
                attended(query[first + i].double(), rows[: max(end, 0)], scale, dim_vo)
                for i, end in enumerate(range(seq_len - q_len + 1, seq_len + 1))
            ]
            first += q_len
        outs, lses = zip(*results, strict=True)
        return torch.stack(outs), torch.stack(lses)
