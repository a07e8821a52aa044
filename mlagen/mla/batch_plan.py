"""Plans of BatchMLA: checked settings, and copies of the caller's metadata."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import (
    DTYPES,
    INDEX_DTYPES,
    INT32_MAX,
    reject,
    require,
    require_contiguous,
    require_dims,
    require_dtype,
    require_flag,
    require_float32,
    require_shape,
    require_tensor,
    require_whole_number,
    shown,
)
from mlagen.families.common.device_checks import check_seq_lens, query_lengths, table_capacity
from mlagen.families.common.memory import require_memory
from mlagen.families.mla.validate_query import MAX_HEADS
from mlagen.spec.dtype import DType
from mlagen.spec.mla.variant import MlaVariant, require_supported

KV_DTYPES = {**DTYPES, torch.float8_e4m3fn: DType.E4M3}

# (head_dim_ckv, head_dim_kpe) of e4m3 caches that FlashInfer supports.
_E4M3_HEAD_DIMS = ((512, 0), (512, 64))


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
            query_dtype=DTYPES[self.q_data_type],
            kv_dtype=KV_DTYPES[self.kv_data_type],
            kv_lora_rank=self.head_dim_ckv,
            qk_rope_head_dim=self.head_dim_kpe,
            page_size=self.page_size,
        )
        require_supported(variant)

    @property
    def is_dequantised(self) -> bool:
        """Whether the cache is e4m3 and has scales."""
        return self.kv_data_type is torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Query offsets, page ids and lengths of the requests, int32 on the device of the runs."""

    qo_indptr: torch.Tensor  # [batch + 1]
    kv_indptr: torch.Tensor  # [batch + 1]
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor  # [batch]

    @property
    def batch(self) -> int:
        """The number of requests."""
        return self.kv_len_arr.shape[0]


@dataclass(frozen=True, kw_only=True)
class HostMetadata:
    """Metadata that the host reads without synchronization."""

    max_kv_len: int  # tokens, exact or estimated; only split-KV scheduling depends on it
    max_q_len: int | None = None
    q_len: int = 0  # query tokens of every request; 0 if they differ or are unknown
    tokens: int | None = None  # query tokens of all requests


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """The result of a plan, for its runs."""

    settings: BatchSettings
    layout: BatchLayout
    metadata: HostMetadata
    tensors: tuple[torch.Tensor, ...] = field(init=False)
    key: str = field(init=False)  # of the values that are not tensors, without max_kv_len

    def __post_init__(self) -> None:
        """Split the plan as every run passes it on."""
        object.__setattr__(self, "tensors", tuple(vars(self.layout).values()))
        object.__setattr__(self, "key", str((self.settings, replace(self.metadata, max_kv_len=0))))


def checked_layout(given: BatchLayout, device: torch.device) -> BatchLayout:
    """Return metadata cut to the batch size of ``kv_len_arr``, without reading contents.

    Raises
    ------
    ArgumentError
        If a tensor breaks a rule.
    """
    for name, tensor in vars(given).items():
        require_memory(require_tensor(tensor, name), name)
        require_dtype(tensor, name, INDEX_DTYPES)
        require_dims(tensor, name, (1,))
        if tensor.device not in (torch.device("cpu"), device):
            reject(f"{name}.device", f"cpu or {device} (of float_workspace_buffer)", tensor.device)
    count = given.batch + 1
    for name in ("qo_indptr", "kv_indptr"):
        size = getattr(given, name).shape[0]
        rule = f"[{count}] or longer (batch of kv_len_arr + 1)"
        require(size >= count, f"{name}.shape", rule, [size])
    return replace(given, qo_indptr=given.qo_indptr[:count], kv_indptr=given.kv_indptr[:count])


def checked_buffers(buffers: BatchLayout, device: torch.device) -> BatchLayout:
    """Return the metadata buffers of a captured graph.

    Raises
    ------
    ArgumentError
        If a tensor breaks a rule.
    """
    buffers = checked_layout(buffers, device)
    for name, tensor in vars(buffers).items():
        require(tensor.device == device, f"{name}.device", device, tensor.device)
        require_contiguous(tensor, name)
    return buffers


def host_metadata(given: BatchLayout, page_size: int) -> HostMetadata:
    """Return the metadata on the CPU; does not read metadata on a device.

    Raises
    ------
    ArgumentError
        If it is inconsistent.
    """
    on_host = {
        name: tensor.view(torch.int32)
        for name, tensor in vars(given).items()
        if tensor.device.type == "cpu"
    }
    q_lens = None
    if "qo_indptr" in on_host:
        qo_indptr = on_host["qo_indptr"]
        q_lens = query_lengths(qo_indptr, "qo_indptr", int(qo_indptr[-1])).tolist()
    capacity = None
    if "kv_indptr" in on_host:
        page_ids = given.kv_indices.shape[0]
        capacity = table_capacity(
            on_host["kv_indptr"], "kv_indptr", page_ids=page_ids, page_size=page_size
        )
    seq_lens = capacity
    if "kv_len_arr" in on_host:
        seq_lens = check_seq_lens(
            on_host["kv_len_arr"], "kv_len_arr", capacity=capacity, q_lens=None
        )
    if seq_lens is None:
        max_kv_len = mean_capacity(given, page_size)
    else:
        max_kv_len = min(int(seq_lens.max()), INT32_MAX) if len(seq_lens) else 0
    if q_lens is None:
        return HostMetadata(max_kv_len=max_kv_len)
    return HostMetadata(
        max_kv_len=max_kv_len,
        max_q_len=max(q_lens, default=0),
        q_len=q_lens[0] if len(set(q_lens)) == 1 else 0,
        tokens=sum(q_lens),
    )


def mean_capacity(layout: BatchLayout, page_size: int) -> int:
    """Return the tokens of a request if all share the page ids equally."""
    mean = -(-layout.kv_indices.shape[0] * page_size // max(1, layout.batch))
    return min(mean, INT32_MAX)


def copy_to_device(given: BatchLayout, device: torch.device) -> BatchLayout:
    """Return private copies on ``device``, without synchronization."""
    return BatchLayout(**{name: _copy(tensor, device) for name, tensor in vars(given).items()})


def copy_into(buffers: BatchLayout, given: BatchLayout) -> None:
    """Copy metadata to the buffers of a captured graph, without synchronization.

    Raises
    ------
    ArgumentError
        If it does not fit; the buffers are unchanged then.
    """
    for name in ("kv_len_arr", "qo_indptr", "kv_indptr"):
        expected = tuple(getattr(buffers, name).shape)
        require_shape(getattr(given, name), name, (expected,), "its buffer of the constructor")
    capacity, count = buffers.kv_indices.shape[0], given.kv_indices.shape[0]
    require(count <= capacity, "kv_indices.shape[0]", f"{capacity} (its buffer) or less", count)
    for name, tensor in vars(given).items():
        target = getattr(buffers, name)[: tensor.shape[0]]
        target.view(torch.int32).copy_(_pageable(tensor), non_blocking=True)


def _check_dtypes(settings: BatchSettings) -> None:
    q_dtype, kv_dtype = settings.q_data_type, settings.kv_data_type
    if not isinstance(kv_dtype, torch.dtype) or kv_dtype not in KV_DTYPES:
        reject("MLA kv_data_type", " or ".join(map(str, KV_DTYPES)), shown(kv_dtype))
    rope_dim = require_whole_number(settings.head_dim_kpe, "head_dim_kpe", min_value=None)
    if rope_dim < 0:
        raise ArgumentError(f"head_dim_kpe must be >= 0, got {shown(rope_dim)}")
    if not settings.is_dequantised:
        require(q_dtype is kv_dtype, "q_data_type", f"{kv_dtype} (kv_data_type)", shown(q_dtype))
        return
    if q_dtype is not torch.bfloat16:
        reject("q_data_type", "q_data_type=torch.bfloat16 for an e4m3 cache", shown(q_dtype))
    head_dims = (require_whole_number(settings.head_dim_ckv, "head_dim_ckv", min_value=1), rope_dim)
    if head_dims not in _E4M3_HEAD_DIMS:
        rule = "head_dim_ckv=512 and head_dim_kpe in (0, 64) for an e4m3 cache"
        reject("(head_dim_ckv, head_dim_kpe)", rule, head_dims)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor.view(torch.int32).clone(memory_format=torch.contiguous_format)
    return _pageable(tensor).to(device, non_blocking=True)


def _pageable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a source for an async copy: the caller may overwrite pinned memory before it runs."""
    tensor = tensor.view(torch.int32)
    if tensor.device.type == "cpu" and tensor.is_pinned():
        return torch.empty_like(tensor, pin_memory=False).copy_(tensor)
    return tensor
