"""Named MLA decode problems, with poison in everything that must not be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from mlagen.api.mla_args import MlaArgs
from mlagen.runtime.device import arch_of_device
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.mla_sm90 import MlaSm90Spec
from mlagen.spec.mla_sm90_calls import mla_sm90_kernel
from mlagen.spec.mla_sm90_fp8kv import MlaSm90Fp8KvSpec
from mlagen.spec.mla_support import MlaVariant
from tests.reference import (
    Attention,
    assert_close,
    attend,
    lse_tolerance,
    output_tolerance,
    stack,
)

E4M3 = torch.float8_e4m3fn


# Query and cache where a kernel may multiply e4m3 as such, by the query's dtype and the format.
_STORED = {
    (E4M3, ""): (DType.E4M3, DType.E4M3),
    (E4M3, "fp8_per_token"): (DType.FP8_PER_TOKEN, DType.FP8_PER_TOKEN),
    (torch.bfloat16, "e4m3"): (DType.BF16, DType.E4M3),
    (torch.bfloat16, "fp8_ds_mla"): (DType.BF16, DType.FP8_DS_MLA),
}


@dataclass(frozen=True, kw_only=True)
class MlaCase:
    """One problem; ``q_lens`` makes it ragged, else every request has ``q_len`` query tokens."""

    name: str
    seq_lens: tuple[int, ...]
    heads: int = 16
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16  # of the query
    kv_format: str = (
        ""  # "e4m3" under another query, "fp8_ds_mla", "fp8_per_token"; else as the query
    )
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    score_scale: float = 192**-0.5
    output_scale: float = 1.0
    with_sinks: bool = False
    query_magnitude: float = 1.0
    spare_pages: int = 3  # columns of the block table past the longest request
    cache_form: str = "3-D"  # "[P,1,ps,d]", "[P,ps,1,d]" or "strided" too
    top_k: int = 0
    with_top_k_lens: bool = False
    values: str = "shared"  # "other pages" of the cache, or pages of an "other cache"
    seed: int = 0
    # What FlashInfer's first signature cannot say:
    parts_apart: bool = False  # latent and rope in tensors of their own, in query and cache
    flat_tables: bool = False  # page ids in a row, with the place where each request's begin
    scales: str = ""  # of an e4m3 cache under another query: "two", or "for 128 elements"
    bias: str = ""  # "one for all heads", or "for each head"
    is_causal: bool = True
    scores_take_bmm2: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def has_door(self) -> bool:
        """Whether ``trtllm_batch_decode_with_kv_cache_mla`` has words for it."""
        unusual = (self.parts_apart, self.flat_tables, self.scales, self.bias)
        other_form = self.kv_format == "fp8_per_token" or self.values == "other cache"
        return not any(unusual) and not other_form and self.is_causal and not self.scores_take_bmm2

    def build(self, device: str) -> MlaProblem:
        """Return tensors on ``device`` and what is needed to check a result."""
        from tests.mla_build import build

        return build(self, device)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one query token sees, float64 on the CPU; a token seen twice counts twice."""

    query: torch.Tensor  # [heads, d]
    keys: torch.Tensor  # [n, d]
    values: torch.Tensor  # [n, rank]
    counts: torch.Tensor  # [n]
    bias: torch.Tensor | None  # [heads or 1, n]


@dataclass(frozen=True, kw_only=True)
class MlaProblem:
    """The tensors of a case, and what each query token sees."""

    case: MlaCase
    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None
    cum_seq_lens_q: torch.Tensor | None
    top_k_lens: torch.Tensor | None
    seen: list[Seen] = field(repr=False)
    rare: dict[str, Any] = field(repr=False)  # fields of MlaArgs beyond the first signature

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        return self.case.q_lens or (self.case.q_len,) * len(self.case.seq_lens)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``trtllm_batch_decode_with_kv_cache_mla``."""
        device = self.query.device
        arguments: dict[str, Any] = {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device=device),
            "qk_nope_head_dim": 128,
            "kv_lora_rank": self.case.kv_lora_rank,
            "qk_rope_head_dim": self.case.qk_rope_head_dim,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": max(self.case.seq_lens, default=0),
            "bmm1_scale": self.case.score_scale,
            "bmm2_scale": self.case.output_scale,
            "sinks": self.sinks,
        }
        if self.cum_seq_lens_q is not None:
            arguments["cum_seq_lens_q"] = self.cum_seq_lens_q
            arguments["max_q_len"] = max(self.q_lens)
        if self.case.top_k:
            arguments["sparse_mla_top_k"] = self.case.top_k
            arguments["sparse_mla_top_k_lens"] = self.top_k_lens
        if self.case.values == "other pages":
            arguments["uses_shared_paged_kv_idx"] = False
        return arguments | changes

    def inputs(self, **changes: Any) -> MlaArgs:
        """Return the same, and what that signature has no words for, as the inputs of a call."""
        arguments = self.arguments()
        known = {name: arguments[name] for name in arguments if name in MlaArgs._fields}
        if self.case.values == "other pages":
            known["value_cache"] = self.kv_cache
        known |= {"top_k": self.case.top_k, "top_k_lens": self.top_k_lens}
        return MlaArgs(**known | self.rare | changes)

    @property
    def math_dtype(self) -> torch.dtype:
        """What a kernel multiplies with."""
        if self.case.kv_format == "fp8_per_token":
            return torch.bfloat16
        if self.case.dtype is not E4M3:
            return self.case.dtype
        rounds = self._e4m3_kernel is not None and self._e4m3_kernel.p_dtype is DType.E4M3
        return E4M3 if rounds else torch.float16

    @property
    def _hopper(self) -> Arch | None:
        """The architecture, if calls may take a kernel made for Hopper."""
        settings = current_settings()
        if self.query.device.type != "cuda" or settings.mla_kernel == "sm80":
            return None
        return arch_of_device(self.query.device.index or 0)

    @property
    def _e4m3_kernel(self) -> MlaSm90Spec | None:
        """The kernel that calls may take which multiplies e4m3 as such."""
        case = self.case
        stored = _STORED.get((case.dtype, case.kv_format))
        if stored is None or self._hopper is None:
            return None
        query_dtype, kv_dtype = stored
        variant = MlaVariant(
            query_dtype=query_dtype,
            kv_dtype=kv_dtype,
            kv_lora_rank=case.kv_lora_rank,
            qk_rope_head_dim=case.qk_rope_head_dim,
            page_size=case.page_size,
            lookup="sparse" if case.top_k else "paged",
            values="shared" if case.values == "shared" else "separate",
            mask="bias" if case.bias else "causal",
        )
        return mla_sm90_kernel(self._hopper, variant, 1, current_settings().mla_p_dtype)

    @property
    def _score_sums(self) -> tuple[tuple[int, int], ...]:
        """Dims of each sum of scores in e4m3, and its steps of 32 products."""
        kernel = self._e4m3_kernel
        if kernel is None:
            return ()
        if not isinstance(kernel, MlaSm90Fp8KvSpec):
            return ((576, 18),)
        parts = 2 if kernel.splits_query else 1
        latent = ((128, 4 * parts),) * 4
        return (*latent, (64, 2 * parts)) if kernel.variant.kv_dtype is DType.E4M3 else latent

    def expected(self) -> Attention:
        """Return what float64 gives: out ``[tokens, heads, dim]`` and LSE ``[tokens, heads]``."""
        case = self.case
        has_scales = bool(case.scales) or case.kv_format.startswith("packed")
        parts = []
        for seen in self.seen:
            # A token seen n times is one with n times the weight.
            bias = seen.counts.log()[None]
            parts.append(
                attend(
                    seen.query,
                    seen.keys,
                    seen.values,
                    score_scale=case.score_scale
                    * (case.output_scale if case.scores_take_bmm2 else 1.0),
                    output_scale=case.output_scale,
                    sinks=self.sinks.cpu() if self.sinks is not None else None,
                    bias=bias if seen.bias is None else bias + seen.bias,
                    rows_round_to=self.math_dtype if has_scales else None,
                    score_sums=self._score_sums,
                    rounds_weights_to_e4m3=self.math_dtype is E4M3,
                )
            )
        return stack(parts)

    def check(
        self, out: torch.Tensor, lse: torch.Tensor | None = None, *, natural: bool = False
    ) -> None:
        """Fail unless every element of ``out``, and of ``lse`` if given, is right."""
        expected = self.expected()
        tolerance = output_tolerance(out.dtype, expected, self.math_dtype)
        assert_close(out.reshape(expected.out.shape), expected.out, tolerance, "out")
        if lse is not None:
            wanted = expected.lse * (math.log(2) if natural else 1.0)
            wanted = wanted.float()  # which may be infinity
            tolerance = lse_tolerance(self.math_dtype, expected)
            assert_close(lse.reshape(wanted.shape), wanted, tolerance, "lse")
