"""Inputs of a case in every stored format, and reference attention over them in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from mlagen.families.common.arguments import FLOAT_DTYPES
from mlagen.families.mla.write_rows import pack_pages
from mlagen.spec.dtype import TOKEN_SCALE_BYTES, DType

from .cases import NVFP4_BLOCK, QK_ROPE_HEAD_DIM, Case
from .rows import from_e2m1, in_groups, unpack

TORCH_DTYPES = {dtype: of_torch for of_torch, dtype in FLOAT_DTYPES.items()}

# An int8 element is 32 times its value, so that four standard deviations fit.
INT8_SCALE = 1 / 32


# Tokens that an indexer of tokens chooses together.
_RUN = 4


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Stored elements, and the scales of NVFP4 blocks, or of each token and KV head."""

    data: torch.Tensor
    scales: torch.Tensor | None = None


def element_scale(dtype: DType) -> float:
    """Return the factor of stored elements that the scales of a call apply."""
    return INT8_SCALE if dtype is DType.INT8 else 1.0


def random_cache(dtype: DType, shape: tuple[int, ...], generator: torch.Generator) -> Stored:
    """Return a cache of about unit variance; the last size of ``shape`` is the head dim."""
    device = generator.device
    if dtype is DType.NVFP4:
        *rows, head_dim = shape
        data = torch.randint(
            256, (*rows, head_dim // 2), generator=generator, device=device, dtype=torch.uint8
        )
        blocks = torch.rand((*rows, head_dim // NVFP4_BLOCK), generator=generator, device=device)
        # The root mean square of e2m1 numbers is 2.9.
        return Stored(data=data, scales=(blocks * 0.2 + 0.25).to(torch.float8_e4m3fn))
    numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    if dtype is DType.INT8:
        return Stored(data=(numbers / INT8_SCALE).round().clamp(-127, 127).to(torch.int8))
    if dtype.row is not None:
        pages = numbers.reshape(-1, *shape[-2:])
        return Stored(data=pack_pages(pages, dtype.row).view(*shape[:-1], -1))
    return Stored(data=numbers.to(TORCH_DTYPES[dtype]))


def random_token_rows(
    dtype: DType, shape: tuple[int, ...], dims: tuple[int, int], generator: torch.Generator
) -> list[Stored]:
    """Return keys and values of such elements in rows of vLLM: each has its scale behind it."""
    widths = [size for dim in dims for size in (dim, TOKEN_SCALE_BYTES)]
    rows = torch.empty((*shape, sum(widths)), dtype=torch.uint8, device=generator.device)
    sides: list[Stored] = []
    parts = torch.split_with_sizes(rows, widths, dim=-1)
    for dim, codes, stored in zip(dims, parts[::2], parts[1::2], strict=True):
        cache = random_cache(dtype.element, (*shape, dim), generator)
        data, scales = codes.view(cache.data.dtype), stored.view(torch.float32)[..., 0]
        data.copy_(cache.data)
        spread = torch.rand(shape, generator=generator, device=generator.device) + 0.5
        scales.copy_(spread * element_scale(dtype.element))
        sides.append(Stored(data=data, scales=scales))
    return sides


def dequantize(dtype: DType, rows: Stored) -> torch.Tensor:
    """Return the fp32 values of rows, without the scales of the call."""
    data = rows.data
    if dtype.row is not None:
        return unpack(data, dtype.row)
    if rows.scales is None:
        return data.float() * element_scale(dtype)
    if dtype.has_token_scales:
        return data.float() * rows.scales.unsqueeze(-1)
    blocks = in_groups(from_e2m1(data), NVFP4_BLOCK)
    return (blocks * rows.scales.float().unsqueeze(-1)).flatten(-2)


# Softmax scales by rope part, from the head dim before weight absorption: 128 + 64 in DeepSeek-V3,
# 256 in GLM-5.3-Flash.
_MLA_SCALES = {QK_ROPE_HEAD_DIM: 192**-0.5, 0: 256**-0.5}

# FlashInfer's XQA requires block tables that cover a multiple of this many tokens; the other
# kernels accept wider tables.
_TABLE_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of a case; only ``queries``, ``keys`` and ``values`` differ between sets.

    ``queries[i]`` is ``[batch, q_len, heads, head_dim_qk]``, ``keys[i]`` is ``[pages, page_size,
    kv_heads, row]``, and ``values[i]`` the same, in MLA the keys themselves.
    """

    case: Case
    queries: list[torch.Tensor]
    keys: list[Stored]
    values: list[Stored]
    block_tables: torch.Tensor  # int32[batch, max_pages]
    seq_lens: torch.Tensor  # int32[batch]
    scale: float
    # int32[batch, q_len, top_k], slots of the cache; in GQA as Case.indices_shape, of the request.
    topk_indices: torch.Tensor | None = None

    @property
    def sets(self) -> int:
        """Number of sets."""
        return len(self.queries)

    @property
    def max_seq_len(self) -> int:
        """Length of the longest request."""
        return max(self.case.seq_lens)

    @property
    def pages(self) -> list[int]:
        """Number of pages of each request."""
        return [-(-length // self.case.page_size) for length in self.case.seq_lens]


def make_inputs(case: Case, sets: int, device: str) -> Inputs:
    """Return ``sets`` normally distributed inputs with pages in random order."""
    generator = torch.Generator(device).manual_seed(0)
    counts = [-(-length // case.page_size) for length in case.seq_lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    run = -(-_TABLE_TOKENS // case.page_size)
    tables = torch.zeros(case.batch, -(-max(counts) // run) * run, dtype=torch.int32)
    for request, pages in enumerate(torch.split(order, counts)):
        tables[request, : len(pages)] = pages

    def random(dtype: DType, *shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return numbers.to(TORCH_DTYPES[dtype])

    page = (sum(counts), case.page_size, case.kv_heads)
    queries, keys, values = [], [], []
    for _ in range(sets):
        queries.append(random(case.dtype, case.batch, case.q_len, case.heads, case.head_dim_qk))
        if case.kv_dtype.has_token_scales:
            dims = (case.head_dim_qk, case.head_dim_vo)
            key, value = random_token_rows(case.kv_dtype, page, dims, generator)
            keys.append(key)
            values.append(value)
            continue
        if case.sparse_block > 1:  # as in vLLM: KV heads before tokens, a key and a value in a row
            shape = (page[0], case.kv_heads, case.page_size, 2 * case.head_dim_qk)
            rows = random_cache(case.kv_dtype, shape, generator).data.transpose(1, 2)
            for side, part in zip((keys, values), rows.chunk(2, dim=-1), strict=True):
                side.append(Stored(data=part))
            continue
        keys.append(random_cache(case.kv_dtype, (*page, case.head_dim_qk), generator))
        is_mla = case.family == "mla"
        value_shape = (*page, case.head_dim_vo)
        values.append(keys[-1] if is_mla else random_cache(case.kv_dtype, value_shape, generator))
    tables = tables.to(device)
    return Inputs(
        case=case,
        queries=queries,
        keys=keys,
        values=values,
        block_tables=tables,
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        scale=(
            _MLA_SCALES[case.qk_rope_head_dim] if case.family == "mla" else case.head_dim_qk**-0.5
        ),
        topk_indices=_topk_indices(case, tables, generator) if case.top_k else None,
    )


def _topk_indices(case: Case, tables: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return slots of random tokens, each at most once for a query token, or indices of GQA."""
    if case.is_sparse_gqa:
        return _gqa_indices(case, generator)
    rows = []
    for request, seq_len in enumerate(case.seq_lens):
        for _ in range(case.q_len):
            order = torch.randperm(seq_len, generator=generator, device=tables.device)
            tokens = order[: case.top_k]
            pages = tables[request, tokens // case.page_size]
            rows.append(pages * case.page_size + tokens % case.page_size)
    return torch.stack(rows).int().view(case.batch, case.q_len, case.top_k)


def _gqa_indices(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Return random tokens in runs as the indexer chooses them, or random blocks after the own."""
    batch, q_len, kv_heads, width = case.indices_shape
    device, rows = generator.device, []
    for row in range(batch * q_len * kv_heads):
        if case.sparse_block > 1:
            own = (case.seq_len - q_len + row // kv_heads % q_len) // case.sparse_block
            others = torch.randperm(own, generator=generator, device=device)[: width - 1]
            rows.append(pad(others, (1, 0), value=own))
            continue
        runs = torch.randperm(-(-case.seq_len // _RUN), generator=generator, device=device)
        tokens = (runs[:, None] * _RUN + torch.arange(_RUN, device=device)).flatten()
        rows.append(tokens[tokens < case.seq_len][:width])
    return torch.stack(rows).int().view(case.indices_shape)


def attend(inputs: Inputs) -> torch.Tensor:
    """Return the output of the first set, fp32 ``[batch, q_len, heads, head_dim_vo]``.

    One request and KV head at a time, to hold the scores of one in memory.
    """
    case = inputs.case
    shape = (case.batch, case.q_len, case.heads, case.head_dim_vo)
    out = torch.empty(shape, dtype=torch.float32, device=inputs.seq_lens.device)
    group = case.heads // case.kv_heads
    for request, seq_len in enumerate(case.seq_lens):
        mask = None if case.top_k else _mask(seq_len, case.q_len, case.window_left, out.device)
        for kv_head in range(case.kv_heads):
            slots = _slots(inputs, request, kv_head)
            if case.sparse_block > 1:  # the last block has tokens after the query token
                own = torch.arange(seq_len - case.q_len, seq_len, device=out.device)
                mask = (_tokens(inputs, request, kv_head) > own[:, None]).unsqueeze(1)
            heads = slice(kv_head * group, (kv_head + 1) * group)
            query = inputs.queries[0][request, :, heads].float() * inputs.scale
            keys = _rows(inputs, inputs.keys[0], slots, kv_head)
            values = (
                keys if case.family == "mla" else _rows(inputs, inputs.values[0], slots, kv_head)
            )
            scores = query @ keys.mT
            if case.soft_cap:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            if mask is not None:
                scores = scores.masked_fill(mask, -torch.inf)
            out[request, :, heads] = torch.softmax(scores, dim=-1) @ values[..., : shape[-1]]
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``expected``.

    Infinite if they are not finite in the same elements.
    """
    expected = expected.detach().double()
    out = out.detach().to(expected).reshape(expected.shape)
    is_finite = expected.isfinite()
    is_same = (out == expected) | (out.isnan() & expected.isnan())
    if not bool((is_same | (is_finite & out.isfinite())).all()):
        return float("inf")
    difference, norm = (out - expected)[is_finite].norm(), expected[is_finite].norm()
    return float(difference / norm) if norm else float(difference)


def _tokens(inputs: Inputs, request: int, kv_head: int) -> torch.Tensor:
    """Return all tokens of a request, or those that each of its query tokens attends to."""
    case, device = inputs.case, inputs.seq_lens.device
    if inputs.topk_indices is None:
        return torch.arange(case.seq_lens[request], device=device)
    indices = inputs.topk_indices[request].long()
    first = indices[:, min(kv_head, indices.shape[1] - 1), :, None] * case.sparse_block
    return (first + torch.arange(case.sparse_block, device=device)).flatten(1)


def _slots(inputs: Inputs, request: int, kv_head: int) -> torch.Tensor:
    """Return the slots of a request's tokens, or those of each of its query tokens."""
    if inputs.topk_indices is not None and not inputs.case.is_sparse_gqa:
        return inputs.topk_indices[request].long()
    tokens, page_size = _tokens(inputs, request, kv_head), inputs.case.page_size
    pages = inputs.block_tables[request, tokens // page_size].long()
    return pages * page_size + tokens % page_size


def _rows(inputs: Inputs, cache: Stored, slots: torch.Tensor, kv_head: int) -> torch.Tensor:
    def gather(stored: torch.Tensor) -> torch.Tensor:
        # As bytes: not every version of torch can index e4m3.
        rows = stored if stored.element_size() > 1 else stored.view(torch.uint8)
        page_size = stored.shape[1]
        return rows[slots // page_size, slots % page_size, kv_head].view(stored.dtype)

    scales = None if cache.scales is None else gather(cache.scales)
    rows = Stored(data=gather(cache.data), scales=scales)
    return dequantize(inputs.case.kv_dtype, rows)


def _mask(seq_len: int, q_len: int, window_left: int, device: torch.device) -> torch.Tensor | None:
    """Return where a row of the last ``q_len`` tokens does not attend, ``[q_len, 1, seq_len]``."""
    if q_len == 1 and window_left < 0:
        return None
    tokens = torch.arange(seq_len, device=device)
    own = torch.arange(seq_len - q_len, seq_len, device=device)[:, None, None]
    mask = tokens > own
    return mask if window_left < 0 else mask | (tokens < own - window_left)
