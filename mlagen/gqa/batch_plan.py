"""Plans of batch decode: copies of the caller's page metadata, for CUDA graphs in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mlagen.families.common.arguments import (
    INDEX_DTYPES,
    INT32_MAX,
    reject,
    require,
    require_contiguous,
    require_dims,
    require_dtype,
    require_ints,
    require_shape,
    require_tensor,
)
from mlagen.families.common.device_checks import check_seq_lens, table_capacity
from mlagen.families.common.memory import require_memory
from mlagen.families.common.metadata import (
    copy_to_front,
    mean_capacity,
    on_device,
    private_copy,
)
from mlagen.gqa.batch_settings import DecodeSettings, settings_of_run

_GIVEN = ("indptr", "indices", "last_page_len")
_BUFFERS = tuple(f"paged_kv_{name}_buffer" for name in _GIVEN)


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Page ids and lengths of the requests, int32 on the device of the runs."""

    kv_indptr: torch.Tensor  # [batch + 1]
    kv_indices: torch.Tensor
    seq_lens: torch.Tensor  # [batch], at most what the page ids of a request cover


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodePlan:
    """The result of a plan, for its runs."""

    settings: DecodeSettings
    layout: PageLayout
    max_kv_len: int  # tokens, exact or estimated; only split-KV scheduling depends on it
    tensors: tuple[torch.Tensor, ...] = field(init=False)
    key: str = field(init=False)  # of the values that are not tensors, without max_kv_len
    variants: dict[DecodeSettings, DecodePlan] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Split the plan as every run passes it on."""
        object.__setattr__(self, "tensors", tuple(vars(self.layout).values()))
        object.__setattr__(self, "key", str(self.settings))

    def of_run(self, window_left: object, q_len_per_req: object) -> DecodePlan:
        """Return the plan of a run that has a window or a number of query tokens of its own.

        Raises
        ------
        ArgumentError
            If one has a wrong type or value.
        """
        settings = settings_of_run(self.settings, window_left, q_len_per_req)
        if settings is self.settings:
            return self
        if settings not in self.variants:
            self.variants[settings] = replace(self, settings=settings)
        return self.variants[settings]


@dataclass(frozen=True, kw_only=True)
class PageMetadata:
    """Page metadata as FlashInfer has it: of a caller, or the buffers of a captured graph."""

    indptr: torch.Tensor  # [batch + 1]
    indices: torch.Tensor
    last_page_len: torch.Tensor  # [batch]

    @property
    def batch(self) -> int:
        """The number of requests."""
        return self.last_page_len.shape[0]

    def check(self, names: Sequence[str], device: torch.device) -> None:
        """Reject tensors of a wrong shape, dtype or device; contents are not read.

        Raises
        ------
        ArgumentError
            If a tensor breaks a rule.
        """
        for name, tensor in zip(names, vars(self).values(), strict=True):
            require_memory(require_tensor(tensor, name), name)
            require_dtype(tensor, name, INDEX_DTYPES)
            require_dims(tensor, name, (1,))
            require_contiguous(tensor, name)
            if tensor.device not in (torch.device("cpu"), device):
                rule = f"cpu or {device} (of float_workspace_buffer)"
                reject(f"{name}.device", rule, tensor.device)
        require_shape(self.indptr, names[0], ((self.batch + 1,),), f"batch of {names[2]} + 1")


class GraphBuffers:
    """The buffers of a captured graph, and memory for offsets and lengths within the page ids."""

    def __init__(self, buffers: PageMetadata, device: torch.device) -> None:
        buffers.check(_BUFFERS, device)
        for name, tensor in zip(_BUFFERS, vars(buffers).values(), strict=True):
            require(tensor.device == device, f"{name}.device", device, tensor.device)
        self._buffers = buffers
        self._q_len = 0
        self._layout = PageLayout(
            kv_indptr=torch.zeros(buffers.batch + 1, dtype=torch.int32, device=device),
            kv_indices=buffers.indices.view(torch.int32),
            seq_lens=torch.zeros(buffers.batch, dtype=torch.int32, device=device),
        )

    def store(
        self, given: PageMetadata, seq_lens: torch.Tensor | None, settings: DecodeSettings
    ) -> tuple[PageLayout, int]:
        """Copy metadata into the buffers; return the layout, and the mean capacity of a request.

        Raises
        ------
        ArgumentError
            If the buffers cannot hold it; they are unchanged then.
        """
        buffers, q_len = self._buffers, settings.q_len
        rule = f"{buffers.batch} (requests of the buffers)"
        require(given.batch == buffers.batch, "last_page_len.shape[0]", rule, given.batch)
        capacity, count = buffers.indices.shape[0], given.indices.shape[0]
        require(count <= capacity, "indices.shape[0]", f"{capacity} (its buffer) or less", count)
        if self._q_len not in {0, q_len}:
            reject("q_len_per_req", f"{self._q_len} (of the first plan)", q_len)
        self._q_len = q_len
        device = buffers.indices.device
        starts, lengths = _consistent_layout(given, seq_lens, settings.page_size, device)
        for name, source in vars(given).items():
            copy_to_front(getattr(buffers, name), source)
        copy_to_front(self._layout.kv_indptr, starts)
        copy_to_front(self._layout.seq_lens, lengths)
        mean = mean_capacity(capacity, settings.page_size, buffers.batch)
        return self._layout, mean


def plan_of(
    given: PageMetadata,
    seq_lens: torch.Tensor | None,
    settings: DecodeSettings,
    device: torch.device,
    buffers: GraphBuffers | None,
) -> DecodePlan:
    """Return the plan of the given requests, whose metadata is copied.

    Raises
    ------
    ArgumentError
        If metadata breaks a rule.
    """
    given.check(_GIVEN, device)
    if seq_lens is not None:
        lengths = require_tensor(seq_lens, "seq_lens")
        require_memory(lengths, "seq_lens")
        require_ints(lengths, "seq_lens", lengths.device, ((given.batch,),), "batch")
    max_kv_len = _max_length(given, seq_lens, settings.page_size)
    if buffers is None:
        starts, lens = _consistent_layout(given, seq_lens, settings.page_size, device)
        page_ids = private_copy(given.indices, device)
        layout = PageLayout(kv_indptr=starts, kv_indices=page_ids, seq_lens=lens)
    else:
        # Replays of a captured graph have other requests.
        layout, capacity = buffers.store(given, seq_lens, settings)
        max_kv_len = max(max_kv_len, capacity)
    return DecodePlan(settings=settings, layout=layout, max_kv_len=max_kv_len)


def _max_length(given: PageMetadata, seq_lens: torch.Tensor | None, page_size: int) -> int:
    """Return the longest length, read on the CPU; metadata on a device is not read.

    Without it, requests are assumed to share the page ids equally.

    Raises
    ------
    ArgumentError
        If metadata on the CPU is inconsistent.
    """
    capacity = None
    if given.indptr.device.type == "cpu":
        page_ids = given.indices.shape[0]
        indptr = given.indptr.view(torch.int32)
        capacity = table_capacity(indptr, "indptr", page_ids=page_ids, page_size=page_size)
    lengths = capacity
    if given.last_page_len.device.type == "cpu":
        tails = given.last_page_len.view(torch.int32).long()
        if len(tails) and not 0 <= int(tails.min()) <= int(tails.max()) <= page_size:
            reject("last_page_len", f"0 to {page_size} (page_size)", f"{tails.tolist()[:9]}")
        if capacity is not None:
            lengths = torch.where(capacity > 0, capacity - page_size + tails, 0)
    if seq_lens is not None and seq_lens.device.type == "cpu":
        lengths = check_seq_lens(
            seq_lens.view(torch.int32), "seq_lens", capacity=capacity, q_lens=None
        )
    if lengths is None:
        return mean_capacity(given.indices.shape[0], page_size, given.batch)
    return min(int(lengths.max()), INT32_MAX) if len(lengths) else 0


def _consistent_layout(
    given: PageMetadata, seq_lens: torch.Tensor | None, page_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return offsets and lengths on ``device`` that lie within the page ids, whatever was given.

    The kernels rely on that; nothing synchronizes.
    """
    indptr = on_device(given.indptr, device).long().clamp(0, given.indices.shape[0])
    pages = (indptr[1:] - indptr[:-1]).clamp(min=0)
    if seq_lens is None:
        lengths = (pages - 1) * page_size + on_device(given.last_page_len, device)
    else:
        lengths = on_device(seq_lens, device).long()
    lengths = torch.minimum(lengths.clamp(0, INT32_MAX), pages * page_size)
    return indptr.to(torch.int32), lengths.to(torch.int32)
