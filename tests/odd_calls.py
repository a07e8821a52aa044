"""Valid calls of every public function by argument name, for tests that replace one argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import mlagen
from mlagen.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata, flare_mla_decoding, masks
from tests.problems import batch_decode
from tests.problems.batch_mla import batch_case, plan_arguments, run_arguments, wrapper_of
from tests.problems.dsv4 import DSV4, Dsv4Case
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase
from tests.problems.problem import bf16

Call = tuple[Callable[..., object], dict[str, Any]]

_MLA = MlaCase(seq_lens=(7, 3), page_size=8, heads=2)
_DSV4 = Dsv4Case(
    seq_lens=(7, 3), extra_lens=(2, 8), top_k=16, extra_top_k=8, heads=2, entries="valid"
)
_GQA = GqaCase(seq_lens=(7, 3))
_XQA_MLA = MlaCase(seq_lens=(7, 3), page_size=16, heads=2)
_PLANNED = batch_case(((1, 7), (2, 3)), page_size=8, heads=2)
_TABLE = torch.zeros(2, 1, dtype=torch.int32)
_COUNTS = torch.ones(2, dtype=torch.int32)
_V, _S = torch.zeros(2, 3, 8), torch.zeros(2, 3)
_STATES = {"v_a": _V, "s_a": _S, "v_b": _V, "s_b": _S, "v": _V, "s": _S}
_STATES |= {"v_other": _V.clone(), "s_other": _S.clone()}
_SLOTS = torch.arange(2, dtype=torch.int64)
_CKV = bf16(2, 512)
_KERNEL = (
    "combine(arch=sm_80, dtype=bf16, head_dim_vo=512, batch_invariant=False, has_output_gate=False)"
)
_SIZES = {"batch": 2, "q_len": 1, "heads": 16, "max_seq_len": 100, "device": 0}


def _call(function: Callable[..., object], **arguments: Any) -> Call:
    """Return a call with all arguments of the function, the others by default."""
    parameters = inspect.signature(function).parameters
    usual = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return function, usual | {name: arguments[name] for name in arguments if name in parameters}


def _decode(name: str, case: MlaCase | GqaCase, **others: Any) -> Call:
    entry = ENTRY_POINTS[name]
    return _call(entry.function, **entry.arguments(case.build("cpu")), **others)


def _trtllm_in_parts() -> Call:
    function, arguments = _decode("trtllm", _MLA, return_lse=True)
    return function, arguments | {"query": tuple(arguments["query"].split([512, 64], dim=-1))}


def _two_pools() -> Call:
    return _call(DSV4.function, **_DSV4.build("cpu").arguments(return_lse=True))


def _flare() -> Call:
    tensors = {"q": bf16(2, 1, 2, 576), "k": bf16(2, 3, 1, 576), "valid_length": None}
    return _call(flare_mla_decoding, **tensors, mask=masks.CausalMask(), scale=1.0)


def _paged_flare() -> Call:
    def call(window: Any, start_pos: Any, **cache: Any) -> object:
        rows = masks.MaterializedMask(torch.zeros(2, 1, 4), start_pos)
        mask = masks.OrMask(masks.SlidingWindowCausalMask(window), rows)
        q = bf16(2, 1, 2, 576)
        return flare_mla_decoding(q, mlagen.PagedKVCache(**cache), mask, _COUNTS, 1.0)

    cache = {"blocks": bf16(1, 8, 576), "block_table": _TABLE, "cache_lengths": _COUNTS}
    return call, {"window": 1, "start_pos": None, **cache, "scales": None}


def _masks() -> Call:
    def call(**arguments: Any) -> object:
        masks.SlidingWindowNonCausalMask(arguments["window"])
        masks.ChunkedCausalMask(arguments["size"])
        q, k = bf16(2, 1, 2, 576), bf16(2, 3, 1, 576)
        mask = masks.AndMask(arguments["a"], masks.CausalPaddingMask(arguments["valid_lengths"]))
        return flare_mla_decoding(q, k, mask, None, 1.0)

    return call, {"window": 1, "size": 2, "a": masks.NullMask(), "valid_lengths": _COUNTS}


def _constructor() -> Call:
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    given: dict[str, Any] = {name: torch.zeros(3, dtype=torch.int32) for name in names}
    given |= {"kv_len_arr": _COUNTS, "use_cuda_graph": True}
    return _call(BatchMLAPagedAttentionWrapper, float_workspace_buffer=torch.empty(0), **given)


def _plan() -> Call:
    problem = _PLANNED.build("cpu")
    return _call(wrapper_of(problem).plan, **plan_arguments(problem))


def _dense_plan() -> Call:
    problem = _PLANNED.build("cpu")
    given = plan_arguments(problem)
    indptr = (given.pop("qo_indptr"), given.pop("kv_indptr"))
    tables = given.pop("kv_indices").view(2, -1)
    metadata = MLAPlanMetadata.dense(indptr[0], tables, given.pop("kv_len_arr"))
    return _call(wrapper_of(problem).plan, metadata=metadata, **given)


def _packed_run() -> Call:
    problem = _PLANNED.build("cpu")
    wrapper = wrapper_of(problem, use_sinks=True)
    query = torch.zeros(3, 2, 576, dtype=torch.bfloat16)
    cache = torch.zeros(9, 8, 576, dtype=torch.bfloat16)
    return _call(wrapper.run, query=query, kv_cache=cache, sinks=torch.zeros(2))


def _run() -> Call:
    problem = _PLANNED.build("cpu")
    return _call(wrapper_of(problem).run, **run_arguments(problem, return_lse=True))


def _planless() -> Call:
    tensors = {"q_nope": bf16(2, 2, 512), "q_pe": bf16(2, 2, 64), "kv_len": _COUNTS}
    tensors |= {"ckv_cache": bf16(1, 8, 512), "kpe_cache": bf16(1, 8, 64), "page_table": _TABLE}
    out = {"out": torch.zeros(2, 2, 512).to(torch.float8_e4m3fn), "o_scale": 1.0}
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0), backend="cutlass")
    return wrapper.run, {**tensors, **out, "return_lse": False}


def _append() -> Call:
    cache = torch.zeros(2, 4, 528, dtype=torch.uint8)
    append = mlagen.writers.dsv41_fp8_quantize_append_sparse_mla_cache
    given = {"latent_kv": _CKV, "slot_mapping": _SLOTS, "cache": cache}
    rope = {"positions": _SLOTS, "cos_sin_cache": torch.zeros(4, 64)}
    return _call(append, **given, norm_weight=bf16(512), **rope)


def _append_packed() -> Call:
    cache, scales = torch.zeros(2, 4, 640, dtype=torch.uint8), torch.zeros(2, 4)
    tokens = {"ckv": _CKV, "kpe": bf16(2, 64), "slot_mapping": _SLOTS}
    append = mlagen.writers.mla_fp8_quantize_append_packed
    return _call(append, **tokens, cache=cache, scales=scales)


def _append_paged() -> Call:
    given = {"append_ckv": _CKV, "append_kpe": bf16(2, 64), "ckv_cache": bf16(2, 4, 512)}
    given |= {"kpe_cache": bf16(2, 4, 64), "batch_indices": _COUNTS, "positions": _COUNTS}
    given |= {"kv_indices": _COUNTS, "kv_indptr": torch.arange(3, dtype=torch.int32)}
    append = mlagen.writers.append_paged_mla_kv_cache
    return _call(append, **given, kv_last_page_len=_COUNTS)


def _local_seq_lens() -> Call:
    of_rank = {"seq_lens": _COUNTS, "cp_world": 2, "cp_rank": 1}
    return mlagen.distributed.local_seq_lens, of_rank


def _workspace(**of_gqa: int) -> Call:
    function, arguments = _call(mlagen.workspace_bytes, **_SIZES)
    others = {} if of_gqa else dict.fromkeys(("kv_heads", "head_dim"))
    return function, {name: arguments[name] for name in arguments if name not in others} | of_gqa


def _prewarming(**given: Any) -> Call:
    return lambda **arguments: mlagen.prewarm(dry_run=True, **arguments), given


def _prewarm() -> Call:
    names = (
        "models",
        "tp",
        "dcp",
        "families",
        "heads",
        "kv_heads",
        "q_len",
        "timeout_s",
        "on_event",
    )
    flags = {"isolate": False, "fail_fast": False, "load": False}
    kernel = {"archs": "sm_80", "kernels": _KERNEL, "jobs": 1}
    return _prewarming(**kernel, **dict.fromkeys(names), **flags)


def _prewarm_families() -> Call:
    words = {"kv_heads": None, "dtype": "bf16", "page_size": 64}
    return _prewarming(archs="sm_80", families=["mla_sm80"], heads=16, q_len=1, **words)


def _prewarm_models() -> Call:
    arguments = {
        "models": "deepseek-v3",
        "tp": 8,
        "dcp": 1,
        "q_len": 1,
        "dtype": "bf16",
        "page_size": 64,
    }
    words = {"kv_dtype": "bf16", "lookup": "paged", "families": ["combine"]}
    return lambda **given: mlagen.prewarm("sm_80", dry_run=True, **given), {**arguments, **words}


def _plan_decode() -> Call:
    problem = _GQA.build("cpu")
    return _call(batch_decode.wrapper_of(problem).plan, **batch_decode.plan_arguments(problem))


def _run_decode() -> Call:
    problem = _GQA.build("cpu")
    arguments = batch_decode.run_arguments(problem, return_lse=True)
    return _call(batch_decode.wrapper_of(problem).run, **arguments)


ENTRY_CALLS: dict[str, Callable[[], Call]] = {
    "trtllm": lambda: _decode("trtllm", _MLA, return_lse=True),
    "trtllm_in_parts": _trtllm_in_parts,
    "dsv4": _two_pools,
    "xqa_batch_mla": lambda: _decode("xqa_batch_mla", _MLA),
    "xqa_batch": lambda: _decode("xqa_batch", _GQA),
    "trtllm_gqa": lambda: _decode("trtllm_gqa", _GQA, return_lse=True),
    "plan_decode": _plan_decode,
    "run_decode": _run_decode,
    "xqa": lambda: _decode("xqa", _GQA),
    "xqa_mla": lambda: _decode("xqa_mla", _XQA_MLA),
    "flare": _flare,
    "paged_flare": _paged_flare,
    "masks": _masks,
    "constructor": _constructor,
    "plan": _plan,
    "dense_plan": _dense_plan,
    "run": _run,
    "packed_run": _packed_run,
    "planless": _planless,
}
CALLS = ENTRY_CALLS | {
    "workspace": _workspace,
    "workspace_of_gqa": lambda: _workspace(kv_heads=2, head_dim=128),
    "prewarm": _prewarm,
    "prewarm_families": _prewarm_families,
    "prewarm_models": _prewarm_models,
    "op": lambda: (mlagen.ops.op, {"name": mlagen.ops.NAMES[0], "writes": False}),
    "merge_state": lambda: _call(mlagen.cascade.merge_state, **_STATES),
    "merge_state_in_place": lambda: _call(mlagen.cascade.merge_state_in_place, **_STATES),
    "merge_states": lambda: _call(mlagen.cascade.merge_states, v=_V[:, None], s=_S[:, None]),
    "append": _append,
    "append_packed": _append_packed,
    "append_paged": _append_paged,
    "pack": lambda: _call(
        mlagen.writers.dsv4_fp8_quantize_pack_sparse_mla_cache, latent_kv=_CKV[None]
    ),
    "local_seq_lens": _local_seq_lens,
    "max_workspace": lambda: (mlagen.max_workspace_bytes, {"device": 0}),
    "freeze": lambda: (mlagen.freeze, {"mode": "on"}),
    "on_compile": lambda: (lambda callback: mlagen.on_compile(callback)(), {"callback": print}),
}
