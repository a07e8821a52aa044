"""Benchmark cases: decode calls by shape, with the FLOP and bytes of each.

Plain arithmetic, without torch and without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from random import Random
from statistics import NormalDist

from mlagen.spec.dtype import TOKEN_SCALE_BYTES, DType
from mlagen.spec.mla.variant import output_dtype

FAMILIES = ("mla", "gqa")

# DeepSeek-V3: the latent part of a cached token, which is also its value, and the rope part.
# GLM-5.3-Flash has the same latent part and no rope part.
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64

# DeepSeek-V4: a query token attends to its last tokens, in one pool, and to compressed ones, in
# another. By compression ratio, the tokens of the KV block that vLLM cuts pages of the compressed
# pool from: 4:1 and 128:1 of V4, 1:1 and 2:1 of V4.1.
SWA_TOKENS = 128
VLLM_BLOCK_SIZES = {4: 256, 128: 256, 1: 64, 2: 64}
# From this ratio on a query token attends to all compressed tokens, below it to its own top-k.
_DENSE_RATIO = 128
_INDEX_BYTES = 4

# Tokens that an index of sparse GQA names: in Qwen3.8's QSA one, in MiniMax-M3's MSA a page.
SPARSE_BLOCKS = (1, 128)

NVFP4_BLOCK = 16  # elements that share a scale

_MAX_INPUT_SETS = 1024
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One MLA or GQA decode call over a paged KV cache.

    In MLA ``kv_heads`` is 1, and the first ``head_dim_vo`` elements of a key are its value.
    ``seq_len`` is the length of every request, or the mean length if ``is_ragged``. With ``top_k``
    every query token attends to that many of its request's tokens, and with ``window_left`` to that
    many before its own. In GQA an index then names ``sparse_block`` tokens: a query token has
    indices of tokens for all KV heads, or indices of blocks, with that of its own, for each.

    With a dtype of two pools, ``window_left`` selects the tokens of the first one, and ``top_k`` is
    the number of listed tokens of the second one, where a token stands for ``compress_ratio``.
    Then ``is_ragged`` is about the number of listed tokens.
    """

    family: str
    batch: int
    seq_len: int  # tokens, the new ones included
    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_len: int = 1
    page_size: int = 64  # tokens
    dtype: DType = DType.BF16
    kv_dtype: DType = DType.BF16
    is_ragged: bool = False
    top_k: int = 0  # dense if 0
    sparse_block: int = 1  # tokens; more than one is also the page size
    window_left: int = -1  # unlimited if negative
    compress_ratio: int = 0  # 0 without a second pool
    soft_cap: int = 0  # of the scores; 0: none

    @property
    def label(self) -> str:
        """The case in words, without default values."""
        heads = f"{self.heads}" if self.family == "mla" else f"{self.heads}/{self.kv_heads}"
        dtypes = f"{self.dtype}" if self.dtype is self.kv_dtype else f"{self.dtype}/{self.kv_dtype}"
        words = [
            f"{self.family} {dtypes}",
            f"{self.batch} x {'~' if self.is_ragged else ''}{self.seq_len}",
            f"{heads} heads",
        ]
        if self.has_two_pools:
            return ", ".join([*words, *self._two_pool_words()])
        if self.family == "gqa" and {self.head_dim_qk, self.head_dim_vo} != {128}:
            values = f"/{self.head_dim_vo}" if self.has_value_dims else ""
            words.append(f"head_dim {self.head_dim_qk}{values}")
        if self.family == "mla" and self.qk_rope_head_dim != QK_ROPE_HEAD_DIM:
            words.append(f"dims {self.head_dim_vo}+{self.qk_rope_head_dim}")
        if self.top_k:
            blocks = f" in blocks of {self.sparse_block}" if self.sparse_block > 1 else ""
            words.append(f"top-k {self.top_k}{blocks}")
        if self.window_left >= 0:
            words.append(f"window_left {self.window_left}")
        if self.soft_cap:
            words.append(f"soft_cap {self.soft_cap}")
        if self.q_len != 1:
            words.append(f"q_len {self.q_len}")
        if self.page_size not in {64, self.sparse_block}:
            words.append(f"page_size {self.page_size}")
        return ", ".join(words)

    def _two_pool_words(self) -> Iterator[str]:
        swa, extra = self.window_left + 1, self.top_k
        yield f"{swa} + {extra} of {self.compress_ratio}:1" if extra else f"{swa} tokens"
        if self.q_len != 1:
            yield f"q_len {self.q_len}"
        if self.page_size != 64:
            yield f"page_size {self.page_size}"

    @property
    def has_two_pools(self) -> bool:
        """Whether a query token has top-k indices into each of two pools."""
        return self.kv_dtype.extra_row is not None

    @property
    def is_sparse_gqa(self) -> bool:
        """Whether each query token of a GQA case has top-k indices."""
        return self.family == "gqa" and self.top_k > 0

    @property
    def indices_shape(self) -> tuple[int, int, int, int]:
        """Shape of the top-k indices of sparse GQA; that of tokens has one KV head for all."""
        kv_heads = self.kv_heads if self.sparse_block > 1 else 1
        return self.batch, self.q_len, kv_heads, self.top_k // self.sparse_block

    @property
    def extra_page_size(self) -> int:
        """Compressed tokens of a page, 0 without a second pool."""
        ratio = self.compress_ratio
        return VLLM_BLOCK_SIZES[ratio] // ratio if ratio else 0

    @property
    def extra_tokens(self) -> int:
        """Compressed tokens of a request."""
        return self.seq_len // self.compress_ratio if self.compress_ratio else 0

    @property
    def shares_extra(self) -> bool:
        """Whether the query tokens of a request attend to the same compressed tokens."""
        return self.compress_ratio >= _DENSE_RATIO

    @cached_property
    def list_lens(self) -> tuple[tuple[int, int], ...]:
        """The lengths of the two lists of each query token.

        Ragged ones are uniform, from one to all of the first and from none to all of the second.
        """
        swa, extra, tokens = self.window_left + 1, self.top_k, self.batch * self.q_len
        if not self.is_ragged:
            return ((swa, extra),) * tokens
        drawn = Random(_SEED)  # noqa: S311
        return tuple(
            (1 + int(drawn.random() * swa), int(drawn.random() * (extra + 1)))
            for _ in range(tokens)
        )

    @property
    def has_value_dims(self) -> bool:
        """Whether the values of a GQA case have fewer dims than its keys."""
        return self.family == "gqa" and self.head_dim_vo != self.head_dim_qk

    @property
    def qk_rope_head_dim(self) -> int:
        """Elements of a key that are no part of its value: the rope part of MLA."""
        return self.head_dim_qk - self.head_dim_vo

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """The length of each request.

        Ragged lengths come from a normal distribution with mean ``seq_len`` and standard deviation
        ``seq_len / 2``, from a fixed seed, clamped to ``q_len`` and twice the mean.
        """
        if not self.is_ragged or self.has_two_pools:
            return (self.seq_len,) * self.batch
        # By the inverse CDF: Python guarantees only the sequence of random().
        drawn, lengths = Random(_SEED), NormalDist(self.seq_len, self.seq_len / 2)  # noqa: S311
        return tuple(
            min(max(round(lengths.inv_cdf(drawn.random())), self.q_len), 2 * self.seq_len)
            for _ in range(self.batch)
        )

    @property
    def tokens(self) -> int:
        """Total number of cached tokens."""
        return sum(self.seq_lens)

    @property
    def flop(self) -> int:
        """Multiplications and additions of the QK and PV GEMMs, within the mask."""
        return 2 * self.heads * self._pairs * (self.head_dim_qk + self.head_dim_vo)

    @property
    def _pairs(self) -> int:
        """Pairs of a query token and a token that it attends to."""
        if self.has_two_pools:
            return sum(map(sum, self.list_lens))
        if self.top_k:
            # In the block of its own position, a query token does not attend to later tokens.
            hidden = sum(-(self.seq_len - i) % self.sparse_block for i in range(self.q_len))
            return self.batch * (self.q_len * self.top_k - hidden)
        widest = self.window_left + 1 if self.window_left >= 0 else max(self.seq_lens)
        return sum(
            min(seq_len - before, widest)
            for seq_len in self.seq_lens
            for before in range(self.q_len)  # query tokens after this one
        )

    @property
    def _read_tokens(self) -> int:
        """Cached tokens that a call has to read; query tokens share no top-k index."""
        if self.top_k:
            return self._pairs
        if self.window_left < 0:
            return self.tokens
        return sum(min(seq_len, self.window_left + self.q_len) for seq_len in self.seq_lens)

    @property
    def moved_bytes(self) -> int:
        """Bytes to read each attended token once, read the query and write the output.

        Those of indices are among them over two pools and in sparse GQA.
        """
        rows = self.batch * self.q_len * self.heads
        return (
            (self._pool_bytes if self.has_two_pools else self._cache_bytes)
            + rows * self.dtype.row_bytes(self.head_dim_qk)
            + rows * output_dtype(self.dtype).row_bytes(self.head_dim_vo)
        )

    @property
    def _cache_bytes(self) -> int:
        width = self.head_dim_qk + (self.head_dim_vo if self.family == "gqa" else 0)
        row_bytes = self.kv_dtype.row_bytes(width)
        if self.kv_dtype is DType.NVFP4:
            row_bytes += width // NVFP4_BLOCK  # a scale of one byte per block
        if self.kv_dtype.has_token_scales:
            row_bytes += 2 * TOKEN_SCALE_BYTES
        indices = prod(self.indices_shape) if self.is_sparse_gqa else 0
        return self._read_tokens * self.kv_heads * row_bytes + indices * _INDEX_BYTES

    @property
    def _pool_bytes(self) -> int:
        """Bytes of the listed tokens of both pools, and of their indices.

        The windows of a request's query tokens overlap; chosen compressed tokens are taken as
        disjoint.
        """
        swa_row, extra_row = self.kv_dtype.row, self.kv_dtype.extra_row
        assert swa_row is not None, "the dtype has two pools"
        assert extra_row is not None, "the dtype has two pools"
        total = 0
        for start in range(0, self.batch * self.q_len, self.q_len):
            lens = self.list_lens[start : start + self.q_len]
            swa = max(swa for swa, _ in lens) + self.q_len - 1
            extra = (max if self.shares_extra else sum)(extra for _, extra in lens)
            total += swa * swa_row.row_bytes(self.head_dim_qk)
            total += extra * extra_row.row_bytes(self.head_dim_qk)
        return total + self._pairs * _INDEX_BYTES

    @property
    def flop_per_byte(self) -> float:
        """Arithmetic intensity, the roofline's x coordinate."""
        return self.flop / self.moved_bytes

    @property
    def is_fp8_math(self) -> bool:
        """Whether FP8 tensor-core MMAs apply; the latent part under an e4m3 query is e4m3 too."""
        return self.dtype is DType.E4M3

    @property
    def error_bound(self) -> float:
        """Bound of the relative rounding error in the Frobenius norm.

        Rounding to bf16 changes an element by at most 2^-8 of it, and by about 0.4 of that, 1.6e-3,
        in the root mean square. P, the partial outputs of splits and O are rounded independently,
        which gives 2.8e-3; 6e-3, about twice that, also covers another summation order. With a
        quantized KV cache a kernel may round P to e4m3: at most 2^-4, 2.6e-2 in the mean; 5e-2,
        about twice that, also covers a rounded query. Over two pools, with powers of two as scales,
        kernels compute in 16 bits; 1e-2 also covers a query in two e4m3 terms.
        """
        if self.has_two_pools:
            return 1e-2
        return 6e-3 if self.kv_dtype.is_16bit else 5e-2

    def input_sets(self, l2_bytes: int) -> int:
        """Return the number of input sets to rotate so that L2 holds none when it is read again.

        Together they are 8 times the size of L2, but at most 1024 sets.
        """
        return min(max(1, -(-8 * l2_bytes // self.moved_bytes)), _MAX_INPUT_SETS)
