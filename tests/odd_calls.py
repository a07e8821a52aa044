"""Valid calls of every public function by argument name, for tests that replace one argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

import mlagen
from mlagen.mla import (
    BatchMLAPagedAttentionWrapper,
    MLAPlanMetadata,
    flare_mla_decoding,
    masks,
)
from tests.problems.batch_mla import batch_case, plan_arguments, run_arguments, wrapper_of
from tests.problems.entry_points import xqa_arguments, xqa_mla_arguments
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase

Call = tuple[Callable[..., object], dict[str, Any]]

_MLA = MlaCase(seq_lens=(7, 3), page_size=8, heads=2)
_GQA = GqaCase(seq_lens=(7, 3))
_XQA_MLA = MlaCase(seq_lens=(7, 3), page_size=16, heads=2)
_PLANNED = batch_case(((1, 7), (2, 3)), page_size=8, heads=2)
_TABLE = torch.zeros(2, 1, dtype=torch.int32)
_COUNTS = torch.ones(2, dtype=torch.int32)
_KERNEL = "combine(arch=sm_80, dtype=bf16, head_dim_vo=512)"


def _call(function: Callable[..., object], **arguments: Any) -> Call:
    """Return a call with all arguments of the function, the others by default."""
    parameters = inspect.signature(function).parameters
    usual = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return function, usual | {name: arguments[name] for name in arguments if name in parameters}


def _trtllm() -> Call:
    function = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
    return _call(function, **_MLA.build("cpu").arguments(return_lse=True))


def _trtllm_in_parts() -> Call:
    function, arguments = _trtllm()
    latent, rope = arguments["query"].split([512, 64], dim=-1)
    return function, arguments | {"query": (latent, rope)}


def _xqa_batch_mla() -> Call:
    function = mlagen.mla.xqa_batch_decode_with_kv_cache_mla
    return _call(function, **_MLA.build("cpu").arguments())


def _xqa_batch() -> Call:
    function = mlagen.decode.xqa_batch_decode_with_kv_cache
    return _call(function, **_GQA.build("cpu").arguments())


def _xqa() -> Call:
    return _call(mlagen.xqa.xqa, **xqa_arguments(_GQA.build("cpu")))


def _xqa_mla() -> Call:
    return _call(mlagen.xqa.xqa_mla, **xqa_mla_arguments(_XQA_MLA.build("cpu")))


def _flare() -> Call:
    return _call(
        flare_mla_decoding,
        q=torch.zeros(2, 1, 2, 576, dtype=torch.bfloat16),
        k=torch.zeros(2, 3, 1, 576, dtype=torch.bfloat16),
        mask=masks.CausalMask(),
        valid_length=None,
        scale=1.0,
    )


def _paged_flare() -> Call:
    def call(window: Any, start_pos: Any, **cache: Any) -> object:
        rows = masks.MaterializedMask(torch.zeros(2, 1, 4), start_pos)
        mask = masks.OrMask(masks.SlidingWindowCausalMask(window), rows)
        q = torch.zeros(2, 1, 2, 576, dtype=torch.bfloat16)
        return flare_mla_decoding(q, mlagen.PagedKVCache(**cache), mask, _COUNTS, 1.0)

    blocks = torch.zeros(1, 8, 576, dtype=torch.bfloat16)
    cache = {"blocks": blocks, "block_table": _TABLE, "cache_lengths": _COUNTS, "scales": None}
    return call, {"window": 1, "start_pos": None, **cache}


def _masks() -> Call:
    def call(**arguments: Any) -> object:
        masks.SlidingWindowNonCausalMask(arguments["window"])
        masks.ChunkedCausalMask(arguments["size"])
        q = torch.zeros(2, 1, 2, 576, dtype=torch.bfloat16)
        k = torch.zeros(2, 3, 1, 576, dtype=torch.bfloat16)
        mask = masks.AndMask(arguments["a"], masks.CausalPaddingMask(arguments["valid_lengths"]))
        return flare_mla_decoding(q, k, mask, None, 1.0)

    return call, {"window": 1, "size": 2, "a": masks.NullMask(), "valid_lengths": _COUNTS}


def _constructor() -> Call:
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    buffers = {name: torch.zeros(3, dtype=torch.int32) for name in names} | {"kv_len_arr": _COUNTS}
    workspace = torch.empty(0)
    return _call(
        BatchMLAPagedAttentionWrapper,
        float_workspace_buffer=workspace,
        use_cuda_graph=True,
        **buffers,
    )


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
    arguments = {
        "q_nope": torch.zeros(2, 2, 512, dtype=torch.bfloat16),
        "q_pe": torch.zeros(2, 2, 64, dtype=torch.bfloat16),
        "ckv_cache": torch.zeros(1, 8, 512, dtype=torch.bfloat16),
        "kpe_cache": torch.zeros(1, 8, 64, dtype=torch.bfloat16),
        "out": torch.zeros(2, 2, 512).to(torch.float8_e4m3fn),
        "kv_len": _COUNTS,
        "page_table": _TABLE,
        "o_scale": 1.0,
        "return_lse": False,
    }
    return BatchMLAPagedAttentionWrapper(torch.empty(0), backend="cutlass").run, arguments


def _workspace() -> Call:
    sizes = {"batch": 2, "q_len": 1, "heads": 16, "max_seq_len": 100}
    return mlagen.workspace_bytes, {
        **sizes,
        "dtype": torch.bfloat16,
        "kv_dtype": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "page_size": 64,
        "sparse_mla_top_k": 0,
        "window_left": -1,
        "tokens": None,
        "device": 0,
    }


def _workspace_of_gqa() -> Call:
    function, arguments = _workspace()
    return function, {**arguments, "kv_heads": 2, "head_dim": 128}


def _prewarming(**given: Any) -> Call:
    return lambda **arguments: mlagen.prewarm(dry_run=True, **arguments), given


def _prewarm() -> Call:
    names = ("models", "tp", "families", "heads", "kv_heads", "q_len", "timeout_s", "on_event")
    nothing = dict.fromkeys(names)
    flags = {"isolate": False, "fail_fast": False, "load": False}
    return _prewarming(archs="sm_80", kernels=_KERNEL, jobs=1, **nothing, **flags)


def _prewarm_families() -> Call:
    words = {"kv_heads": None, "dtype": "bf16", "page_size": 64}
    return _prewarming(archs="sm_80", families=["mla_sm80"], heads=16, q_len=1, **words)


def _prewarm_models() -> Call:
    arguments = {"models": "deepseek-v3", "tp": 8, "q_len": 1, "dtype": "bf16", "page_size": 64}
    words = {"kv_dtype": "bf16", "lookup": "paged", "families": ["combine"]}
    return lambda **given: mlagen.prewarm("sm_80", dry_run=True, **given), {**arguments, **words}


def _freeze() -> Call:
    return mlagen.freeze, {"mode": "on"}


def _on_compile() -> Call:
    return lambda callback: mlagen.on_compile(callback)(), {"callback": print}


CALLS = (
    *(
        _trtllm,
        _trtllm_in_parts,
        _xqa_batch_mla,
        _xqa_batch,
        _xqa,
        _xqa_mla,
        _flare,
        _paged_flare,
        _masks,
    ),
    *(
        _constructor,
        _plan,
        _dense_plan,
        _run,
        _packed_run,
        _planless,
        _workspace,
        _workspace_of_gqa,
    ),
    *(_prewarm, _prewarm_families, _prewarm_models, _freeze, _on_compile),
)
