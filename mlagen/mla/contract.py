"""What a plan of BatchMLA is given, and what it declares of its runs, by FlashInfer's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families.common.arguments import (
    reject,
    reject_dtype,
    require,
    require_choice,
    require_flag,
    shown,
)

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")

_LAYOUTS = ("packed", "split")
_LSE_MODES = ("none", "base2", "basee")
_OUTPUT_SCALES = ("none", "per-tensor")
_SCALE_MODES = ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor")


@dataclass(frozen=True)
class MLAPlanMetadata:
    """The requests of a plan: as page ids in one dimension (CSR), as block tables, or as both.

    Parameters
    ----------
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : int32 or uint32
        The CSR form, as :meth:`mlagen.mla.BatchMLAPagedAttentionWrapper.plan` has it.
    cum_seq_lens_q : int32 or uint32 [batch + 1]
        Offsets of the requests' query tokens; with the next two, the dense form.
    block_tables : int32 or uint32 [batch, max_pages]
        Page ids; entries from ``ceil(seq_len / page_size)`` on are never read.
    seq_lens : int32 or uint32 [batch]
        Tokens in the cache, including the new ones.
    max_q_len : int
        The most query tokens of a request, a scheduling hint.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> MLAPlanMetadata:
        """Return metadata of the CSR form."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Return metadata of the dense form."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Return metadata of both forms, which describe the same requests."""
        csr = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        return cls(*csr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


@dataclass(frozen=True, kw_only=True)
class MLAInputContract:
    """What a plan declares of its runs.

    The layouts restrict nothing: a run passes query and cache in one tensor or in two.
    """

    lse_mode: str | None  # None: each run chooses
    output_dtype: torch.dtype
    output_scale: str
    scale_mode: str
    query_layout: str = "packed"
    kv_cache_layout: str = "packed"
    skip_softmax: bool = False
    use_sinks: bool = False

    def __post_init__(self) -> None:
        """Check the words and flags."""
        if self.lse_mode is not None:
            require_choice(self.lse_mode, "lse_mode", _LSE_MODES)
        if not isinstance(self.output_dtype, torch.dtype):
            reject("output_dtype", "a torch.dtype", shown(self.output_dtype))
        require_choice(self.output_scale, "output_scale", _OUTPUT_SCALES)
        if require_choice(self.scale_mode, "scale_mode", _SCALE_MODES) == "bmm-tensor":
            rule = "another than 'bmm-tensor', which is not implemented"
            raise UnsupportedError(f"scale_mode: expected {rule}, got 'bmm-tensor'")
        require_choice(self.query_layout, "query_layout", _LAYOUTS)
        require_choice(self.kv_cache_layout, "kv_cache_layout", _LAYOUTS)
        for name in ("skip_softmax", "use_sinks"):
            object.__setattr__(self, name, require_flag(getattr(self, name), name))

    @classmethod
    def declared(
        cls,
        *,
        by_name: bool,
        is_dequantized: bool,
        kernel_dtype: torch.dtype,
        lse_mode: Any,
        output_dtype: Any,
        scale_mode: Any,
        query_layout: Any,
        kv_cache_layout: Any,
        **others: Any,
    ) -> MLAInputContract:
        """Return what the keywords of a plan declare; ``by_name`` is the form of its metadata.

        Raises
        ------
        ArgumentError
            If a keyword has a wrong type or value.
        UnsupportedError
            If a keyword requests what no kernel implements.
        """
        if by_name and isinstance(lse_mode, str) and lse_mode == "none":
            lse_mode = None  # as before plans had a mode
        if is_dequantized and isinstance(scale_mode, str) and scale_mode == "default":
            scale_mode = "kv-per-tensor"
        contract = cls(
            lse_mode=lse_mode,
            output_dtype=kernel_dtype if output_dtype is None else output_dtype,
            scale_mode=scale_mode,
            query_layout="packed" if query_layout is None else query_layout,
            kv_cache_layout="packed" if kv_cache_layout is None else kv_cache_layout,
            **others,
        )
        if contract.scale_mode == "kv-per-tensor" and not is_dequantized:
            reject("scale_mode", "another for a cache of the query's dtype", repr(scale_mode))
        allowed = FP8_DTYPES if contract.output_scale == "per-tensor" else (kernel_dtype,)
        if contract.output_dtype not in allowed:
            rule = " or ".join(map(str, allowed))
            why = f"output_scale {contract.output_scale!r}"
            reject_dtype("output_dtype", f"{rule} ({why})", contract.output_dtype)
        return contract

    @property
    def has_fp8_output(self) -> bool:
        """Whether runs divide their results by a scale, and write them to an FP8 output."""
        return self.output_scale == "per-tensor"

    def check(self, run: Any) -> None:
        """Reject a run that is not as its plan declares, in FlashInfer's words.

        Raises
        ------
        ArgumentError
            The message names the difference.
        """
        has_lse, is_natural = run.return_lse or run.lse is not None, run.return_lse_base_on_e
        lse_mode = ("basee" if is_natural else "base2") if has_lse or is_natural else "none"
        if self.lse_mode is not None and lse_mode != self.lse_mode:
            _mismatch("LSE mode", self.lse_mode, lse_mode)
        if (run.o_scale is not None) != self.has_fp8_output:
            _mismatch("o_scale", self.output_scale, shown(run.o_scale))
        if (run.sinks is not None) != self.use_sinks:
            got = "none" if run.sinks is None else "some"
            _mismatch("sinks", f"use_sinks={self.use_sinks}", got)
        threshold = run.skip_softmax_threshold_scale_factor
        if (threshold is not None) != self.skip_softmax:
            _mismatch("skip_softmax", self.skip_softmax, shown(threshold))
        has_scales = [scale is not None for scale in (run.bmm1_scale, run.bmm2_scale)]
        if any(has_scales) and not all(has_scales):
            reject("bmm1_scale and bmm2_scale must be provided together", "both or none", "one")
        if any(has_scales) and self.scale_mode != "bmm-scalar":
            _mismatch("scale mode", self.scale_mode, "bmm-scalar")
        if self.scale_mode == "bmm-scalar" and not all(has_scales):
            _mismatch("scale mode", self.scale_mode, "no bmm1_scale and bmm2_scale")


def _mismatch(name: str, planned: object, got: object) -> NoReturn:
    raise ArgumentError(
        f"MLA planned run argument {name} mismatch: expected {planned} (of plan), got {got}"
    )


def given_metadata(metadata: object, flat: dict[str, Any]) -> MLAPlanMetadata:
    """Return the metadata of a plan, from an object or from arguments by name.

    Raises ArgumentError if both or neither are given, or a form is not complete.
    """
    names = [name for name, value in flat.items() if value is not None]
    if metadata is None:
        metadata = MLAPlanMetadata(**flat)
        both = set(names) & set(_CSR) and set(names) - set(_CSR)
        require(not both, "metadata", "page ids in one dimension or block tables", "both")
    elif not isinstance(metadata, MLAPlanMetadata):
        reject("metadata", "an MLAPlanMetadata", type(metadata).__name__)
    elif names:
        reject("metadata", "None with metadata by name", f"{', '.join(names)} too")
    values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    forms = [form for form in (_CSR, _DENSE) if any(values[name] is not None for name in form)]
    for form in forms or [_CSR]:
        missing = [name for name in form if values[name] is None]
        if missing:
            reject(missing[0], f"a torch.Tensor, as {', '.join(form)} go together", "NoneType")
    if values["max_q_len"] is not None and _DENSE not in forms:
        reject("max_q_len", "None without block_tables", shown(values["max_q_len"]))
    return metadata
