"""Plans of batch decode and their runs: settings, requests, and the arguments of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.entry_point import ALL, entry_point
from mlagen.families.common.arguments import (
    DTYPES,
    INT32_MAX,
    canonical_sinks,
    is_pdl_enabled,
    reject,
    reject_dtype,
    require,
    require_flag,
    require_ints,
    require_tensor,
)
from mlagen.families.common.memory import require_memory, require_plain
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.args import GqaArgNames, GqaArgs, converted_query, pair_of
from mlagen.families.gqa.problem import QUANTIZED, WITH_TOKEN_SCALES
from mlagen.planned.metadata import (
    Requests,
    checked,
    checked_buffers,
    copy_into,
    max_kv_len_of,
    on_device,
    private_copy,
)
from mlagen.planned.op import PlannedOp
from mlagen.planned.plan import Plan, settings_of, text_of
from mlagen.torch_ops.traced import Shape

NAMES = {"kv_indptr": "indptr", "kv_indices": "indices", "kv_len_arr": "last_page_len"}
BUFFER_NAMES = {part: f"paged_kv_{name}_buffer" for part, name in NAMES.items()}
_RUN_NAMES = GqaArgNames(
    query="q",
    kv_cache="paged_kv_cache",
    key_cache="paged_kv_cache[0]",
    value_cache="paged_kv_cache[1]",
    workspace_buffer="float_workspace_buffer",
    block_tables="indices",
    kv_indptr="indptr",
    seq_lens="last_page_len",
    bmm1_scale="sm_scale * q_scale * k_scale",
    bmm2_scale="v_scale",
)

_VALUES = _RUN_NAMES.value_cache
_E4M3 = torch.float8_e4m3fn
_Q_DTYPES = (*DTYPES, _E4M3)
_KV_DTYPES = (*DTYPES, *QUANTIZED)
# Of a cache that may have a scale of each token and KV head.
TOKEN_SCALED = tuple(dtype for dtype, named in QUANTIZED.items() if named in WITH_TOKEN_SCALES)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The scalar arguments of a plan, checked."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    is_causal: bool
    window: int  # tokens that a row attends to, including itself; 0: no limit
    sm_scale: float
    kv_layout: str
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype
    head_dim_vo: int = 0  # of values, if it is another one
    soft_cap: float = 0.0  # of the scores; 0: none
    batch_invariant: bool = False
    use_token_head_sf: bool = False  # whether each token and KV head has a scale


class GraphBuffers:
    """The buffers of a captured graph, and memory for offsets and lengths within the page ids."""

    def __init__(self, buffers: Requests, device: torch.device) -> None:
        self._given = checked_buffers(buffers, device)
        self._q_len = 0
        self._offsets = torch.zeros(buffers.batch + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(buffers.batch, dtype=torch.int32, device=device)

    def store(
        self, given: Requests, q_len: int, offsets: torch.Tensor, lengths: torch.Tensor
    ) -> Requests:
        """Copy metadata into the buffers, and offsets and lengths within the page ids."""
        if self._q_len not in {0, q_len}:
            reject("q_len_per_req", f"{self._q_len} (of the first plan)", q_len)
        copy_into(self._given, given)
        self._q_len = q_len
        return Requests(
            kv_indptr=self._offsets.copy_(offsets, non_blocking=True),
            kv_indices=self._given.kv_indices.view(torch.int32),
            kv_len_arr=self._lengths.copy_(lengths, non_blocking=True),
        )


def plan_of(
    given: Requests,
    seq_lens: torch.Tensor | None,
    settings: DecodeSettings,
    q_len: int,
    device: torch.device,
    buffers: GraphBuffers | None,
    block_tables: torch.Tensor | None = None,
) -> Plan[DecodeSettings]:
    """Return the plan of the given requests, whose metadata is copied.

    Block tables replace the page ids of the requests. The longest sequence is exact: calls of one
    problem have equal splits, and equal bits, by every entry point. It is read back where only the
    device has lengths, but not for CUDA graphs.
    """
    given, page_size = checked(given, device), settings.page_size
    if seq_lens is not None:
        require_memory(require_tensor(seq_lens, "seq_lens"), "seq_lens")
        require_ints(seq_lens, "seq_lens", seq_lens.device, ((given.batch,),), "batch")
    _check_tails(given.kv_len_arr, page_size)
    if block_tables is not None:
        given = _with_pages_of(block_tables, given, seq_lens, page_size, device)
    offsets, lengths = within_page_ids(given, seq_lens, page_size, device)
    known = {"kv_len_arr": lengths if seq_lens is None else seq_lens}
    names = {**given.names, "kv_len_arr": "seq_lens"}
    max_kv_len = max_kv_len_of(
        replace(given.with_tensors(known), names=names),
        page_size,
        is_bound=settings.batch_invariant,
        read_back=lengths if buffers is None else None,
    )
    if buffers is not None:
        requests = buffers.store(given, q_len, offsets, lengths)
        # Replays of a captured graph have other requests.
        capacity = requests.capacity(page_size, is_bound=settings.batch_invariant)
        max_kv_len = max(max_kv_len, capacity)
    else:
        requests = Requests(
            kv_indptr=on_device(offsets, device),
            kv_indices=private_copy(given.kv_indices, device),
            kv_len_arr=on_device(lengths, device),
        )
    return Plan(
        settings=settings,
        text=text_of(settings),
        requests=requests,
        max_kv_len=max_kv_len,
        q_len=q_len,
        tokens=given.batch * q_len,
    )


def within_page_ids(
    given: Requests, seq_lens: torch.Tensor | None, page_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return offsets and lengths that lie within the page ids, whatever was given.

    The kernels rely on that; nothing synchronizes. The result is on the CPU if the metadata is.
    """
    assert given.kv_indptr is not None
    given_lengths = given.kv_len_arr if seq_lens is None else seq_lens
    places = {given.kv_indptr.device.type, given_lengths.device.type}
    place = torch.device("cpu") if places == {"cpu"} else device
    indptr = on_device(given.kv_indptr, place).long().clamp(0, given.kv_indices.shape[0])
    pages = (indptr[1:] - indptr[:-1]).clamp(min=0)
    lengths = on_device(given_lengths, place).long()
    if seq_lens is None:
        lengths = (pages - 1) * page_size + lengths
    lengths = torch.minimum(lengths.clamp(0, INT32_MAX), pages * page_size)
    return indptr.to(torch.int32), lengths.to(torch.int32)


def _with_pages_of(
    block_tables: torch.Tensor,
    given: Requests,
    seq_lens: torch.Tensor | None,
    page_size: int,
    device: torch.device,
) -> Requests:
    """Return requests of as many tokens, whose page ids are those of block tables."""
    names = {**given.names, "kv_indices": "block_tables"}
    rows = Requests(kv_indices=block_tables, kv_len_arr=given.kv_len_arr, names=names)
    table = checked(rows, device).kv_indices.view(torch.int32)
    if seq_lens is None:
        assert given.kv_indptr is not None
        pages = given.kv_indptr.cpu().long().diff().clamp(min=0)
    else:
        pages = (seq_lens.cpu().long().clamp(min=0) + page_size - 1) // page_size
    max_pages = int(pages.max()) if len(pages) else 0
    width = table.shape[1]
    require(width >= max_pages, "block_tables.shape[1]", f"{max_pages} or more (pages)", width)
    columns = torch.arange(width, dtype=pages.dtype, device=pages.device)
    is_cached = (columns < pages[:, None]).to(table.device)
    offsets = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int()
    return given.with_tensors({"kv_indptr": offsets, "kv_indices": table[is_cached]})


def _check_tails(last_page_len: torch.Tensor, page_size: int) -> None:
    if last_page_len.device.type == "cpu" and len(last_page_len):
        tails = last_page_len.view(torch.int32)
        if not 0 <= int(tails.min()) <= int(tails.max()) <= page_size:
            reject("last_page_len", f"0 to {page_size} (page_size)", f"{tails.tolist()[:9]}")


def data_types(
    q_data_type: object, kv_data_type: object, o_data_type: object, data_type: object
) -> dict[str, torch.dtype]:
    """Return the dtypes of query, cache and output, by the fields of the settings."""
    if data_type is not None:
        data_type = _dtype_of(data_type, "data_type", _KV_DTYPES)
    query = _dtype_of(data_type if q_data_type is None else q_data_type, "q_data_type", _Q_DTYPES)
    kv = data_type if kv_data_type is None else kv_data_type
    cached = query if kv is None else _dtype_of(kv, "kv_data_type", _KV_DTYPES)
    allowed = (query, _E4M3) if query in DTYPES else (_E4M3, *DTYPES)
    out = query if o_data_type is None else _dtype_of(o_data_type, "o_data_type", allowed)
    return {"q_data_type": query, "kv_data_type": cached, "o_data_type": out}


def _dtype_of(given: object, argument: str, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return a dtype that may be given by its name."""
    dtype = getattr(torch, given, given) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        known = dtype if isinstance(dtype, torch.dtype) else given
        reject_dtype(argument, " or ".join(map(str, allowed)), known)
    return dtype


@entry_point(GQA, outputs="out lse", returns=ALL, plan="plan")
def run_planned(
    plan: Plan[DecodeSettings],
    float_workspace_buffer: torch.Tensor,
    q: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor],
    kv_cache_sf: torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | list[torch.Tensor]
    | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    enable_pdl: bool | None = None,
) -> GqaArgs:
    """Return the arguments of a run, whose tensors are checked against its plan."""
    settings, requests = plan.settings, plan.requests
    keys, cached_values = pair_of(paged_kv_cache, "paged_kv_cache")
    scales = pair_of(kv_cache_sf, "kv_cache_sf")
    _check_as_planned(plan, q, keys, cached_values, out)
    _check_scales(settings, *scales)
    return GqaArgs(
        query=converted_query(q, "q", settings.o_data_type),
        key_cache=keys,
        value_cache=cached_values,
        workspace_buffer=float_workspace_buffer,
        block_tables=requests.kv_indices,
        kv_indptr=requests.kv_indptr,
        seq_lens=requests.kv_len_arr,
        max_seq_len=plan.max_kv_len,
        q_len=plan.q_len,
        kv_layout=settings.kv_layout,
        window=settings.window,
        soft_cap=settings.soft_cap,
        is_causal=settings.is_causal,
        out=out,
        out_dtype=settings.o_data_type,
        is_out_like_query=True,
        lse=lse,
        return_lse=require_flag(return_lse, "return_lse") or lse is not None,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=canonical_sinks(sinks),
        key_scales=scales[0],
        value_scales=scales[1],
        enable_pdl=is_pdl_enabled(enable_pdl),
        batch_invariant=settings.batch_invariant,
        names=_RUN_NAMES,
    )


def _check_as_planned(
    plan: Plan[DecodeSettings], q: object, keys: object, cached_values: object, out: object
) -> None:
    """Reject tensors that differ from the plan."""
    settings, q_len = plan.settings, plan.q_len
    query, cache = require_tensor(q, "q"), require_tensor(keys, "paged_kv_cache")
    require_plain(query, "q")
    require_plain(cache, "paged_kv_cache")
    for name, tensor, dtype, planned in (
        ("q", query, settings.q_data_type, "q_data_type"),
        ("paged_kv_cache", cache, settings.kv_data_type, "kv_data_type"),
        ("out", out, settings.o_data_type, "o_data_type"),
    ):
        if isinstance(tensor, torch.Tensor) and tensor.dtype is not dtype:
            reject_dtype(f"{name}.dtype", f"{dtype} ({planned} of plan)", tensor.dtype)
    expected = [plan.requests.batch * q_len, settings.num_qo_heads, settings.head_dim]
    why = f"batch * q_len_per_req of {q_len}, num_qo_heads and head_dim of plan"
    shape = list(query.shape)
    require(shape == expected, "q.shape", f"{expected} ({why})", shape)
    if cache.dim() in {4, 5}:
        sizes = (settings.page_size, settings.num_kv_heads)
        axes = (-3, -2) if settings.kv_layout == "NHD" else (-2, -3)
        given = tuple(cache.shape[axis] for axis in axes)
        rule = f"{list(sizes)} (of plan)"
        require(given == sizes, "paged_kv_cache: page_size and num_kv_heads", rule, list(given))
        values = cache if cached_values is None else require_tensor(cached_values, _VALUES)
        dims = settings.head_dim_vo or settings.head_dim
        width = dims // 2 if values.dtype is torch.uint8 else dims
        rule = f"{width} (head_dim_vo of plan{' / 2' if width < dims else ''})"
        is_planned = values.dim() == 0 or values.shape[-1] == width
        require(is_planned, f"{_VALUES}.shape[-1]", rule, tuple(values.shape)[-1:])


def _check_scales(settings: DecodeSettings, *scales: object) -> None:
    """Reject scales of tokens that are not planned, and others where they are."""
    given = [each.dtype for each in scales if isinstance(each, torch.Tensor)]
    is_planned = settings.use_token_head_sf
    if (torch.float32 in given) is not is_planned:
        rule = (
            f"{'torch.float32' if is_planned else 'no torch.float32'} (use_token_head_sf of plan)"
        )
        reject_dtype("kv_cache_sf.dtype", rule, given[0] if given else None)


def _settings_of(text: str, _: dict[str, Any]) -> DecodeSettings:
    settings: DecodeSettings = settings_of(DecodeSettings, text)
    return settings


def _output(given: dict[str, Any]) -> Shape:
    query, settings = given["q"], _settings_of(given["plan"], given)
    return (*query.shape[:-1], settings.head_dim_vo or query.shape[-1]), settings.o_data_type


OP = PlannedOp(
    "batch_decode_run", run_planned, settings_of=_settings_of, output=_output, names=NAMES
)
batch_decode_run = OP.entry
