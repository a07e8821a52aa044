"""Plans of BatchMLA: the settings of their runs, and their requests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families.common.arguments import (
    DTYPES,
    is_pdl_enabled,
    reject,
    reject_dtype,
    require,
    require_flag,
    require_float32,
    require_tensor,
    require_whole_number,
    shown,
)
from mlagen.families.mla.args import MlaArgNames
from mlagen.families.mla.validate_query import QUERY_DTYPES
from mlagen.mla.batch_checks import FP8_DTYPES
from mlagen.mla.batch_contract import MLAInputContract, given_metadata
from mlagen.mla.batch_layout import (
    BatchLayout,
    HostMetadata,
    checked_buffers,
    copy_into,
    copy_to_device,
    host_metadata,
    layouts_of,
    read_in_place,
)
from mlagen.spec.dtype import DType
from mlagen.spec.mla.variant import MAX_HEADS, MlaVariant, require_supported

_NAMES = MlaArgNames(
    query_rope="q_pe",
    rope_cache="kpe_cache",
    kv_scales="ckv_scale_arr",
    workspace_buffer="float_workspace_buffer",
    bmm1_scale="sm_scale",
)

KV_DTYPES = {**DTYPES, torch.float8_e4m3fn: DType.E4M3}

# (head_dim_ckv, head_dim_kpe) of e4m3 caches under 16-bit queries that FlashInfer supports.
_E4M3_HEAD_DIMS = ((512, 0), (512, 64))

_METADATA = (
    *("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"),
    *("cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len"),
)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The scalar arguments of a plan, checked."""

    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    causal: bool
    sm_scale: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype

    def __post_init__(self) -> None:
        """Check the settings in FlashInfer's order, with its messages where it has any."""
        _check_dtypes(self)
        converted = {
            "num_heads": require_whole_number(self.num_heads, "num_heads", min_value=1),
            "head_dim_ckv": require_whole_number(self.head_dim_ckv, "head_dim_ckv", min_value=1),
            "head_dim_kpe": require_whole_number(self.head_dim_kpe, "head_dim_kpe"),
            "page_size": require_whole_number(self.page_size, "page_size", min_value=1),
            "causal": require_flag(self.causal, "causal"),
            "sm_scale": require_float32(self.sm_scale, "sm_scale"),
        }
        for name, value in converted.items():
            object.__setattr__(self, name, value)  # runs use the checked values
        require(self.num_heads <= MAX_HEADS, "num_heads", f"{MAX_HEADS} or less", self.num_heads)
        variant = MlaVariant(
            query_dtype=QUERY_DTYPES[self.q_data_type],
            kv_dtype=KV_DTYPES[self.kv_data_type],
            kv_lora_rank=self.head_dim_ckv,
            qk_rope_head_dim=self.head_dim_kpe,
            page_size=self.page_size,
        )
        require_supported(variant)

    @property
    def is_dequantized(self) -> bool:
        """Whether the cache is e4m3 under a 16-bit query."""
        return self.kv_data_type is torch.float8_e4m3fn and self.q_data_type in DTYPES

    @property
    def out_data_type(self) -> torch.dtype:
        """The dtype of the kernel's output."""
        return self.q_data_type if self.q_data_type in DTYPES else torch.bfloat16


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """The result of a plan, for its runs."""

    settings: BatchSettings
    layout: BatchLayout
    metadata: HostMetadata
    contract: MLAInputContract | None = None  # None: nothing is declared of the runs
    scales_cache: bool  # whether runs pass the scales of an e4m3 cache
    enable_pdl: bool = True
    tensors: tuple[torch.Tensor, ...] = field(init=False)
    key: str = field(init=False)  # of the values that are not tensors, without max_kv_len
    batch: int = field(init=False)
    names: MlaArgNames = field(init=False)
    kernel_dtype: torch.dtype = field(init=False)  # of the kernel's output

    def __post_init__(self) -> None:
        """Split the plan as every run passes it on."""
        layout = self.layout
        names = _NAMES._replace(
            block_tables=layout.name_of("kv_indices"),
            seq_lens=layout.name_of("kv_len_arr"),
            cum_seq_lens_q=layout.name_of("qo_indptr"),
        )
        object.__setattr__(self, "batch", layout.batch)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "kernel_dtype", self.settings.out_data_type)
        object.__setattr__(self, "tensors", tuple(self.layout.tensors().values()))
        metadata = replace(self.metadata, max_kv_len=0)
        others = (self.contract, self.scales_cache, self.enable_pdl)
        object.__setattr__(self, "key", str((self.settings, metadata, *others)))

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the output of runs."""
        return self.settings.out_data_type if self.contract is None else self.contract.output_dtype

    @property
    def has_fp8_output(self) -> bool:
        """Whether runs divide their results by a scale, and write them to an FP8 output."""
        return self.contract is not None and self.contract.output_scale == "per-tensor"

    def with_tables(self, kv_len: object, page_table: object) -> BatchPlan:
        """Return the plan of other lengths and block tables, which are read in place.

        Raises
        ------
        ArgumentError
            If one of them is missing.
        """
        layout = BatchLayout(
            qo_indptr=self.layout.qo_indptr,
            kv_indptr=None,
            kv_indices=require_tensor(page_table, "page_table"),
            kv_len_arr=require_tensor(kv_len, "kv_len"),
        )
        max_kv_len = layout.mean_capacity(self.settings.page_size)
        metadata = replace(self.metadata, max_kv_len=max_kv_len)
        return replace(self, layout=layout, metadata=metadata)


def graph_buffers(given: dict[str, Any], device: torch.device) -> BatchLayout | None:
    """Return the buffers of the constructor; None if there are none.

    Raises
    ------
    ArgumentError
        If some are missing or break a rule.
    """
    if all(buffer is None for buffer in given.values()):
        return None
    buffers = {name: require_tensor(buffer, name) for name, buffer in given.items()}
    return checked_buffers(BatchLayout(**buffers), device)


def plan_of(
    call: dict[str, Any],
    device: torch.device,
    *,
    is_graph: bool,
    buffers: BatchLayout | None,
    before: BatchPlan | None,
) -> BatchPlan:
    """Return the plan of a call with these arguments by name.

    Raises
    ------
    ArgumentError
        If one breaks a rule; buffers are unchanged then.
    UnsupportedError
        If no kernel supports the dtypes or dimensions.
    """
    settings = BatchSettings(**{name: call[name] for name in BatchSettings.__dataclass_fields__})
    if require_flag(call["use_profiler"], "use_profiler"):
        raise UnsupportedError(
            "use_profiler: Profiler is enabled, but not implemented, expected False, got True"
        )
    given = given_metadata(call["metadata"], {name: call[name] for name in _METADATA})
    contract = _contract_of(call, settings)
    enable_pdl = is_pdl_enabled(call["enable_pdl"])
    csr, dense = layouts_of(given, device)
    requests = csr if dense is None or (is_graph and csr is not None and buffers) else dense
    assert requests is not None  # given_metadata requires a form
    metadata = host_metadata(requests, settings.page_size, given.max_q_len)
    if not is_graph:
        layout = copy_to_device(requests, device)
    elif requests.is_dense:
        layout = read_in_place(requests, None if before is None else before.layout, device)
    else:
        if buffers is None:
            rule = "a buffer of the constructor, for CUDA graphs of page ids in one dimension"
            reject("qo_indptr", rule, "NoneType")
        copy_into(buffers, requests)
        layout = buffers
    if is_graph:  # replays of a captured graph have other requests
        capacity = layout.mean_capacity(settings.page_size)
        max_kv_len = max(metadata.max_kv_len, capacity)
        metadata = replace(metadata, max_kv_len=max_kv_len, q_len=0)
    return BatchPlan(
        settings=settings,
        layout=layout,
        metadata=metadata,
        contract=contract,
        scales_cache=contract.scale_mode == "kv-per-tensor",
        enable_pdl=enable_pdl,
    )


def _contract_of(call: dict[str, Any], settings: BatchSettings) -> MLAInputContract:
    """Return what a plan declares of its runs."""
    lse_mode, scale_mode = call["lse_mode"], call["scale_mode"]
    if call["metadata"] is None and isinstance(lse_mode, str) and lse_mode == "none":
        lse_mode = None  # as before plans had a mode
    if settings.is_dequantized and isinstance(scale_mode, str) and scale_mode == "default":
        scale_mode = "kv-per-tensor"
    default = settings.out_data_type
    output_dtype = default if call["output_dtype"] is None else call["output_dtype"]
    contract = MLAInputContract(
        lse_mode=lse_mode,
        output_dtype=output_dtype,
        output_scale=call["output_scale"],
        scale_mode=scale_mode,
        query_layout="packed" if call["query_layout"] is None else call["query_layout"],
        kv_cache_layout="packed" if call["kv_cache_layout"] is None else call["kv_cache_layout"],
        skip_softmax=call["skip_softmax"],
        use_sinks=call["use_sinks"],
    )
    if contract.scale_mode == "kv-per-tensor" and not settings.is_dequantized:
        got = settings.kv_data_type
        reject("scale_mode", "another for a cache of the query's dtype", f"{scale_mode!r}, {got}")
    allowed = FP8_DTYPES if contract.output_scale == "per-tensor" else (default,)
    why = f"output_scale {contract.output_scale!r}"
    rule = f"{' or '.join(map(str, allowed))} ({why})"
    if output_dtype not in allowed:
        reject_dtype("output_dtype", rule, output_dtype)
    return contract


def _check_dtypes(settings: BatchSettings) -> None:
    q_dtype, kv_dtype = settings.q_data_type, settings.kv_data_type
    if not isinstance(kv_dtype, torch.dtype) or kv_dtype not in KV_DTYPES:
        reject_dtype("MLA kv_data_type", " or ".join(map(str, KV_DTYPES)), kv_dtype)
    rope_dim = require_whole_number(settings.head_dim_kpe, "head_dim_kpe", min_value=None)
    if rope_dim < 0:
        raise ArgumentError(f"head_dim_kpe must be >= 0, got {shown(rope_dim)}")
    if q_dtype is torch.float8_e4m3fn is kv_dtype:
        return
    if kv_dtype is not torch.float8_e4m3fn:
        if q_dtype is not kv_dtype:
            reject_dtype("q_data_type", f"{kv_dtype} (kv_data_type)", q_dtype)
        return
    if q_dtype is not torch.bfloat16:
        reject_dtype("q_data_type", "q_data_type=torch.bfloat16 for an e4m3 cache", q_dtype)
    head_dims = (require_whole_number(settings.head_dim_ckv, "head_dim_ckv", min_value=1), rope_dim)
    if head_dims not in _E4M3_HEAD_DIMS:
        rule = "head_dim_ckv=512 and head_dim_kpe in (0, 64) for an e4m3 cache"
        reject("(head_dim_ckv, head_dim_kpe)", rule, head_dims)
