"""Inputs of a case over two pools: DeepSeek-V4's window tokens and its compressed ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlagen.families.mla.write_rows import pack_pages
from mlagen.spec.rows import RowFormat

from .cases import Case
from .inputs import Inputs, Stored, attend, make_inputs
from .rows import values_of

_SCALE = 512**-0.5  # DeepSeek-V4's


@dataclass(frozen=True, kw_only=True)
class TopkList:
    """The listed tokens of one pool: entries and lengths of each query token."""

    indices: torch.Tensor  # int32[tokens, width]
    lengths: torch.Tensor  # int32[tokens]


@dataclass(frozen=True, kw_only=True)
class PoolInputs(Inputs):
    """Inputs whose ``keys`` are the pool of the window, with top-k indices of both pools."""

    swa: list[TopkList]
    extra_keys: list[Stored]  # without a second pool, both are empty
    extra: list[TopkList]


def inputs_for(case: Case, sets: int, device: str) -> Inputs:
    """Return ``sets`` inputs of any case."""
    return (_make_pool_inputs if case.has_two_pools else make_inputs)(case, sets, device)


def expected_of(inputs: Inputs) -> torch.Tensor:
    """Return the output of the first set, fp32 ``[batch, q_len, heads, head_dim_vo]``."""
    return _attend_pools(inputs) if isinstance(inputs, PoolInputs) else attend(inputs)


def _make_pool_inputs(case: Case, sets: int, device: str) -> PoolInputs:
    """Return ``sets`` normally distributed inputs; a request has its own tokens in both pools."""
    generator = torch.Generator(device).manual_seed(0)
    row, extra_row = case.kv_dtype.row, case.kv_dtype.extra_row
    assert row is not None, "the dtype has two pools"
    assert extra_row is not None, "the dtype has two pools"
    # A server frees the pages before the window, so that it begins anywhere in its first page.
    window_pages = -(-(case.window_left + case.q_len) // case.page_size) + 1
    window = window_pages * case.page_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def pool(tokens: int, page_size: int, row: RowFormat) -> Stored:
        pages = -(-tokens // page_size)
        numbers = random(pages, page_size, case.head_dim_qk)
        return Stored(data=pack_pages(numbers, row).unsqueeze(2))

    lengths = torch.tensor(case.list_lens, dtype=torch.int32, device=device)
    swa_lens, extra_lens = (each.contiguous() for each in lengths.T)
    queries, keys, swa, extra_keys, extra = [], [], [], [], []
    for _ in range(sets):
        queries.append(random(case.batch, case.q_len, case.heads, case.head_dim_qk))
        keys.append(pool(case.batch * window, case.page_size, row))
        indices = _window_indices(case, window, generator)
        swa.append(TopkList(indices=indices, lengths=swa_lens))
        if case.top_k:
            tokens = case.batch * case.extra_tokens
            extra_keys.append(pool(tokens, case.extra_page_size, extra_row))
            indices = _extra_indices(case, generator)
            extra.append(TopkList(indices=indices, lengths=extra_lens))
    return PoolInputs(
        case=case,
        queries=queries,
        keys=keys,
        values=keys,
        block_tables=torch.zeros(case.batch, 0, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        scale=_SCALE,
        swa=swa,
        extra_keys=extra_keys,
        extra=extra,
    )


def _window_indices(case: Case, window: int, generator: torch.Generator) -> torch.Tensor:
    """Return the last tokens of each query token, ascending; ``window`` has those of a request."""
    device, swa = generator.device, case.window_left + 1
    free = window - swa - case.q_len + 2
    starts = torch.randint(free, (case.batch, 1, 1), generator=generator, device=device)
    requests = torch.arange(case.batch, device=device)[:, None, None] * window
    drafts = torch.arange(case.q_len, device=device)[:, None]
    listed = requests + starts + drafts + torch.arange(swa, device=device)
    return listed.flatten(0, 1).int()


def _extra_indices(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Return compressed tokens of the request: all in order, or other ones of each query token."""
    device, tokens = generator.device, case.extra_tokens
    requests = torch.arange(case.batch, device=device)[:, None, None] * tokens
    if case.shares_extra:
        listed = torch.arange(case.top_k, device=device).expand(case.batch, case.q_len, -1)
    else:
        order = torch.rand(case.batch, tokens, generator=generator, device=device).argsort(-1)
        # With fewer tokens than are listed, query tokens share some.
        places = torch.arange(case.q_len * case.top_k, device=device) % tokens
        listed = order[:, places].view(case.batch, case.q_len, case.top_k)
    return (requests + listed).flatten(0, 1).int()


def _attend_pools(inputs: PoolInputs) -> torch.Tensor:
    case = inputs.case
    queries = inputs.queries[0].flatten(0, 1).float() * inputs.scale
    out = torch.empty_like(queries)
    pools = [(inputs.keys[0], inputs.swa[0], case.kv_dtype.row)]
    if inputs.extra:
        pools.append((inputs.extra_keys[0], inputs.extra[0], case.kv_dtype.extra_row))
    for token, query in enumerate(queries):
        rows = []
        for stored, listed, row in pools:
            assert row is not None, "the dtype has two pools"
            entries = listed.indices[token, : int(listed.lengths[token])].long()
            rows.append(values_of(stored.data.squeeze(2), entries, row))
        tokens = torch.cat(rows)
        out[token] = torch.softmax(query @ tokens.T, dim=-1) @ tokens
    return out.view(case.batch, case.q_len, case.heads, case.head_dim_vo)
