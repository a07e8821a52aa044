"""Writers of packed rows: their bytes against an independent packer, for every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import mlagen
from mlagen import writers
from mlagen.families.mla import write as write_module
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.packing import ParameterPacking
from mlagen.spec.dtype import DSV4_ROW
from mlagen.spec.kernel import KernelSpec
from tests.emulator.emulated import COMPILER
from tests.emulator.emulated import launch as emulate
from tests.fixture_types import Patch
from tests.kernels import SM_80
from tests.odd_values import nested
from tests.rejected import rejections_of, rejects
from tests.writers.numpy_prologue import NOTHING, Prologue
from tests.writers.numpy_rows import ROWS, Pages, decoded, packed, write

FILL = 0xA5
# DeepSeek-V4's rows in NVFP4: a description that no format of the package has.
NVFP4_ROW = replace(
    DSV4_ROW, code="e2m1", group=16, scale_code="e4m3", scale_padding=4, min_scale_exponent=-9
)

Tensor = torch.Tensor
V4 = writers.dsv4_fp8_quantize_append_sparse_mla_cache
V41 = writers.dsv41_fp8_quantize_append_sparse_mla_cache
V41_FP4 = writers.dsv41_fp4_quantize_append_sparse_mla_cache
MLA = writers.mla_fp8_quantize_append_packed
PAGED: Callable[..., None] = writers.append_paged_mla_kv_cache


def _of_tokens(append: Callable[..., None], **words: bool) -> Callable[..., None]:
    """Return a function of tokens, slots, cache, scales and the words of a prologue."""
    return lambda tokens, slots, cache, _, **more: append(tokens, slots, cache, **words, **more)


def _of_parts(*, has_scales: bool = False) -> Callable[..., None]:
    def append(tokens: Tensor, slots: Tensor, cache: Tensor, scales: Tensor, **more: Any) -> None:
        given = (tokens[:, :512], tokens[:, 512:], slots, cache)
        MLA(*given, scales if has_scales else None, **more)

    return append


APPEND: dict[str, Callable[..., None]] = {
    "584": _of_tokens(V4),
    "528": _of_tokens(V41),
    "528 inline": _of_tokens(V41, inline_scale=True),
    "288": _of_tokens(V41_FP4),
    "288 inline": _of_tokens(V41_FP4, inline_scale=True),
    "656": _of_parts(),
    "528 without rope": _of_parts(),
    "640": _of_parts(has_scales=True),
    "384": _of_tokens(V4),
}
PACK: dict[str, Callable[..., Tensor]] = {
    "584": writers.dsv4_fp8_quantize_pack_sparse_mla_cache,
    "528": writers.dsv41_fp8_quantize_pack_sparse_mla_cache,
    "288": writers.dsv41_fp4_quantize_pack_sparse_mla_cache,
}
# Of the call over two pools, and whether the rows are those of the second pool.
FORMATS = {
    "584": ("fp8", False),
    "528": ("fp8_dsv41", False),
    "528 inline": ("fp8_dsv41_inline", False),
    "288": ("fp8_dsv41_fp4_ca", True),
    "288 inline": ("fp8_dsv41_inline_fp4_ca", True),
}
formats = pytest.mark.parametrize("name", APPEND)
# Tokens become fp32 where they are loaded: fp16 ones for a row of each way of scaling.
formats_and_dtypes = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in APPEND),
        *((name, torch.float16) for name in ("584", "528", "640")),
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def _nvfp4(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    """Let the functions of DeepSeek-V4 write the rows of another description."""
    if "384" in request.node.name:
        monkeypatch.setattr(writers, "DSV4_ROW", NVFP4_ROW)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a pool; paddings are whole rows inline, else multiples of 16 bytes."""

    pages: int = 3
    page_size: int = 5
    page_padding: int = 3
    token_padding: int = 0

    def __str__(self) -> str:
        return f"{self.pages} of {self.page_size} + {self.page_padding}, {self.token_padding}"


LAYOUTS = (
    Layout(),
    Layout(pages=1, page_size=64, page_padding=0),
    Layout(pages=9, page_size=1, page_padding=0),
    Layout(page_size=2, page_padding=40),
    Layout(page_size=3, page_padding=2, token_padding=1),
)


class Filled:
    """A pool of a format full of ``FILL``, in memory that ends with its last row, and its copy."""

    def __init__(self, name: str, device: str, layout: Layout = LAYOUTS[0]) -> None:
        self.name, self.row, self.layout = name, ROWS[name], layout
        width, pages, page_size = self.row.width, layout.pages, layout.page_size
        self.pitch = width
        if self.row.place != "planes":
            self.pitch += 16 * layout.token_padding
        self.counts_padding = self.row.place == "inline" and self.row.scale != "fp32"
        extent = (page_size - 1) * self.pitch + width
        if self.counts_padding:
            self.stride = (page_size + layout.page_padding) * self.pitch
        else:
            self.stride = -(-extent // 16) * 16 + 16 * layout.page_padding
        size = (pages - 1) * self.stride + extent
        self.memory = torch.full((size,), FILL, dtype=torch.uint8, device=device)
        strides = (self.stride, self.pitch, 1)
        self.cache = self.memory.as_strided((pages, page_size, width), strides)
        self.scales = torch.full((pages, page_size), -1.0, device=device)
        self.per_page = self.stride // self.pitch if self.counts_padding else page_size
        self.expected = Pages(
            self.memory.cpu().numpy().copy(),
            pages,
            page_size,
            self.stride,
            self.pitch,
            self.scales.cpu().numpy().copy(),
        )

    @property
    def capacity(self) -> int:
        """The number of entries."""
        return self.layout.pages * self.per_page

    def append(
        self,
        tokens: Tensor,
        slots: list[int],
        dtype: torch.dtype = torch.int64,
        prologue: Prologue = NOTHING,
    ) -> None:
        """Append tokens by the function and by the independent packer."""
        device = self.memory.device
        mapping = torch.tensor(slots, dtype=dtype, device=device)
        words = prologue.words(device)
        APPEND[self.name](tokens.to(device), mapping, self.cache, self.scales, **words)
        self.write_expected(tokens if prologue is NOTHING else prologue.of(tokens), slots)

    def write_expected(self, tokens: Tensor, slots: list[int]) -> None:
        """Write tokens by the independent packer."""
        write(self.expected, tokens.detach().cpu(), slots, self.row, self.per_page)

    def check(self) -> None:
        """Fail unless every byte of the memory is as expected."""
        found = self.memory.cpu().numpy()
        different = np.flatnonzero(found != self.expected.memory)
        assert different.size == 0, different[:8]
        bits = self.scales.cpu().numpy().view(np.int32)
        assert np.array_equal(bits, self.expected.scales.view(np.int32))


def tokens_of(name: str, count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Return tokens whose groups differ in size."""
    row, generator = ROWS[name], torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, row.scaled + row.rope, generator=generator)
    sizes = torch.randn(count, 32, generator=generator).mul(2).exp().repeat_interleave(18, dim=1)
    return (numbers * sizes[:, : numbers.shape[1]]).to(dtype)


def odd_tokens(name: str, dtype: torch.dtype) -> Tensor:
    """Return tokens at the ends of arithmetic, one of them for each kind."""
    tokens = tokens_of(name, 20, dtype)
    tokens[0] = 0.0
    tokens[1] = -0.0
    tokens[2, 77] = torch.finfo(dtype).max
    tokens[3] *= torch.tensor(2.0**-20, dtype=dtype)  # below the smallest scales
    tokens[4] *= torch.finfo(dtype).tiny
    tokens[5, ::40] = math.nan
    tokens[6, 5::80] = math.inf
    tokens[7, 5::80] = -math.inf
    tokens[8, 5], tokens[8, 6] = math.inf, math.nan
    tokens[9, 5], tokens[9, 100] = math.nan, -math.inf
    steps = torch.arange(tokens.shape[1])
    for index, largest in ((10, 448.0), (11, 6.0)):  # of scale 1: every code, and all ties
        tokens[index] = ((steps * 7 % 113 - 56) / 16 * 2.0 ** (steps % 6)).to(dtype)
        tokens[index].clamp_(-largest, largest)[::16] = largest
    tokens[12, :] = torch.tensor([2.0**-9, 2.0**-13, 2.0**-22, 1.0]).repeat(144)[: len(steps)]
    tokens[13] = (448 * 2.0 ** (steps // 16 % 8 - 4)).to(dtype)  # exact powers of two
    tokens[14] = tokens[13] * (1 + torch.finfo(dtype).eps)  # just above them
    tokens[15, -64:] = tokens[15, -64:] * 100
    tokens[16, -3] = math.nan  # of the rope part, where there is one
    tokens[17, -3] = math.inf
    return tokens


def prologues_of(name: str, count: int, dtype: torch.dtype) -> list[Prologue]:
    """Return RMSNorm, rope and both, of which a row may have; some positions are invalid."""
    generator = torch.Generator().manual_seed(count)
    weight = torch.randn(512, generator=generator).to(dtype)
    angles = torch.rand(40, 32, generator=generator) * 7
    positions = torch.randint(0, 40, (count,), generator=generator)
    positions[:5] = torch.tensor([39, 40, -1, -(2**63), 2**40])[:count]
    rope = Prologue(positions=positions, cos_sin_cache=torch.cat([angles.cos(), angles.sin()], 1))
    norm = Prologue(norm_weight=weight, norm_eps=0.03)
    if name == "528 without rope":
        return [norm]
    both = rope._replace(norm_weight=weight, positions=positions.clamp(-5, 50).int())
    return [norm, rope, both]


class TestWriters:
    """Writers, on the device of the fixture."""

    @formats_and_dtypes
    def test_odd_numbers_have_the_bytes_of_the_definition(
        self, name: str, dtype: torch.dtype, device: str
    ) -> None:
        """Zeros, ties, the smallest and largest numbers, NaN and infinities."""
        pool = Filled(name, device, Layout(pages=2, page_size=16))
        tokens = odd_tokens(name, dtype)

        pool.append(tokens, [*range(len(tokens))])

        pool.check()

    @formats_and_dtypes
    def test_a_prologue_has_the_bytes_of_its_definition(
        self, name: str, dtype: torch.dtype, device: str
    ) -> None:
        """RMSNorm, rope and both, of odd numbers and of ordinary ones; positions may be invalid."""
        tokens = torch.cat([odd_tokens(name, dtype), tokens_of(name, 14, dtype, seed=1)])
        slots = [*range(30), -1, 7, 3, 29]
        for prologue in prologues_of(name, len(tokens), dtype):
            pool = Filled(name, device, Layout(pages=2, page_size=16))

            pool.append(tokens, slots, prologue=prologue)

            pool.check()

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @formats
    def test_only_the_rows_of_slots_are_written(
        self, name: str, layout: Layout, device: str
    ) -> None:
        """Of equal slots the first row's; none for a negative slot, or one behind the cache."""
        pool = Filled(name, device, layout)
        last, skipped = pool.capacity - 1, (-1, pool.capacity, 2**40, -(2**63))
        slots = [last, skipped[0], 2, 0, 2, *skipped[1:], last, 2, pool.per_page - 1]

        pool.append(tokens_of(name, len(slots)), slots)

        pool.check()

    @formats
    def test_a_cache_may_fill_token_by_token(self, name: str, device: str) -> None:
        """Any order of int32 slots, and rows of padding behind them."""
        pool = Filled(name, device)
        order = torch.randperm(pool.capacity, generator=torch.Generator().manual_seed(0)).tolist()
        for start in range(0, len(order), 4):
            tokens = tokens_of(name, 7, seed=start)

            pool.append(tokens, order[start : start + 4], torch.int32)

        pool.check()

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("count", [8, 290])
    def test_the_first_of_many_equal_slots_is_written(
        self, count: int, dtype: torch.dtype, device: str
    ) -> None:
        """Wherever it is among the tokens."""
        pool, generator = Filled("584", device), torch.Generator().manual_seed(count)
        slots = torch.randint(-1, 12, (count,), generator=generator).tolist()
        slots[-3:] = [14, 13, 14]

        pool.append(tokens_of("584", count), slots, dtype)

        pool.check()

    @pytest.mark.parametrize("slots", [[], [-1], [-1, 10**6, -5]], ids=str)
    @formats
    def test_nothing_is_written_without_a_slot(
        self, name: str, slots: list[int], device: str
    ) -> None:
        """No token, or tokens that are all skipped."""
        pool = Filled(name, device)

        pool.append(tokens_of(name, len(slots)), slots)

        assert (pool.memory == FILL).all()
        assert (pool.scales == -1.0).all()

    @formats
    def test_a_pool_may_be_empty(self, name: str, device: str) -> None:
        """A cache without pages takes no token."""
        empty = Filled(name, device)
        scales, tokens = empty.scales[:0], tokens_of(name, 2).to(device)

        APPEND[name](
            tokens, torch.zeros(2, dtype=torch.int32, device=device), empty.cache[:0], scales
        )

        empty.check()

    @pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
    @pytest.mark.parametrize("page_size", [1, 5, 64])
    @pytest.mark.parametrize("name", ["584", "528", "288", "528 inline", "288 inline"])
    def test_a_packed_page_has_the_bytes_of_its_tokens(
        self, name: str, page_size: int, kv_layout: str, device: str
    ) -> None:
        """Pages of every size are those of tokens appended in order."""
        words = {"inline_scale": True} if name.endswith("inline") else {}
        row = ROWS[name]
        tokens = tokens_of(name, 3 * page_size).view(3, page_size, 512)

        cache = PACK[name[:3]](tokens.to(device), kv_layout=kv_layout, **words)

        axis = 1 if kv_layout == "HND" else 2
        shape = [3, page_size, row.width]
        shape.insert(axis, 1)
        assert (cache.dtype, list(cache.shape)) == (torch.uint8, shape)
        page_bytes = page_size * row.width
        stride = -(-page_bytes // 576) * 576 if name == "584" else page_bytes
        assert cache.stride(0) == stride
        memory = np.zeros(3 * page_bytes, np.uint8)
        pages = Pages(memory, 3, page_size, page_bytes, row.width, np.zeros(0, np.float32))
        write(pages, tokens.flatten(0, 1), [*range(3 * page_size)], row, page_size)
        for page in range(3):
            found = cache.squeeze(axis)[page].reshape(-1).cpu().numpy()
            assert np.array_equal(found, memory[page * page_bytes : (page + 1) * page_bytes])

    def test_pages_may_have_a_stride(self, device: str) -> None:
        """The tokens may have an axis for the KV head, wherever the cache has one."""
        tokens = tokens_of("584", 6).view(2, 3, 512).to(device)
        expected = writers.dsv4_fp8_quantize_pack_sparse_mla_cache(tokens)
        for axis in (1, 2):
            given = tokens.unsqueeze(axis)
            cache = writers.dsv4_fp8_quantize_pack_sparse_mla_cache(given, page_stride=7 * 1760)

            assert cache.stride() == (7 * 1760, 1752, 584, 1)
            assert torch.equal(cache, expected)

    @pytest.mark.parametrize("name", PACK)
    def test_no_pages_are_packed_to_no_pages(self, name: str, device: str) -> None:
        """And pages of no tokens to such pages."""
        for pages, page_size in ((0, 4), (4, 0)):
            tokens = torch.zeros(pages, page_size, 512, dtype=torch.bfloat16, device=device)

            assert PACK[name](tokens).shape == (pages, 1, page_size, ROWS[name].width)

    @formats
    def test_rows_stand_for_their_tokens(self, name: str, device: str) -> None:
        """An element is within half a step of its code, and within that of bf16 in a rope part."""
        pool, row = Filled(name, device, Layout(pages=1, page_size=64)), ROWS[name]
        tokens = tokens_of(name, 64)
        pool.append(tokens, [*range(64)])
        pool.check()

        found = decoded(*packed(tokens, row), row)

        exact = tokens.double().numpy()
        groups = np.abs(exact[:, : row.scaled]).reshape(64, -1, row.group).max(axis=-1)
        share, least = (1 / 16, 2.0**-22) if row.codes == "e4m3" else (0.178, 3 * 2.0**-9)
        bound = np.repeat(groups * share + least, row.group, axis=1)
        assert (np.abs(found - exact)[:, : row.scaled] <= bound).all()
        rope, of_rope = found[:, row.scaled :], exact[:, row.scaled :]
        assert (np.abs(rope - of_rope) <= np.abs(of_rope) * 2.0**-8 * row.divides_rope).all()

    @pytest.mark.parametrize("name", ["584", "528"])
    def test_numbers_of_a_cache_stay_what_they_are(self, name: str, device: str) -> None:
        """Packing the numbers of packed rows gives rows of the same numbers."""
        row = ROWS[name]
        once = decoded(*packed(tokens_of(name, 64), row), row)
        pool = Filled(name, device, Layout(pages=1, page_size=64))

        pool.append(torch.from_numpy(once).bfloat16(), [*range(64)])

        pool.check()
        assert np.array_equal(decoded(*packed(torch.from_numpy(once).bfloat16(), row), row), once)

    @formats
    def test_strided_tokens_are_read(self, name: str, device: str) -> None:
        """Tokens may be a slice of wider rows, and require grad."""
        pool, tokens = Filled(name, device), tokens_of(name, 4)
        wide = torch.cat([tokens, tokens], dim=1).to(device)[:, : tokens.shape[1]]
        slots = torch.tensor([3, 1, 0, 2], device=device)

        APPEND[name](wide.requires_grad_(), slots, pool.cache, pool.scales)

        pool.write_expected(tokens, [3, 1, 0, 2])
        pool.check()

    def test_axes_of_a_cache_may_name_the_kv_head(self, device: str) -> None:
        """One of size 1 on either side of the tokens of a page."""
        tokens, slots = tokens_of("584", 2).to(device), torch.tensor([6, 1], device=device)
        for axis in (1, 2):
            pool = Filled("584", device)
            V4(tokens[:, None], slots, pool.cache.unsqueeze(axis))

            pool.write_expected(tokens, [6, 1])
            pool.check()

    def test_padded_rows_keep_their_padding(self, device: str) -> None:
        """Rows of DeepSeek-V3.2 without rope part may be those of a wider pool."""
        pool, tokens = Filled("656", device), tokens_of("528 without rope", 3)
        slots = torch.tensor([0, 9, 4], device=device)

        MLA(tokens.to(device), tokens[:, 512:].to(device), slots, pool.cache)

        write(pool.expected, tokens, [0, 9, 4], ROWS["528 without rope"], 5)
        pool.check()

    @pytest.mark.parametrize("name", [*FORMATS, "656", "528 without rope"])
    def test_decode_calls_read_what_was_written(self, name: str, device: str) -> None:
        """A query token that attends to one token gives the numbers of its row."""
        pool, row = Filled(name, device, Layout(pages=3, page_size=16)), ROWS[name]
        tokens = tokens_of(name, 8)
        places = ((0, 0), (1, 1), (0, 5), (2, 15), (0, 2), (0, 1), (1, 0), (0, 15))
        slots = [page * pool.per_page + slot for page, slot in places]
        pool.append(tokens, slots)

        out = decoded_tokens(pool, torch.tensor(slots, device=device))

        expected = torch.from_numpy(decoded(*packed(tokens, row), row))[:, :512].bfloat16()
        # An sm90 kernel may round numbers that are small beside the largest of their token.
        bound = expected.abs() * 2.0**-7 + expected.abs().amax(dim=1, keepdim=True) * 2.0**-12
        assert ((out.cpu() - expected).abs() <= bound).all()

    @pytest.mark.filterwarnings("ignore")  # Inductor warns about itself
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @formats
    def test_compiled_code_writes(self, name: str, backend: str, device: str) -> None:
        """Under torch.compile the call is one op that writes into the cache."""
        torch._dynamo.reset()
        pool, tokens = Filled(name, device), tokens_of(name, 4)
        call = torch.compile(APPEND[name], backend=backend, fullgraph=True)
        slots = torch.tensor([3, 1, -1, 3], device=device)

        prologue = prologues_of(name, 4, torch.bfloat16)[-1]

        call(tokens.to(device), slots, pool.cache, pool.scales, **prologue.words(device))

        pool.write_expected(prologue.of(tokens), [3, 1, -1, 3])
        pool.check()

    @pytest.mark.filterwarnings("ignore")  # Inductor warns about itself
    @pytest.mark.parametrize("name", PACK)
    def test_compiled_code_packs(self, name: str, device: str) -> None:
        """Under torch.compile the call is one op, whose result has the same strides."""
        torch._dynamo.reset()
        tokens = tokens_of(name, 10).view(2, 5, 512).to(device)
        call = torch.compile(PACK[name], backend="aot_eager", fullgraph=True)

        cache, expected = call(tokens, kv_layout="NHD"), PACK[name](tokens, kv_layout="NHD")

        assert torch.equal(cache, expected)
        assert cache.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_expected_prologue_is_that_of_float64(dtype: torch.dtype) -> None:
    """The independent packer's RMSNorm and rope are torch's, within a rounding of each."""
    tokens = torch.randn(64, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, _, both = prologues_of("656", 64, dtype)
    assert both.norm_weight is not None
    assert both.positions is not None
    assert both.cos_sin_cache is not None
    valid = slice(5, None)

    found = both.of(tokens)[valid].double()

    latents, pairs = tokens[valid, :512].double(), tokens[valid, 512:].double().view(-1, 32, 2)
    normalized = torch.nn.functional.rms_norm(
        latents, (512,), both.norm_weight.double(), both.norm_eps
    )
    cosines, sines = both.cos_sin_cache[both.positions[valid].long()].double().chunk(2, dim=1)
    rotated = torch.view_as_complex(pairs) * torch.complex(cosines, sines)
    expected = torch.cat([normalized, torch.view_as_real(rotated).flatten(1)], dim=1)
    bound = expected.abs() * torch.finfo(dtype).eps / 2 + 1e-5
    assert ((found - expected).abs() <= bound).all()


def decoded_tokens(pool: Filled, entries: Tensor) -> Tensor:
    """Return the output of a decode call whose query tokens attend to one entry each."""
    count, is_two_pools = len(entries), pool.name in FORMATS
    width = 512 if is_two_pools else pool.row.scaled + pool.row.rope
    query = torch.ones(count, 1, width, dtype=torch.bfloat16, device=entries.device)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=entries.device)
    indices, ones = entries.int()[:, None], torch.ones_like(entries, dtype=torch.int32)
    if is_two_pools:
        name, is_extra = FORMATS[pool.name]
        swa, empty = pool, torch.zeros_like(ones)
        if is_extra:  # the list of the first pool is empty
            swa = Filled("528 inline" if "inline" in name else "528", entries.device.type)
        out: Any = mlagen.mla.trtllm_batch_decode_sparse_mla_dsv4(
            query,
            swa.cache,
            workspace,
            sparse_indices=indices,
            swa_topk_lens=empty if is_extra else ones,
            compressed_kv_cache=pool.cache if is_extra else None,
            extra_sparse_indices=indices if is_extra else None,
            extra_sparse_topk_lens=ones if is_extra else None,
            kv_cache_format=name,
        )
        return torch.as_tensor(out[:, 0])
    given: dict[str, Any] = {"sparse_mla_top_k": 1, "sparse_mla_top_k_lens": ones}
    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        query[:, None],
        pool.cache,
        workspace,
        128,
        512,
        width - 512,
        indices[:, None],
        ones,
        1,
        **given,
    )
    return torch.as_tensor(out[:, 0, 0])


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Requests of a paged cache, and tokens for it."""

    pages: tuple[int, ...] = (5, 2, 0, 7, 9)  # 7 and 9 are no pages of the cache
    indptr: tuple[int, ...] = (0, 2, 2, 5)
    requests: tuple[int, ...] = (0, 0, 2, 0, 2, 2, 1, -1, 3, 0, 0, 2, 2)
    positions: tuple[int, ...] = (0, 7, 3, 7, 4, 8, 0, 0, 0, 8, -1, 0, 3)

    def slots(self, page_size: int, num_pages: int) -> list[int]:
        """Return the slot of each token, -1 for none."""
        found = []
        for request, position in zip(self.requests, self.positions, strict=True):
            slot = -1
            if 0 <= request < len(self.indptr) - 1 and position >= 0:
                pages = self.pages[self.indptr[request] : self.indptr[request + 1]]
                if position // page_size < len(pages):
                    page = pages[position // page_size]
                    slot = page * page_size + position % page_size if page < num_pages else -1
            found.append(slot)
        return found

    def tensors(self, device: str) -> list[Tensor]:
        """Return places of the tokens, and page ids, offsets and last lengths of the requests."""
        ints = (self.pages, self.indptr, (1,) * (len(self.indptr) - 1))
        places = (self.requests, self.positions)
        return [torch.tensor(of, dtype=torch.int32, device=device) for of in (*places, *ints)]

    def written(self, tokens: Tensor, page_size: int, num_pages: int) -> Tensor:
        """Return a cache of zeros in which each slot has its first token."""
        cache = torch.zeros(num_pages * page_size, tokens.shape[1], dtype=tokens.dtype)
        for token, slot in reversed([*enumerate(self.slots(page_size, num_pages))]):
            if slot >= 0:
                cache[slot] = tokens[token].cpu()
        return cache


class TestAppend:
    """Appends to caches that are not packed."""

    @pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 32), (512, 0)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
    def test_tokens_are_at_their_positions(
        self, dtype: torch.dtype, rank: int, rope: int, device: str
    ) -> None:
        """Of equal positions the first counts; a position without a page is skipped."""
        paged = Paged()
        count, generator = len(paged.requests), torch.Generator().manual_seed(0)
        tokens = torch.randn(count, rank + rope, generator=generator).to(dtype).to(device)
        cache = torch.zeros(7, 4, rank + rope, device=device).to(dtype)
        parts, caches = (torch.split(tensor, [rank, rope], dim=-1) for tensor in (tokens, cache))
        given = paged.tensors(device)

        PAGED(*parts, *given[:2], *caches, *given[2:])

        assert len(set(paged.slots(4, 7))) == 5
        expected = paged.written(tokens, 4, 7)
        assert torch.equal(cache.cpu().view(28, -1).view(torch.uint8), expected.view(torch.uint8))

    @pytest.mark.parametrize("words", ["norm", "rope", "both"])
    @pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 64), (512, 0)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_tokens_may_be_normalized_and_rotated(
        self, dtype: torch.dtype, rank: int, rope: int, words: str, device: str
    ) -> None:
        """Positions outside the table give NaN; caches are those of one tensor, with gaps."""
        paged = Paged()
        if not rope:
            words = "norm"
        tokens = odd_tokens("656", dtype)[: len(paged.requests), 512 - rank : 512 + rope]
        table = prologues_of("656", 8, dtype)[1].cos_sin_cache
        assert table is not None
        prologue = Prologue(
            norm_weight=None if words == "rope" else tokens_of("656", 1, dtype)[0, :rank].clone(),
            norm_eps=1e-5,
            positions=None if words == "norm" else torch.tensor(paged.positions),
            cos_sin_cache=None if words == "norm" else table[:7].clone(),
        )
        cache = torch.zeros(7, 4, rank + rope + 8, dtype=dtype, device=device)
        caches = cache[..., :rank], cache[..., rank : rank + rope]
        given = paged.tensors(device)
        parts = tokens[:, :rank].to(device), tokens[:, rank:].to(device)
        others = prologue._replace(positions=None).words(device)

        PAGED(*parts, *given[:2], *caches, *given[2:], **others)

        expected = paged.written(prologue.of(tokens, rank), 4, 7)
        found = cache.cpu().view(28, -1)
        assert torch.equal(found[:, : rank + rope].view(torch.int16), expected.view(torch.int16))
        assert not found[:, rank + rope :].any()

    @pytest.mark.parametrize("empty", ["tokens", "requests", "pages"])
    def test_nothing_is_appended_to_nothing(self, empty: str, device: str) -> None:
        """No tokens, no requests or a cache without pages."""
        count, batch = 0 if empty == "tokens" else 2, 0 if empty == "requests" else 1
        ckv, kpe = (torch.ones(count, dim, device=device).half() for dim in (512, 64))
        pages = 0 if empty == "pages" else 1
        caches = [torch.zeros(pages, 4, dim, device=device).half() for dim in (512, 64)]
        ints = [torch.zeros(n, dtype=torch.int32, device=device) for n in (count, count)]
        tables = [torch.zeros(n, dtype=torch.int32, device=device) for n in (1, batch + 1, batch)]

        PAGED(ckv, kpe, *ints, *caches, *tables)

        assert not any(cache.any() for cache in caches)


class Emulated:
    """Launches of the kernels in the emulator."""

    @pytest.fixture(autouse=True)
    def launches(self, monkeypatch: Patch) -> list[int]:
        """Return the CTAs of each launch."""
        recorded: list[int] = []

        def launch(kernel: LoadedKernel, ctas: int, _: bool, values: tuple[Any, ...]) -> None:
            recorded.append(ctas)
            emulate(kernel.spec, kernel.packing.struct.pack(*values), ctas, len(recorded))

        def loaded(spec: KernelSpec, _: int) -> LoadedKernel:
            return LoadedKernel(spec, 0, ParameterPacking(spec), None, None)

        monkeypatch.setattr(write_module, "_gpu_of", lambda _: 0)
        monkeypatch.setattr(write_module, "arch_of_device", lambda _: SM_80)
        monkeypatch.setattr(write_module, "kernel_for", loaded)
        monkeypatch.setattr(write_module, "launch", launch)
        return recorded


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
class TestWritersEmulated(Emulated, TestWriters):
    """Every write that a kernel has, by emulated launches."""

    def test_a_warp_takes_a_token(self, launches: list[int]) -> None:
        """Eight of a CTA."""
        pool = Filled("584", "cpu")

        pool.append(tokens_of("584", 9), [*range(9)])

        assert launches == [2]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
class TestAppendEmulated(Emulated, TestAppend):
    """Appends to caches that are not packed, by emulated launches."""

    def test_one_kernel_writes_the_usual_dims(self, launches: list[int]) -> None:
        """Dims, dtypes and strides that it does not have are those of torch ops."""
        for rope, step, count in ((64, 1, 1), (32, 1, 0), (64, 2, 0)):
            tokens, cache = (
                torch.ones(2, 512 + rope).half(),
                torch.zeros(3, 4, 512 * 2 + rope).half(),
            )
            given = Paged(requests=(0, 0), positions=(1, 2)).tensors("cpu")
            parts = tokens[:, :512], tokens[:, 512:]
            caches = cache[..., : 512 * step : step], cache[..., 1024:]

            PAGED(*parts, *given[:2], *caches, *given[2:])

            assert launches == [1] * count
            launches.clear()


def _sparse(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"latent_kv": torch.zeros(4, 512, dtype=torch.bfloat16)}
    given |= {"slot_mapping": torch.zeros(4, dtype=torch.int64)}
    return given | {"cache": torch.zeros(2, 8, 584, dtype=torch.uint8)} | changes


_WIDE = torch.zeros(1 << 16, dtype=torch.uint8)


def _cache(pages: int, page_stride: int, pitch: int, *, width: int = 584, start: int = 0) -> Tensor:
    return _WIDE.as_strided((pages, 8, width), (page_stride, pitch, 1), start)


_F16 = torch.zeros(2, 4, 512).half()
_CKV, _KPE = torch.zeros(4, 512).bfloat16(), torch.zeros(4, 64).bfloat16()
_INTS = torch.zeros(4, dtype=torch.int32)
_TABLE = torch.zeros(3, 64)


def _call(name: str) -> dict[str, Any]:
    if name == "pack":
        return {"latent_kv": _F16, "kv_layout": "HND", "page_stride": None}
    if name == "packed":
        cache, scales = torch.zeros(2, 8, 640, dtype=torch.uint8), torch.zeros(2, 8)
        slots = torch.zeros(4, dtype=torch.int64)
        return {"ckv": _CKV, "kpe": _KPE, "slot_mapping": slots, "cache": cache, "scales": scales}
    if name == "paged":
        caches = {
            "ckv_cache": torch.zeros(2, 8, 512).bfloat16(),
            "kpe_cache": torch.zeros(2, 8, 64).bfloat16(),
        }
        tables = {"kv_indices": _INTS, "kv_indptr": _INTS[:2], "kv_last_page_len": _INTS[:1]}
        tokens = {"append_ckv": _CKV, "append_kpe": _KPE}
        return {**tokens, "batch_indices": _INTS, "positions": _INTS, **caches, **tables}
    changes = {"cache": torch.zeros(2, 8, 528, dtype=torch.uint8)} if name == "inline" else {}
    return _sparse(**changes)


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "append": V4,
    "inline": lambda **given: V41(**{"inline_scale": True} | given),
    "pack": writers.dsv4_fp8_quantize_pack_sparse_mla_cache,
    "packed": MLA,
    "paged": PAGED,
}
_STRIDE = "stride of a token of cache"


@rejections_of(
    {
        "append": [
            ("latent_kv", None, ": expected a torch.Tensor, got NoneType"),
            ("latent_kv", torch.zeros(4, 512), ".dtype: expected torch.bfloat16 or torch..."),
            ("latent_kv", _F16[0, :, :448], ".shape[-1]: expected 512, got 448"),
            ("latent_kv", _F16[0, 0], ".ndim: expected 2 or 3, got 1"),
            ("latent_kv", _F16, ".shape: expected an axis of size 1 for the KV head, got [2, 4..."),
            ("latent_kv", nested(_F16[0]), ": expected a dense tensor in memory, got a nested..."),
            ("slot_mapping", [0], ": expected a torch.Tensor, got list"),
            ("slot_mapping", torch.zeros(4), ".dtype: expected torch.int32 or torch.int64, got..."),
            ("slot_mapping", _INTS.view(2, 2), ".ndim: expected 1, got 2"),
            (
                "slot_mapping",
                torch.zeros(8).int()[::2],
                " must be contiguous: expected no gaps ...",
            ),
            (
                "slot_mapping",
                torch.zeros(5).int(),
                ".shape: expected [n], n <= 4 (tokens), got [5]",
            ),
            (
                "slot_mapping",
                _INTS.to("meta"),
                ".device: expected cpu (of the first tensor), got meta",
            ),
            (
                "cache",
                _cache(2, 4672, 584).view(torch.int8),
                ".dtype: expected torch.uint8, got...",
            ),
            ("cache", _cache(2, 4672, 584)[0], ".ndim: expected 3 or 4, got 2"),
            ("cache", _cache(2, 4672, 528, width=528), ".shape[-1]: expected 584 (bytes of a ..."),
            (_STRIDE, {"cache": _cache(2, 8192, 600)}, ": expected 584 (the row), got 600"),
            ("cache", _cache(2, 4664, 584), ".stride(0): expected a multiple of 16, 4672 (the ..."),
            ("cache", _cache(2, 4680, 584), ".stride(0): expected a multiple of 16, 4672 (the ..."),
            ("cache", _cache(2, 4672, 584, start=8), ".data_ptr(): expected a multiple of 16, ..."),
            ("cache", torch.zeros(2, 2, 8, 584).byte(), ".shape: expected [pages, 1, page_size..."),
            (
                "cache",
                torch.zeros(2, 0, 584).byte(),
                ".shape: expected pages of 1 token or more...",
            ),
            ("norm_weight", [1.0], ": expected a torch.Tensor, got list"),
            ("norm_weight", _KPE[:, :0], ".shape: expected [512], got [4, 0]"),
            ("norm_weight", _CKV[0].half(), ".dtype: expected torch.bfloat16 (dtype of latent..."),
            ("norm_weight", _CKV.view(-1)[:1024:2], " must be contiguous: expected no gaps..."),
            (
                "norm_weight",
                _CKV.view(-1)[1:513],
                ".data_ptr(): expected a multiple of 16, got ...",
            ),
            ("norm_eps", 1e39, ": expected a number that float32 can hold, got 1e+39"),
            (
                "positions",
                {"cos_sin_cache": _TABLE},
                ": expected a torch.Tensor for rope, got None",
            ),
            ("cos_sin_cache", {"positions": _INTS}, ": expected a torch.Tensor for rope, got None"),
            (
                "positions",
                {"positions": _INTS[:3], "cos_sin_cache": _TABLE},
                ".shape: expected [4] (latent_kv), got [3]",
            ),
            (
                "cos_sin_cache",
                {"positions": _INTS, "cos_sin_cache": _TABLE.half()},
                ".dtype: expected torch.float32, got torch.float16",
            ),
            (
                "cos_sin_cache",
                {"positions": _INTS, "cos_sin_cache": _TABLE[:0]},
                ".shape: expected [1, 64] (max_position, cosines and sines), got [0, 64]",
            ),
        ],
        "inline": [
            ("inline_scale", 2, ": expected a bool, got 2"),
            (_STRIDE, {"cache": _cache(2, 8192, 536, width=528)}, ": expected a multiple of 16..."),
            (
                "cache",
                _cache(2, 8192, 544, width=528),
                ".stride(0): expected a multiple of 544 ...",
            ),
        ],
        "pack": [
            ("kv_layout", "NDH", ": expected one of HND, NHD, got 'NDH'"),
            ("latent_kv", _F16[0], ".ndim: expected 3 or 4, got 2"),
            ("page_stride", 2335, ": expected an int, 2336 or more, got 2335"),
            ("page_stride", 2344, ": expected a multiple of 16, got 2344"),
        ],
        "packed": [
            ("kpe", _KPE[:, :0], ".shape[-1]: expected 64, got 0"),
            ("kpe", _KPE[:3], ".shape: expected [4, 64] (tokens of ckv), got [3, 64]"),
            (
                "kpe",
                {
                    "kpe": _KPE[:, :0],
                    "scales": None,
                    "cache": torch.zeros(2, 8, 528).byte(),
                    "positions": _INTS,
                },
                ".shape[-1]: expected 64 for rope, got 0",
            ),
            ("kpe", _KPE.half(), ".dtype: expected torch.bfloat16 (dtype of ckv), got torch..."),
            ("cache", torch.zeros(2, 8, 656).byte(), ".shape[-1]: expected 640 (bytes of a ..."),
            (
                "cache",
                {"scales": None},
                ".shape[-1]: expected 656 (bytes of a row; other widths ...",
            ),
            ("scales", torch.zeros(2, 7), ".shape: expected [2, 8] (pages, page_size), got [2, 7]"),
            ("scales", torch.zeros(2, 8).half(), ".dtype: expected torch.float32, got torch..."),
            (
                "scales",
                torch.zeros(1, 8).expand(2, 8),
                ": expected elements that do not overlap...",
            ),
        ],
        "paged": [
            (
                "append_kpe",
                _KPE[:3],
                ".shape: expected [4, 64] (tokens of append_ckv), got [3, 64]",
            ),
            ("ckv_cache", torch.zeros(2, 8, 512), ".dtype: expected torch.bfloat16 (dtype of ..."),
            (
                "kpe_cache",
                torch.zeros(2, 7, 64).bfloat16(),
                ".shape: expected [2, 8, 64] (pages...",
            ),
            ("positions", _INTS[:3], ".shape: expected [4] (tokens), got [3]"),
            ("batch_indices", _INTS.long(), ".dtype: expected torch.int32, got torch.int64"),
            ("kv_indptr", _INTS[:0], ".shape: expected [batch + 1], got [0]"),
            ("kv_last_page_len", _INTS[:2], ".shape: expected [1] (batch), got [2]"),
            ("norm_weight", _CKV[0, :256], ".shape: expected [512], got [256]"),
            ("cos_sin_cache", _TABLE[:, :32], ".shape: expected [3, 64] (max_position, cosines..."),
            (
                "append_kpe",
                {
                    "append_kpe": _KPE[:, :32],
                    "kpe_cache": torch.zeros(2, 8, 32).bfloat16(),
                    "cos_sin_cache": _TABLE,
                },
                ".shape[-1]: expected 64 with cos_sin_cache, got 32",
            ),
            (
                "append_ckv",
                {
                    "append_ckv": _CKV[:, :128],
                    "ckv_cache": torch.zeros(2, 8, 128).bfloat16(),
                    "norm_weight": torch.zeros(128).bfloat16(),
                },
                ".shape[-1]: expected 512 or 256 with norm_weight, got 128",
            ),
        ],
    }
)
def test_a_write_is_rejected(call: str, changes: dict[str, Any], message: str) -> None:
    """The message has argument, rule and value, and nothing is written."""
    given = _call(call) | changes
    caches = [given[name] for name in given if "cache" in name or name == "scales"]
    caches = [cache for cache in caches if isinstance(cache, Tensor)]
    before = [cache.clone() for cache in caches]

    with rejects(message):
        _FUNCTIONS[call](**given)

    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))
