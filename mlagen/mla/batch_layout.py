"""The requests of a BatchMLA plan: checks of its metadata, and the copies that runs read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mlagen.families.common.arguments import (
    INDEX_DTYPES,
    INT32_MAX,
    reject,
    require,
    require_contiguous,
    require_dims,
    require_dtype,
    require_shape,
    require_tensor,
    require_whole_number,
)
from mlagen.families.common.device_checks import check_seq_lens, query_lengths, table_capacity
from mlagen.families.common.memory import require_memory
from mlagen.families.common.metadata import copy_to_front, mean_capacity, private_copy
from mlagen.mla.batch_contract import MLAPlanMetadata

# The names of the dense form, by field of :class:`BatchLayout`.
_DENSE_NAMES = {
    "qo_indptr": "cum_seq_lens_q",
    "kv_indices": "block_tables",
    "kv_len_arr": "seq_lens",
}


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Query offsets, page ids and lengths of the requests, int32 on the device of the runs."""

    qo_indptr: torch.Tensor  # [batch + 1]
    kv_indptr: torch.Tensor | None  # [batch + 1]; None with block tables
    kv_indices: torch.Tensor  # flat, or block tables [batch, max_pages]
    kv_len_arr: torch.Tensor  # [batch]

    @property
    def batch(self) -> int:
        """The number of requests."""
        return self.kv_len_arr.shape[0]

    @property
    def is_dense(self) -> bool:
        """Whether the page ids are block tables."""
        return self.kv_indptr is None

    def mean_capacity(self, page_size: int) -> int:
        """Return the tokens of a request if all share the page ids equally."""
        return mean_capacity(self.kv_indices.numel(), page_size, self.batch)

    def name_of(self, field: str) -> str:
        """Return the caller's name of a field."""
        return _DENSE_NAMES.get(field, field) if self.is_dense else field

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by field."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True, kw_only=True)
class HostMetadata:
    """Metadata that the host reads without synchronization."""

    max_kv_len: int  # tokens, exact or estimated; only split-KV scheduling depends on it
    max_q_len: int | None = None
    q_len: int = 0  # query tokens of every request; 0 if they differ or are unknown
    tokens: int | None = None  # query tokens of all requests


def layouts_of(
    given: MLAPlanMetadata, device: torch.device
) -> tuple[BatchLayout | None, BatchLayout | None]:
    """Return the checked requests of a plan in the CSR form and in the dense form.

    Raises
    ------
    ArgumentError
        If a tensor breaks a rule.
    """
    csr = dense = None
    if given.kv_indices is not None:
        csr = BatchLayout(
            qo_indptr=require_tensor(given.qo_indptr, "qo_indptr"),
            kv_indptr=require_tensor(given.kv_indptr, "kv_indptr"),
            kv_indices=require_tensor(given.kv_indices, "kv_indices"),
            kv_len_arr=require_tensor(given.kv_len_arr, "kv_len_arr"),
        )
        csr = checked_layout(csr, device)
    if given.block_tables is not None:
        dense = BatchLayout(
            qo_indptr=require_tensor(given.cum_seq_lens_q, "cum_seq_lens_q"),
            kv_indptr=None,
            kv_indices=require_tensor(given.block_tables, "block_tables"),
            kv_len_arr=require_tensor(given.seq_lens, "seq_lens"),
        )
        dense = checked_layout(dense, device)
    if csr is not None and dense is not None:
        _check_same_requests(csr, dense)
    return csr, dense


def checked_layout(given: BatchLayout, device: torch.device) -> BatchLayout:
    """Return metadata cut to the batch size of ``kv_len_arr``, without reading contents.

    Raises
    ------
    ArgumentError
        If a tensor breaks a rule.
    """
    for field, tensor in given.tensors().items():
        name = given.name_of(field)
        require_memory(require_tensor(tensor, name), name)
        require_dtype(tensor, name, INDEX_DTYPES)
        require_dims(tensor, name, (2,) if name == "block_tables" else (1,))
        if tensor.device not in (torch.device("cpu"), device):
            reject(f"{name}.device", f"cpu or {device} (of float_workspace_buffer)", tensor.device)
    count = given.batch + 1
    of = f"batch of {given.name_of('kv_len_arr')}"
    offsets = [("qo_indptr", given.qo_indptr)]
    if given.kv_indptr is None:
        require(
            given.kv_indices.shape[0] == given.batch,
            "block_tables.shape[0]",
            f"{given.batch} ({of})",
            given.kv_indices.shape[0],
        )
    else:
        offsets.append(("kv_indptr", given.kv_indptr))
    for field, tensor in offsets:
        size = tensor.shape[0]
        require(
            size >= count,
            f"{given.name_of(field)}.shape",
            f"[{count}] or longer ({of} + 1)",
            [size],
        )
    return replace(given, **{field: tensor[:count] for field, tensor in offsets})


def checked_buffers(buffers: BatchLayout, device: torch.device) -> BatchLayout:
    """Return the metadata buffers of a captured graph.

    Raises
    ------
    ArgumentError
        If a tensor breaks a rule.
    """
    buffers = checked_layout(buffers, device)
    for name, tensor in buffers.tensors().items():
        require(tensor.device == device, f"{name}.device", device, tensor.device)
        require_contiguous(tensor, name)
    return buffers


def read_in_place(
    given: BatchLayout, before: BatchLayout | None, device: torch.device
) -> BatchLayout:
    """Return block tables that a captured graph reads where they are, with what the caller changes.

    Raises
    ------
    ArgumentError
        If one is not on the device, or is another than in the plan before, which graphs read.
    """
    for field, tensor in given.tensors().items():
        name = given.name_of(field)
        why = f"{device}, where a captured graph reads it"
        require(tensor.device == device, f"{name}.device", why, tensor.device)
        if before is not None and before.is_dense:
            old = before.tensors()[field]
            is_same = tensor.data_ptr() == old.data_ptr() and tensor.shape == old.shape
            rule = "the tensor of the plan before, which captured graphs read"
            require(is_same, name, rule, "another")
    return given


def host_metadata(given: BatchLayout, page_size: int, max_q_len: object = None) -> HostMetadata:
    """Return the metadata on the CPU; does not read metadata on a device.

    Raises
    ------
    ArgumentError
        If it is inconsistent.
    """
    on_host = {
        field: tensor.view(torch.int32)
        for field, tensor in given.tensors().items()
        if tensor.device.type == "cpu"
    }
    bound = None if max_q_len is None else require_whole_number(max_q_len, "max_q_len")
    q_lens = None
    if "qo_indptr" in on_host:
        qo_indptr = on_host["qo_indptr"]
        name = given.name_of("qo_indptr")
        q_lens = query_lengths(qo_indptr, name, int(qo_indptr[-1])).tolist()
    capacity: int | torch.Tensor | None = None
    if given.is_dense:
        capacity = given.kv_indices.shape[1] * page_size
    elif "kv_indptr" in on_host:
        page_ids = given.kv_indices.shape[0]
        capacity = table_capacity(
            on_host["kv_indptr"], "kv_indptr", page_ids=page_ids, page_size=page_size
        )
    seq_lens = capacity if isinstance(capacity, torch.Tensor) else None
    if "kv_len_arr" in on_host:
        name = given.name_of("kv_len_arr")
        seq_lens = check_seq_lens(on_host["kv_len_arr"], name, capacity=capacity, q_lens=None)
    if seq_lens is None:
        max_kv_len = given.mean_capacity(page_size)
    else:
        max_kv_len = min(int(seq_lens.max()), INT32_MAX) if len(seq_lens) else 0
    if q_lens is None:
        return HostMetadata(max_kv_len=max_kv_len, max_q_len=bound)
    needed = max(q_lens, default=0)
    if bound is not None:
        require(bound >= needed, "max_q_len", f"{needed} or more (cum_seq_lens_q)", bound)
    return HostMetadata(
        max_kv_len=max_kv_len,
        max_q_len=needed,
        q_len=q_lens[0] if len(set(q_lens)) == 1 else 0,
        tokens=sum(q_lens),
    )


def copy_to_device(given: BatchLayout, device: torch.device) -> BatchLayout:
    """Return private copies on ``device``, without synchronization."""
    return replace(given, **{name: private_copy(t, device) for name, t in given.tensors().items()})


def copy_into(buffers: BatchLayout, given: BatchLayout) -> None:
    """Copy metadata to the buffers of a captured graph, without synchronization.

    Raises
    ------
    ArgumentError
        If it does not fit; the buffers are unchanged then.
    """
    targets = buffers.tensors()
    for name in ("kv_len_arr", "qo_indptr", "kv_indptr"):
        expected = tuple(targets[name].shape)
        require_shape(getattr(given, name), name, (expected,), "its buffer of the constructor")
    capacity, count = buffers.kv_indices.shape[0], given.kv_indices.shape[0]
    require(count <= capacity, "kv_indices.shape[0]", f"{capacity} (its buffer) or less", count)
    for name, tensor in given.tensors().items():
        copy_to_front(targets[name], tensor)


def _check_same_requests(csr: BatchLayout, dense: BatchLayout) -> None:
    """Reject lengths of two forms that differ, where both are on the CPU."""
    for field in ("qo_indptr", "kv_len_arr"):
        pair = getattr(csr, field), getattr(dense, field)
        name = dense.name_of(field)
        require(
            pair[0].shape == pair[1].shape,
            f"{name}.shape",
            f"{list(pair[0].shape)} ({field})",
            list(pair[1].shape),
        )
        if all(tensor.device.type == "cpu" for tensor in pair):
            is_equal = torch.equal(*(tensor.view(torch.int32) for tensor in pair))
            require(is_equal, name, f"{field}, as both forms describe the same requests", "others")
