"""What a plan of BatchMLA is given, and what it declares of its runs, by FlashInfer's names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    reject,
    require,
    require_choice,
    require_flag,
    shown,
)

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


def given_metadata(metadata: object, flat: dict[str, Any]) -> MLAPlanMetadata:
    """Return the metadata of a plan, from an object or from arguments by name.

    Raises
    ------
    ArgumentError
        If both or neither are given, or a form is not complete.
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
