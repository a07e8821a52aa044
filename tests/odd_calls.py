"""Valid calls of every public function by argument name, for tests that replace one argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mlagen
from mlagen.mla import BatchMLAPagedAttentionWrapper, flare_mla_decoding, masks
from tests.batch_mla_cases import batch_case, plan_arguments, run_arguments, wrapper_of
from tests.cases import MlaCase
from tests.gqa_problems import GqaCase
from tests.xqa_semantics import xqa_arguments, xqa_mla_arguments

Call = tuple[Callable[..., object], dict[str, Any]]

_MLA = MlaCase(name="", seq_lens=(7, 3), page_size=8, heads=2)
_GQA = GqaCase(name="", seq_lens=(7, 3))
_XQA_MLA = MlaCase(name="", seq_lens=(7, 3), page_size=16, heads=2)
_TABLE = torch.zeros(2, 1, dtype=torch.int32)
_COUNTS = torch.ones(2, dtype=torch.int32)
_KERNEL = "combine(arch=sm_80, dtype=bf16, head_dim_vo=512)"


def _trtllm() -> Call:
    more = (
        "skip_softmax_threshold_scale_factor enable_pdl out sinks lse cum_seq_lens_q max_q_len "
        "multi_ctas_kv_counter_buffer sparse_mla_top_k_lens causal_seqlens_kv_global "
        "use_fp16_softmax"
    )
    words = {"backend": "auto", "cute_dsl_impl": "auto", "kv_scale_format": "auto"}
    numbers = {"sparse_mla_top_k": 0, "cp_world": 1, "cp_rank": 0, "return_lse_base": "base2"}
    flags = {"is_var_seq": True, "uses_shared_paged_kv_idx": True, "return_lse": True}
    arguments = _MLA.build("cpu").arguments()
    function = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
    given = {**words, **numbers, **flags, "enable_dcp": False, **arguments}
    return function, {**dict.fromkeys(more.split()), **given}


def _xqa_batch_mla() -> Call:
    given = _MLA.build("cpu").arguments()
    names = (
        "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim "
        "block_tables seq_lens max_seq_len bmm1_scale bmm2_scale"
    )
    arguments = {name: given[name] for name in names.split()}
    more = {"out": None, "sinks": None, "enable_pdl": None}
    return mlagen.mla.xqa_batch_decode_with_kv_cache_mla, {**arguments, **more}


def _xqa_batch() -> Call:
    given = _GQA.build("cpu").arguments()
    more = {"out": None, "sinks": None, "mask": None, "kv_cache_sf": None, "q_cu_seq_lens": None}
    numbers = {"window_left": -1, "q_len_per_req": 1, "o_scale": 1.0, "kv_layout": "NHD"}
    function = mlagen.decode.xqa_batch_decode_with_kv_cache
    return function, {**more, **numbers, "enable_pdl": None, **given}


def _xqa() -> Call:
    more = {"sinks": None, "mask": None, "sm_count": None, "sliding_win_size": 0, "q_seq_len": 1}
    numbers = {"rcp_out_scale": 1.0, "kv_layout": "NHD", "enable_pdl": None, "q_cu_seq_lens": None}
    return mlagen.xqa.xqa, {**more, **numbers, **xqa_arguments(_GQA.build("cpu"))}


def _xqa_mla() -> Call:
    more = {"sm_count": None, "enable_pdl": None}
    return mlagen.xqa.xqa_mla, {**more, **xqa_mla_arguments(_XQA_MLA.build("cpu"))}


def _flare() -> Call:
    arguments = {
        "q": torch.zeros(2, 1, 2, 576, dtype=torch.bfloat16),
        "k": torch.zeros(2, 3, 1, 576, dtype=torch.bfloat16),
        "mask": masks.CausalMask(),
        "valid_length": None,
        "scale": 1.0,
        "output": None,
        "ragged": False,
        "num_partitions": None,
        "q_scale": None,
        "per_token_scale_rope_aware": False,
        "kv_scales": None,
    }
    return flare_mla_decoding, arguments


def _paged_flare() -> Call:
    def call(window: Any, start_pos: Any, **cache: Any) -> object:
        rows = masks.MaterializedMask(torch.zeros(2, 1, 4), start_pos)
        mask = masks.OrMask(masks.SlidingWindowCausalMask(window), rows)
        q = torch.zeros(2, 1, 2, 576, dtype=torch.bfloat16)
        return flare_mla_decoding(q, mlagen.PagedKVCache(**cache), mask, _COUNTS, 1.0)

    arguments = {
        "window": 1,
        "start_pos": None,
        "blocks": torch.zeros(1, 8, 576, dtype=torch.bfloat16),
        "block_table": _TABLE,
        "cache_lengths": _COUNTS,
        "scales": None,
    }
    return call, arguments


def _masks() -> Call:
    def call(**arguments: Any) -> object:
        masks.SlidingWindowNonCausalMask(arguments["window"])
        masks.ChunkedCausalMask(arguments["size"])
        q = torch.zeros(2, 1, 2, 576, dtype=torch.bfloat16)
        k = torch.zeros(2, 3, 1, 576, dtype=torch.bfloat16)
        mask = masks.AndMask(arguments["a"], masks.CausalPaddingMask(arguments["valid_lengths"]))
        return flare_mla_decoding(q, k, mask, None, 1.0)

    return call, {"window": 1, "size": 2, "a": masks.NullMask(), "valid_lengths": _COUNTS}


_PLANNED = batch_case("", ((1, 7), (2, 3)), page_size=8, heads=2)


def _constructor() -> Call:
    arguments = {
        "float_workspace_buffer": torch.empty(0),
        "use_cuda_graph": True,
        "qo_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indices": torch.zeros(3, dtype=torch.int32),
        "kv_len_arr": _COUNTS,
        "backend": "auto",
    }
    return BatchMLAPagedAttentionWrapper, arguments


def _plan() -> Call:
    problem = _PLANNED.build("cpu")
    return wrapper_of(problem).plan, {**plan_arguments(problem), "use_profiler": False}


def _run() -> Call:
    problem = _PLANNED.build("cpu")
    more = "out lse profiler_buffer kv_len page_table o_scale ckv_scale ckv_scale_arr kpe_scale"
    flags = {"return_lse": True, "return_lse_base_on_e": False}
    given = {**dict.fromkeys(more.split()), **flags, **run_arguments(problem)}
    return wrapper_of(problem).run, given


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
    arguments = {
        "batch": 2,
        "q_len": 1,
        "heads": 16,
        "max_seq_len": 100,
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
    return mlagen.workspace_bytes, arguments


def _workspace_of_gqa() -> Call:
    function, arguments = _workspace()
    return function, {**arguments, "kv_heads": 2, "head_dim": 128}


def _prewarm() -> Call:
    arguments = {
        "archs": "sm_80",
        "models": None,
        "tp": None,
        "kernels": _KERNEL,
        "families": None,
        "heads": None,
        "kv_heads": None,
        "q_len": None,
        "jobs": 1,
        "isolate": False,
        "timeout_s": None,
        "fail_fast": False,
        "load": False,
        "on_event": None,
    }
    return lambda **given: mlagen.prewarm(dry_run=True, **given), arguments


def _prewarm_families() -> Call:
    arguments = {"archs": "sm_80", "families": ["mla_sm80"], "heads": 16, "q_len": 1}
    words = {"kv_heads": None, "dtype": "bf16", "page_size": 64}
    return lambda **given: mlagen.prewarm(dry_run=True, **given), {**arguments, **words}


def _prewarm_models() -> Call:
    arguments = {"models": "deepseek-v3", "tp": 8, "q_len": 1, "dtype": "bf16", "page_size": 64}
    words = {"kv_dtype": "bf16", "lookup": "paged", "families": ["combine"]}
    return lambda **given: mlagen.prewarm("sm_80", dry_run=True, **given), {**arguments, **words}


def _freeze() -> Call:
    return mlagen.freeze, {"mode": "on"}


def _on_compile() -> Call:
    return lambda callback: mlagen.on_compile(callback)(), {"callback": print}


CALLS = (
    _trtllm,
    _xqa_batch_mla,
    _xqa_batch,
    _xqa,
    _xqa_mla,
    _flare,
    _paged_flare,
    _masks,
    _constructor,
    _plan,
    _run,
    _planless,
    _workspace,
    _workspace_of_gqa,
    _prewarm,
    _prewarm_families,
    _prewarm_models,
    _freeze,
    _on_compile,
)
