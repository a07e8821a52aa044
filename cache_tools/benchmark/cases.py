"""What is measured: decode calls by their shapes, and how much each computes and moves.

Plain arithmetic; neither torch nor a GPU is needed for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random
from statistics import NormalDist

from mlagen.spec.dtype import DType
from mlagen.spec.mla_support import output_dtype

FAMILIES = ("mla", "gqa")

# Of DeepSeek-V3: the latent part of a cached token, which is its value too, and the rope part.
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64

_MAX_INPUT_SETS = 1024
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One decode call over a paged cache, of multi-head latent or grouped-query attention.

    Of MLA ``kv_heads`` is 1, and the first ``head_dim_vo`` elements of a key are its value.
    ``seq_len`` is the length of every request, or their mean if ``is_ragged``.
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

    @property
    def label(self) -> str:
        """The case in words, without what is usual."""
        heads = f"{self.heads}" if self.family == "mla" else f"{self.heads}/{self.kv_heads}"
        dtypes = f"{self.dtype}" if self.dtype is self.kv_dtype else f"{self.dtype}/{self.kv_dtype}"
        words = [
            f"{self.family} {dtypes}",
            f"{self.batch} x {'~' if self.is_ragged else ''}{self.seq_len}",
            f"{heads} heads",
        ]
        if self.family == "gqa" and self.head_dim_qk != 128:
            words.append(f"head_dim {self.head_dim_qk}")
        if self.q_len != 1:
            words.append(f"q_len {self.q_len}")
        if self.page_size != 64:
            words.append(f"page_size {self.page_size}")
        return ", ".join(words)

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """The length of each request.

        Ragged ones are drawn from a normal distribution around ``seq_len``, half of it wide, by a
        fixed seed, and kept between ``q_len`` and twice the mean.
        """
        if not self.is_ragged:
            return (self.seq_len,) * self.batch
        # A normal distribution by its inverse: Python promises the sequence of random() alone.
        drawn, lengths = Random(_SEED), NormalDist(self.seq_len, self.seq_len / 2)  # noqa: S311
        return tuple(
            min(max(round(lengths.inv_cdf(drawn.random())), self.q_len), 2 * self.seq_len)
            for _ in range(self.batch)
        )

    @property
    def tokens(self) -> int:
        """The cached tokens of all requests."""
        return sum(self.seq_lens)

    @property
    def flop(self) -> int:
        """Multiplications and additions of both products, of what the causal rule shows."""
        hidden = self.q_len * (self.q_len - 1) // 2  # of each request, tokens newer than the row's
        pairs = self.q_len * self.tokens - self.batch * hidden
        return 2 * self.heads * pairs * (self.head_dim_qk + self.head_dim_vo)

    @property
    def moved_bytes(self) -> int:
        """Every cached token read once, the query read, the output written."""
        width = self.head_dim_qk + (self.head_dim_vo if self.family == "gqa" else 0)
        rows = self.batch * self.q_len * self.heads
        return (
            self.tokens * self.kv_heads * self.kv_dtype.row_bytes(width)
            + rows * self.dtype.row_bytes(self.head_dim_qk)
            + rows * output_dtype(self.dtype).row_bytes(self.head_dim_vo)
        )

    @property
    def flop_per_byte(self) -> float:
        """Arithmetic intensity, where the case stands on a roofline."""
        return self.flop / self.moved_bytes

    @property
    def is_fp8_math(self) -> bool:
        """Whether query and cache are both e4m3, so that tensor cores may multiply them as such."""
        return self.dtype is self.kv_dtype is DType.E4M3

    @property
    def error_bound(self) -> float:
        """The largest relative error, in the Frobenius norm, that rounding explains.

        Rounding to bf16 moves an element by 2^-8 of itself at the most, and in the root mean
        square by about 0.4 of that, 1.6e-3. Weights and output are rounded independently, which
        makes 2.3e-3, and 4e-3, about 2^-8, is beyond what sums in another order add to it. Over
        e4m3 a kernel may round its weights to e4m3: 2^-4 at the most, 2.6e-2 in the mean, of which
        5e-2 is twice as much, for one that rounds its query as well.
        """
        return 4e-3 if self.kv_dtype.is_16bit else 5e-2

    def input_sets(self, l2_bytes: int) -> int:
        """Return how many inputs to rotate so that none is in the L2 cache when it is read again.

        Together they are 8 times the cache; or 1024, in calls so small that this takes more.
        """
        return min(max(1, -(-8 * l2_bytes // self.moved_bytes)), _MAX_INPUT_SETS)
