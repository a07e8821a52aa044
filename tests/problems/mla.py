"""MLA decode problems: their facts, tensors and float64 results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mlagen.families.mla.args import MlaArgs
from mlagen.runtime.device import arch_of_device
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm90 import MlaSm90Fp8KvSpec, MlaSm90Spec, mla_sm90_kernel
from mlagen.spec.mla.variant import MlaVariant
from tests.problems.problem import E4M3, POISON, Case, Problem
from tests.problems.reference import Attention, attend, joined

# Every kind of query and cache.
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "e4m3": {"dtype": E4M3},
    **{
        f"{name} over {kv_format}": {"dtype": dtype, **facts}
        for kv_format, facts in {
            "e4m3": {"kv_format": "e4m3"},
            "e4m3 with two scales": {"kv_format": "e4m3", "scales": "two"},
            "e4m3 with scales for 128 elements": {
                "kv_format": "e4m3",
                "scales": "for 128 elements",
            },
            "fp8_ds_mla": {"kv_format": "fp8_ds_mla"},
        }.items()
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    },
    "e4m3 over fp8_ds_mla": {"dtype": E4M3, "kv_format": "fp8_ds_mla"},
    "fp8_per_token": {"dtype": E4M3, "kv_format": "fp8_per_token"},
}
SPARSE_KINDS = [name for name in KINDS if name != "fp8_per_token" and "scales" not in KINDS[name]]
SEPARATE_KINDS = [name for name in SPARSE_KINDS if "fp8_ds_mla" not in name]

# Query and cache dtypes of the kernels with FP8 MMAs, by the query's dtype and the cache format.
_FP8_MMA_DTYPES = {
    (E4M3, ""): (DType.E4M3, DType.E4M3),
    (E4M3, "fp8_per_token"): (DType.FP8_PER_TOKEN, DType.FP8_PER_TOKEN),
    (torch.bfloat16, "e4m3"): (DType.BF16, DType.E4M3),
    (torch.bfloat16, "fp8_ds_mla"): (DType.BF16, DType.FP8_DS_MLA),
    (E4M3, "fp8_ds_mla"): (DType.E4M3, DType.FP8_DS_MLA),
}


@dataclass(frozen=True, kw_only=True)
class MlaCase(Case):
    """The facts of an MLA problem."""

    heads: int = 16
    kv_format: str = (
        ""  # "e4m3" under a 16-bit query, "fp8_ds_mla", "fp8_per_token", or the query's
    )
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    score_scale: float = 192**-0.5
    with_sinks: bool = False
    cache_layout: str = "3-D"  # or "[P,1,ps,d]", "[P,ps,1,d]", "strided"
    top_k: int = 0
    with_top_k_lens: bool = False
    values: str = "shared"  # or "other pages" of the cache, or pages of an "other cache"
    # Beyond ``trtllm_batch_decode_with_kv_cache_mla``:
    separate_rope: bool = False  # latent and rope in tensors of their own, in query and cache
    flat_tables: bool = False  # page ids in one dimension with kv_indptr
    scales: str = ""  # of an e4m3 cache under a 16-bit query: "two", or "for 128 elements"
    bias: str = ""  # "one for all heads", or "for each head"
    mask: str = ""  # of flare_mla_decoding: a name of ``tests.problems.masks.MASKS``
    is_causal: bool = True
    bmm2_scales_scores: bool = False
    # Decode context parallel; ``seq_lens`` are of all ranks then.
    cp_world: int = 0  # ranks; 0 without it
    cp_rank: int = 0
    tokens_ahead: int = 0  # in the cache, past the length that the causal mask has
    tokens_missing: int = 0  # of this rank, at the end

    @property
    def local_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence that this rank has."""
        own = (len(range(self.cp_rank, length, self.cp_world)) for length in self.seq_lens)
        return tuple(max(0, length - self.tokens_missing) for length in own)

    @property
    def has_trtllm_entry_point(self) -> bool:
        """Whether ``trtllm_batch_decode_with_kv_cache_mla`` has arguments for it."""
        unusual = (self.separate_rope, self.flat_tables, self.scales, self.bias, self.mask)
        other_form = self.kv_format == "fp8_per_token" or self.values == "other cache"
        return (
            not any(unusual) and not other_form and self.is_causal and not self.bmm2_scales_scores
        )

    def build(self, device: str) -> MlaProblem:
        """Return the tensors on ``device`` and the data for checking a result."""
        from tests.problems.mla_build import build, shard

        problem = build(self, device)
        return shard(problem, self) if self.cp_world else problem


def mla_case(kind: str, **facts: Any) -> MlaCase:
    """Return a case of one of :data:`KINDS`."""
    return MlaCase(**KINDS[kind] | facts)


@dataclass(frozen=True, kw_only=True)
class VisibleTokens:
    """Tokens that one query token attends to, float64 on the CPU; a repeated token counts twice."""

    query: torch.Tensor  # [heads, d]
    keys: torch.Tensor  # [n, d]
    values: torch.Tensor  # [n, rank]
    counts: torch.Tensor  # [n]
    bias: torch.Tensor | None  # [heads or 1, n]


@dataclass(frozen=True, kw_only=True)
class MlaProblem(Problem):
    """The tensors of an MLA case, and the tokens that each query token attends to."""

    case: MlaCase
    kv_cache: torch.Tensor
    top_k_lens: torch.Tensor | None
    visible: list[VisibleTokens] = field(repr=False)
    extra_args: dict[str, Any] = field(repr=False)  # fields of MlaArgs beyond TensorRT-LLM's

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the query; bf16 for an FP8 one."""
        return torch.bfloat16 if self.query.dtype is E4M3 else self.query.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the query with latent dims."""
        return (*self.query.shape[:-1], self.case.kv_lora_rank)

    @property
    def keys(self) -> torch.Tensor:
        """The pages of keys."""
        return self.kv_cache

    def poison(self, seq: int, position: int) -> None:
        """Make a cached token NaN."""
        self.kv_cache.view(torch.uint8)[self.slot(seq, position)] = POISON

    def attract(self, seq: int, position: int) -> torch.Tensor:
        """Make the only query row of a sequence match one key; return that token's value."""
        row = self.query[seq, 0, 0]
        self.kv_cache[self.slot(seq, position)] = row
        return row[: self.case.kv_lora_rank]

    def sees(self, seq: int, index: int, position: int) -> bool:
        """Return whether a query token attends to a position, under the causal mask."""
        case = self.case
        if case.cp_world:
            position = position * case.cp_world + case.cp_rank + case.tokens_ahead
        return position < case.seq_lens[seq] - (case.lens[seq] - 1 - index)

    def with_bias(self, bias: list[torch.Tensor]) -> MlaProblem:
        """Return the problem with another bias ``[heads or 1, n]`` of each query token."""
        pairs = zip(self.visible, bias, strict=True)
        return replace(self, visible=[replace(tokens, bias=own) for tokens, own in pairs])

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``trtllm_batch_decode_with_kv_cache_mla``."""
        case = self.case
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=self.device)
        if workspace.is_cuda:  # the CPU backend does not touch it
            workspace.fill_(0xFF)
        arguments: dict[str, Any] = {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": workspace,
            "qk_nope_head_dim": 128,
            "kv_lora_rank": case.kv_lora_rank,
            "qk_rope_head_dim": case.qk_rope_head_dim,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": max(case.seq_lens, default=0),
            "bmm1_scale": case.score_scale,
            "bmm2_scale": case.output_scale,
            "sinks": self.sinks,
        }
        if self.cum_seq_lens_q is not None:
            arguments |= {"cum_seq_lens_q": self.cum_seq_lens_q, "max_q_len": max(case.lens)}
        if case.top_k:
            arguments["sparse_mla_top_k"] = case.top_k
            arguments["sparse_mla_top_k_lens"] = self.top_k_lens
        if case.cp_world:
            lengths = [length - case.tokens_ahead for length in case.seq_lens]
            arguments |= {
                "max_seq_len": max(case.local_lens, default=0),
                "enable_dcp": True,
                "return_lse": True,
                "return_lse_base": "base2",
                "cp_world": case.cp_world,
                "cp_rank": case.cp_rank,
                "causal_seqlens_kv_global": torch.tensor(
                    lengths, dtype=torch.int32, device=self.device
                ),
            }
        if case.values == "other pages":
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
        if self.case.dtype is not E4M3:
            return self.case.dtype
        if self.case.kv_format.startswith("fp8_"):
            return torch.bfloat16
        rounds = self._fp8_mma_spec is not None and self._fp8_mma_spec.p_dtype is DType.E4M3
        return E4M3 if rounds else torch.float16

    @property
    def _sm90_arch(self) -> Arch | None:
        """The architecture, if calls may use an sm90 kernel."""
        if self.device.type != "cuda" or current_settings().mla_kernel == "sm80":
            return None
        return arch_of_device(self.device.index or 0)

    @property
    def _fp8_mma_spec(self) -> MlaSm90Spec | None:
        """The kernel with FP8 MMAs that calls may use."""
        case = self.case
        dtypes = _FP8_MMA_DTYPES.get((case.dtype, case.kv_format))
        if dtypes is None or self._sm90_arch is None:
            return None
        variant = MlaVariant(
            query_dtype=dtypes[0],
            kv_dtype=dtypes[1],
            kv_lora_rank=case.kv_lora_rank,
            qk_rope_head_dim=case.qk_rope_head_dim,
            page_size=case.page_size,
            lookup="sparse" if case.top_k else "paged",
            values="shared" if case.values == "shared" else "separate",
            mask="dcp" if case.cp_world else "bias" if case.bias else "causal",
        )
        return mla_sm90_kernel(self._sm90_arch, variant, 1, current_settings().mla_p_dtype)

    @property
    def _score_sums(self) -> tuple[tuple[int, int], ...]:
        """Dims of each FP8 score accumulation, and its MMA steps of 32 elements."""
        kernel = self._fp8_mma_spec
        if kernel is None:
            return ()
        if not isinstance(kernel, MlaSm90Fp8KvSpec):
            return ((kernel.head_dim_qk, kernel.head_dim_qk // 32),)
        parts = 2 if kernel.splits_query else 1
        latent = ((128, 4 * parts),) * 4
        return (*latent, (64, 2 * parts)) if kernel.variant.kv_dtype is DType.E4M3 else latent

    def expected(self) -> Attention:
        """Return the float64 result: out ``[tokens, heads, rank]`` and LSE ``[tokens, heads]``."""
        case = self.case
        factor = case.output_scale if case.bmm2_scales_scores else 1.0
        has_scales = bool(case.scales) or case.kv_format.startswith("fp8_")
        parts = []
        for tokens in self.visible:
            # A token repeated n times has n times the weight.
            bias = tokens.counts.log()[None]
            result = attend(
                tokens.query,
                tokens.keys,
                tokens.values,
                score_scale=case.score_scale * factor,
                output_scale=case.output_scale,
                sinks=self.sinks.cpu() if self.sinks is not None else None,
                bias=bias if tokens.bias is None else bias + tokens.bias,
                rows_round_to=self.math_dtype if has_scales else None,
                score_sums=self._score_sums,
                rounds_weights_to_e4m3=self.math_dtype is E4M3,
            )
            parts.append(result)
        return joined(parts)
