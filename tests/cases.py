"""MLA decode problems by name, with poison in all memory that must not be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from mlagen.families.mla.args import MlaArgs
from mlagen.runtime.device import arch_of_device
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm90 import MlaSm90Spec
from mlagen.spec.mla.sm90_calls import mla_sm90_kernel
from mlagen.spec.mla.sm90_fp8kv import MlaSm90Fp8KvSpec
from mlagen.spec.mla.variant import MlaVariant
from tests.reference import (
    Attention,
    assert_close,
    attend,
    lse_tolerance,
    output_tolerance,
    stack,
)

E4M3 = torch.float8_e4m3fn


# Query and cache dtypes of the kernels with FP8 MMAs, by the query's dtype and the cache format.
_STORED = {
    (E4M3, ""): (DType.E4M3, DType.E4M3),
    (E4M3, "fp8_per_token"): (DType.FP8_PER_TOKEN, DType.FP8_PER_TOKEN),
    (torch.bfloat16, "e4m3"): (DType.BF16, DType.E4M3),
    (torch.bfloat16, "fp8_ds_mla"): (DType.BF16, DType.FP8_DS_MLA),
}


@dataclass(frozen=True, kw_only=True)
class MlaCase:
    """One problem; ``q_lens`` makes it ragged, else every sequence has ``q_len`` query tokens."""

    name: str
    seq_lens: tuple[int, ...]
    heads: int = 16
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16  # of the query
    kv_format: str = (
        ""  # "e4m3" under a 16-bit query, "fp8_ds_mla", "fp8_per_token"; default: the query's dtype
    )
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    score_scale: float = 192**-0.5
    output_scale: float = 1.0
    with_sinks: bool = False
    query_magnitude: float = 1.0
    spare_pages: int = 3  # columns of the block table past the longest sequence
    cache_layout: str = "3-D"  # or "[P,1,ps,d]", "[P,ps,1,d]", "strided"
    top_k: int = 0
    with_top_k_lens: bool = False
    values: str = "shared"  # or "other pages" of the cache, or pages of an "other cache"
    seed: int = 0
    # Beyond ``trtllm_batch_decode_with_kv_cache_mla``:
    separate_rope: bool = False  # latent and rope in tensors of their own, in query and cache
    flat_tables: bool = False  # page ids in one dimension with kv_indptr
    scales: str = ""  # of an e4m3 cache under a 16-bit query: "two", or "for 128 elements"
    bias: str = ""  # "one for all heads", or "for each head"
    is_causal: bool = True
    scores_take_bmm2: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def has_trtllm_entry_point(self) -> bool:
        """Whether ``trtllm_batch_decode_with_kv_cache_mla`` has arguments for it."""
        unusual = (self.separate_rope, self.flat_tables, self.scales, self.bias)
        other_form = self.kv_format == "fp8_per_token" or self.values == "other cache"
        return not any(unusual) and not other_form and self.is_causal and not self.scores_take_bmm2

    def build(self, device: str) -> MlaProblem:
        """Return the tensors on ``device`` and the data for checking a result."""
        from tests.mla_build import build

        return build(self, device)


@dataclass(frozen=True, kw_only=True)
class VisibleTokens:
    """Tokens that one query token attends to, float64 on the CPU; a repeated token counts twice."""

    query: torch.Tensor  # [heads, d]
    keys: torch.Tensor  # [n, d]
    values: torch.Tensor  # [n, rank]
    counts: torch.Tensor  # [n]
    bias: torch.Tensor | None  # [heads or 1, n]


@dataclass(frozen=True, kw_only=True)
class MlaProblem:
    """The tensors of a case, and the tokens that each query token attends to."""

    case: MlaCase
    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None
    cum_seq_lens_q: torch.Tensor | None
    top_k_lens: torch.Tensor | None
    visible: list[VisibleTokens] = field(repr=False)
    extra_args: dict[str, Any] = field(
        repr=False
    )  # fields of MlaArgs beyond the TensorRT-LLM signature

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
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
        """Return the same as the arguments of a call, with those beyond that signature."""
        arguments = self.arguments()
        known = {name: arguments[name] for name in arguments if name in MlaArgs._fields}
        if self.case.values == "other pages":
            known["value_cache"] = self.kv_cache
        known |= {"top_k": self.case.top_k, "top_k_lens": self.top_k_lens}
        return MlaArgs(**known | self.extra_args | changes)

    @property
    def math_dtype(self) -> torch.dtype:
        """Element type of the MMA."""
        if self.case.kv_format == "fp8_per_token":
            return torch.bfloat16
        if self.case.dtype is not E4M3:
            return self.case.dtype
        rounds = self._fp8_mma_spec is not None and self._fp8_mma_spec.p_dtype is DType.E4M3
        return E4M3 if rounds else torch.float16

    @property
    def _sm90_arch(self) -> Arch | None:
        """The architecture, if calls may use an sm90 kernel."""
        settings = current_settings()
        if self.query.device.type != "cuda" or settings.mla_kernel == "sm80":
            return None
        return arch_of_device(self.query.device.index or 0)

    @property
    def _fp8_mma_spec(self) -> MlaSm90Spec | None:
        """The kernel with FP8 MMAs that calls may use."""
        case = self.case
        stored = _STORED.get((case.dtype, case.kv_format))
        if stored is None or self._sm90_arch is None:
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
        return mla_sm90_kernel(self._sm90_arch, variant, 1, current_settings().mla_p_dtype)

    @property
    def _score_sums(self) -> tuple[tuple[int, int], ...]:
        """Dims of each FP8 score accumulation, and its MMA steps of 32 elements."""
        kernel = self._fp8_mma_spec
        if kernel is None:
            return ()
        if not isinstance(kernel, MlaSm90Fp8KvSpec):
            return ((576, 18),)
        parts = 2 if kernel.splits_query else 1
        latent = ((128, 4 * parts),) * 4
        return (*latent, (64, 2 * parts)) if kernel.variant.kv_dtype is DType.E4M3 else latent

    def expected(self) -> Attention:
        """Return the float64 result: out ``[tokens, heads, dim]`` and LSE ``[tokens, heads]``."""
        case = self.case
        has_scales = bool(case.scales) or case.kv_format.startswith("fp8_")
        parts = []
        for tokens in self.visible:
            # A token repeated n times has n times the weight.
            bias = tokens.counts.log()[None]
            parts.append(
                attend(
                    tokens.query,
                    tokens.keys,
                    tokens.values,
                    score_scale=case.score_scale
                    * (case.output_scale if case.scores_take_bmm2 else 1.0),
                    output_scale=case.output_scale,
                    sinks=self.sinks.cpu() if self.sinks is not None else None,
                    bias=bias if tokens.bias is None else bias + tokens.bias,
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
            wanted = wanted.float()  # may be infinity
            tolerance = lse_tolerance(self.math_dtype, expected)
            assert_close(lse.reshape(wanted.shape), wanted, tolerance, "lse")
