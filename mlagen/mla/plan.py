"""Plans of BatchMLA: settings and requests, and the plans of runs that have none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.arguments import (
    DTYPES,
    FLOAT_DTYPES,
    INT32_MAX,
    chooses_batch_invariant,
    reject,
    reject_dtype,
    require,
    require_dims,
    require_flag,
    require_float32,
    require_tensor,
    require_whole_number,
    shown,
)
from mlagen.families.common.device_checks import query_lengths
from mlagen.families.common.memory import require_plain
from mlagen.mla.contract import MLAInputContract, MLAPlanMetadata
from mlagen.planned.metadata import (
    Requests,
    checked,
    copied,
    copy_into,
    max_kv_len_of,
)
from mlagen.planned.plan import Plan, settings_of, text_of
from mlagen.spec.mla.variant import MAX_HEADS, MlaVariant, require_supported

DENSE_NAMES = {
    "qo_indptr": "cum_seq_lens_q",
    "kv_indices": "block_tables",
    "kv_len_arr": "seq_lens",
}
_RUN_NAMES = {"kv_indices": "page_table", "kv_len_arr": "kv_len"}

# (head_dim_ckv, head_dim_kpe) of e4m3 caches under 16-bit queries that FlashInfer supports.
_E4M3_HEAD_DIMS = ((512, 0), (512, 64))

# Arguments that a run without a plan rejects.
_PLANNED = (
    *("return_lse", "lse", "profiler_buffer", "ckv_scale", "ckv_scale_arr", "kpe_scale", "sinks"),
    *("skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale"),
)
RANK, _ROPE_DIM = 512, 64  # of runs without a plan
_SOFTMAX_SCALE = 192**-0.5  # of DeepSeek's heads before absorption: 128 + 64 elements


@dataclass(frozen=True, kw_only=True)
class MlaSettings:
    """The scalar arguments of a plan, checked."""

    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    causal: bool
    sm_scale: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    contract: MLAInputContract | None = None  # None: of a run without a plan
    enable_pdl: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        """Check the settings in FlashInfer's order, with its messages where it has any."""
        declared: Any = self.contract
        if isinstance(declared, dict):  # of a text
            object.__setattr__(self, "contract", MLAInputContract(**declared))
        self._check_dtypes()
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
            query_dtype=FLOAT_DTYPES[self.q_data_type],
            kv_dtype=FLOAT_DTYPES[self.kv_data_type],
            kv_lora_rank=self.head_dim_ckv,
            qk_rope_head_dim=self.head_dim_kpe,
            page_size=self.page_size,
        )
        require_supported(variant)

    def _check_dtypes(self) -> None:
        q_dtype, kv_dtype = self.q_data_type, self.kv_data_type
        if not isinstance(kv_dtype, torch.dtype) or kv_dtype not in FLOAT_DTYPES:
            reject_dtype("MLA kv_data_type", " or ".join(map(str, FLOAT_DTYPES)), kv_dtype)
        rope_dim = require_whole_number(self.head_dim_kpe, "head_dim_kpe", min_value=None)
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
        head_dims = (require_whole_number(self.head_dim_ckv, "head_dim_ckv", min_value=1), rope_dim)
        if head_dims not in _E4M3_HEAD_DIMS:
            rule = "head_dim_ckv=512 and head_dim_kpe in (0, 64) for an e4m3 cache"
            reject("(head_dim_ckv, head_dim_kpe)", rule, head_dims)

    @property
    def is_dequantized(self) -> bool:
        """Whether the cache is e4m3 under a 16-bit query."""
        return self.kv_data_type is torch.float8_e4m3fn and self.q_data_type in DTYPES

    @property
    def kernel_dtype(self) -> torch.dtype:
        """The dtype of the kernel's output."""
        return self.q_data_type if self.q_data_type in DTYPES else torch.bfloat16

    @property
    def has_fp8_output(self) -> bool:
        """Whether a run may divide its results by a scale, and write them to an FP8 output."""
        return self.contract is None or self.contract.has_fp8_output


def checked_requests(
    given: MLAPlanMetadata, device: torch.device
) -> tuple[Requests | None, Requests | None]:
    """Return the checked requests of a plan in the CSR form and in the dense form."""
    csr = dense = None
    if given.kv_indices is not None:
        csr = Requests(
            kv_indices=require_tensor(given.kv_indices, "kv_indices"),
            kv_len_arr=require_tensor(given.kv_len_arr, "kv_len_arr"),
            kv_indptr=require_tensor(given.kv_indptr, "kv_indptr"),
            qo_indptr=require_tensor(given.qo_indptr, "qo_indptr"),
        )
        csr = checked(csr, device)
    if given.block_tables is not None:
        dense = Requests(
            kv_indices=require_tensor(given.block_tables, "block_tables"),
            kv_len_arr=require_tensor(given.seq_lens, "seq_lens"),
            qo_indptr=require_tensor(given.cum_seq_lens_q, "cum_seq_lens_q"),
            names=DENSE_NAMES,
        )
        dense = checked(dense, device)
    if csr is not None and dense is not None:
        for part in ("qo_indptr", "kv_len_arr"):
            one, other, name = getattr(csr, part), getattr(dense, part), dense.name_of(part)
            rule = f"{list(one.shape)} ({part})"
            require(one.shape == other.shape, f"{name}.shape", rule, list(other.shape))
            if one.device.type == other.device.type == "cpu":
                is_equal = torch.equal(one.view(torch.int32), other.view(torch.int32))
                rule = f"{part}, as both forms describe the same requests"
                require(is_equal, name, rule, "others")
    return csr, dense


def plan_of(
    settings: MlaSettings,
    given: MLAPlanMetadata,
    device: torch.device,
    *,
    is_graph: bool,
    buffers: Requests | None,
    before: Plan[MlaSettings] | None,
) -> Plan[MlaSettings]:
    """Return the plan of checked settings, whose metadata is copied."""
    csr, dense = checked_requests(given, device)
    requests = csr if dense is None or (is_graph and csr is not None and buffers) else dense
    assert requests is not None  # given_metadata requires a form
    is_bound = settings.batch_invariant
    reads_back = is_bound and not is_graph  # the bound of a graph is all that its pages hold
    sizes = _sizes_of(requests, settings.page_size, given.max_q_len, is_bound=reads_back)
    if not is_graph:
        requests = copied(requests, device)
    elif requests.is_dense:
        _check_in_place(requests, None if before is None else before.requests, device)
    else:
        if buffers is None:
            rule = "a buffer of the constructor, for CUDA graphs of page ids in one dimension"
            reject("qo_indptr", rule, "NoneType")
        copy_into(buffers, requests)
        requests = buffers
    if is_graph:  # replays of a captured graph have other requests
        capacity = requests.capacity(settings.page_size, is_bound=is_bound)
        sizes |= {"max_kv_len": max(sizes["max_kv_len"], capacity), "q_len": 0}
    return Plan(settings=settings, text=text_of(settings), requests=requests, **sizes)


def _sizes_of(
    given: Requests, page_size: int, max_q_len: object, *, is_bound: bool
) -> dict[str, Any]:
    """Return the sizes of a plan, from the metadata on the CPU.

    Without it the longest sequence is an estimate, or with ``is_bound`` read back where no table
    bounds it.
    """
    assert given.qo_indptr is not None
    bound = None if max_q_len is None else require_whole_number(max_q_len, "max_q_len")
    q_lens, name = None, given.name_of("qo_indptr")
    if given.qo_indptr.device.type == "cpu":
        offsets = given.qo_indptr.view(torch.int32)
        q_lens = query_lengths(offsets, name, int(offsets[-1])).tolist()
    reads_back = is_bound and not given.is_dense
    read_back = given.kv_len_arr.view(torch.int32) if reads_back else None
    max_kv_len = max_kv_len_of(given, page_size, is_bound=is_bound, read_back=read_back)
    if q_lens is None:
        return {"max_kv_len": max_kv_len, "max_q_len": bound}
    needed = max(q_lens, default=0)
    if bound is not None:
        require(bound >= needed, "max_q_len", f"{needed} or more (cum_seq_lens_q)", bound)
    return {
        "max_kv_len": max_kv_len,
        "max_q_len": needed,
        "q_len": q_lens[0] if len(set(q_lens)) == 1 else 0,
        "tokens": sum(q_lens),
    }


def _check_in_place(given: Requests, before: Requests | None, device: torch.device) -> None:
    """Reject block tables that a captured graph cannot read where they are."""
    for part, tensor in given.tensors().items():
        name = given.name_of(part)
        why = f"{device}, where a captured graph reads it"
        require(tensor.device == device, f"{name}.device", why, tensor.device)
        if before is not None and before.is_dense:
            old = before.tensors()[part]
            is_same = tensor.data_ptr() == old.data_ptr() and tensor.shape == old.shape
            rule = "the tensor of the plan before, which captured graphs read"
            require(is_same, name, rule, "another")


def with_tables(plan: Plan[MlaSettings], kv_len: object, page_table: object) -> Plan[MlaSettings]:
    """Return a plan with other lengths and block tables."""
    requests = _tables_of(kv_len, page_table, plan.requests.qo_indptr)
    max_kv_len = requests.mean_capacity(plan.settings.page_size)
    return replace(plan, requests=requests, max_kv_len=max_kv_len)


def _tables_of(
    kv_len: object, page_table: object, qo_indptr: torch.Tensor | None = None
) -> Requests:
    """Return lengths and block tables of a run, which are read in place."""
    tables, lengths = require_tensor(page_table, "page_table"), require_tensor(kv_len, "kv_len")
    require_dims(lengths, "kv_len", (1,))
    require_dims(tables, "page_table", (2,))
    return Requests(kv_indices=tables, kv_len_arr=lengths, qo_indptr=qo_indptr, names=_RUN_NAMES)


def planless(
    run: Any, kv_len: object, page_table: object, profiler: object, *, is_traced: bool
) -> Plan[Any]:
    """Return the plan of a run without one: block tables, and one query token each."""
    given: dict[str, Any] = run._asdict() | {"profiler_buffer": profiler}
    given["return_lse"] = require_flag(run.return_lse, "return_lse") or None
    for name in _PLANNED:
        if given[name] is not None:
            rule = "does not support cutlass backend, expected none"
            raise ArgumentError(f"{name} {rule}, got {shown(given[name])}")
    requests = _tables_of(kv_len, page_table)
    settings = _TRACED if is_traced else settings_of_run("", given)
    capacity = requests.kv_indices.shape[1] * run.ckv_cache.shape[1]
    return Plan(
        settings=settings,
        text="",
        requests=requests,
        max_kv_len=min(capacity, INT32_MAX),
        q_len=1,
        tokens=run.q_nope.shape[0],
    )


def settings_of_run(text: str, given: dict[str, Any]) -> MlaSettings:
    """Return the settings of a plan's text, or if it is empty those of a run without a plan."""
    if text:
        settings: MlaSettings = settings_of(MlaSettings, text)
        return settings
    for name in ("q_nope", "ckv_cache"):
        require_plain(require_tensor(given[name], name), name)
        require_dims(given[name], name, (3,))
    query, cache = given["q_nope"], given["ckv_cache"]
    sizes = (query.shape[1], cache.shape[1], query.dtype, cache.dtype)
    return _planless_settings(*sizes, batch_invariant=chooses_batch_invariant(None))


@lru_cache(maxsize=256)
def _planless_settings(
    num_heads: int,
    page_size: int,
    q_data_type: torch.dtype,
    kv_data_type: torch.dtype,
    *,
    batch_invariant: bool,
) -> MlaSettings:
    return MlaSettings(
        num_heads=num_heads,
        head_dim_ckv=RANK,
        head_dim_kpe=_ROPE_DIM,
        page_size=page_size,
        causal=True,
        sm_scale=_SOFTMAX_SCALE,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type,
        batch_invariant=batch_invariant,
    )


# Of a run without a plan that a compiler traces: its op has the settings of its tensors.
_TRACED = _planless_settings(1, 1, torch.bfloat16, torch.bfloat16, batch_invariant=False)
