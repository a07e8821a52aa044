"""vLLM's attention in Triton, which serves caches and head dims that its libraries do not."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from mlagen.spec.dtype import DType

from ..calls import Call, block_indices_of, qsa_call
from ..cases import Case
from ..inputs import Inputs, element_scale
from .baseline import Baseline, cu_seqlens_q_of, shared_library

PACKAGES = "vllm and triton"
INSTALL = "pip install --no-deps --target DIR vllm, and pass --libraries DIR"

_DENSE = "vllm/v1/attention/ops/triton_unified_attention.py"
_MSA = "vllm/models/minimax_m3/common/ops/sparse_attn.py"
_QSA = "vllm/models/qwen4_exp/nvidia/ops/qsa.py"
# As vLLM's backend has them: it splits sequences up to as many work items, into so many parts.
_MAX_SPLIT_ITEMS = 128
_SPLITS = 16


def find() -> list[Baseline]:
    """Return the kernels of vLLM, if that of dense calls is found."""
    found = {name: shared_library("vllm", name) for name in (_DENSE, _MSA, _QSA)}
    paths = {name: library.path for name, library in found.items() if library is not None}
    dense = found[_DENSE]
    if dense is None or find_spec("triton") is None:
        return []

    def make(inputs: Inputs) -> Call:
        return triton_call(_load(paths[_file_of(inputs.case)]), inputs)

    def serves(case: Case) -> bool:
        return _file_of(case) in paths and _serves(case)

    return [Baseline(name="triton", version=dense.version, serves=serves, make=make)]


@cache
def _load(path: Path) -> Any:
    """Return the module of a file; its package would import the model, and all that needs."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None, "it is a file of Python"
    assert spec.loader is not None, "it is a file of Python"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file_of(case: Case) -> str:
    if not case.is_sparse_gqa:
        return _DENSE
    return _MSA if case.sparse_block > 1 else _QSA


def _serves(case: Case) -> bool:
    if case.is_sparse_gqa:
        return case.dtype is DType.BF16 and case.kv_dtype in {DType.BF16, DType.E4M3}
    is_plain = case.kv_dtype in (case.dtype, DType.E4M3, DType.INT8)
    is_known = is_plain or case.kv_dtype.has_token_scales
    return case.family == "gqa" and case.dtype.is_16bit and is_known and not case.has_value_dims


def triton_call(ops: Any, inputs: Inputs) -> Call:
    """Return the call of a kernel of the module that serves the case."""
    if inputs.case.sparse_block > 1:
        return _msa_call(ops, inputs)
    if inputs.case.is_sparse_gqa:
        return qsa_call(ops.qsa_sparse_paged_attention, inputs)
    return _dense_call(ops, inputs)


def _msa_call(ops: Any, inputs: Inputs) -> Call:
    """Return the call over rows of a key and a value."""
    case, indices = inputs.case, block_indices_of(inputs)
    queries = [query.flatten(0, 1) for query in inputs.queries]
    out, caches = torch.empty_like(queries[0]), []
    for each in inputs.keys:
        keys = each.data.transpose(1, 2)
        caches.append(keys.as_strided((*keys.shape[:3], 2 * case.head_dim_qk), keys.stride()))

    def call(index: int) -> torch.Tensor:
        ops.minimax_m3_sparse_attn_decode(
            queries[index],
            caches[index],
            indices,
            inputs.block_tables,
            inputs.seq_lens,
            case.kv_heads,
            inputs.scale,
            out,
            case.q_len,
        )
        return out

    return call


def _dense_call(ops: Any, inputs: Inputs) -> Call:
    """Return the call; as in vLLM it converts the query over an e4m3 cache.

    An int8 cache has the scale of the call as one for each token and KV head.
    """
    case = inputs.case
    queries = [query.flatten(0, 1) for query in inputs.queries]
    out, device = torch.empty_like(queries[0]), queries[0].device
    is_fp8 = case.kv_dtype is DType.E4M3
    one = torch.ones(1, device=device)
    shared: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q_of(inputs),
        "max_seqlen_q": case.q_len,
        "seqused_k": inputs.seq_lens,
        "max_seqlen_k": inputs.max_seq_len,
        "softmax_scale": inputs.scale,
        "causal": True,
        "window_size": (case.window_left, 0 if case.window_left >= 0 else -1),
        "block_table": inputs.block_tables,
        "softcap": float(case.soft_cap),
        "q_descale": one if is_fp8 else None,
        "k_descale": one,
        "v_descale": one,
    }
    if is_fp8:
        shared["kv_quant_mode"] = ops.KVQuantMode.FP8_PER_TENSOR
    if case.kv_dtype is DType.INT8:
        rows, factor = inputs.keys[0].data.shape[:3], element_scale(case.kv_dtype)
        scales = torch.full(rows, factor, dtype=torch.float32, device=device)
        shared |= {"k_scale_cache": scales, "v_scale_cache": scales}
        shared["kv_quant_mode"] = ops.KVQuantMode.INT8_PER_TOKEN_HEAD
    if case.kv_dtype.has_token_scales:
        shared["kv_quant_mode"] = getattr(ops.KVQuantMode, str(case.kv_dtype).upper())
    max_split = _MAX_SPLIT_ITEMS // case.kv_heads
    if case.batch <= max_split:
        width = 1 << (case.head_dim_vo - 1).bit_length()
        parts = torch.empty(*out.shape[:2], _SPLITS, width, device=device)
        shared |= {
            "seq_threshold_3D": max_split,
            "num_par_softmax_segments": _SPLITS,
            "softmax_segm_output": parts,
            "softmax_segm_max": torch.empty_like(parts[..., 0]),
            "softmax_segm_expsum": torch.empty_like(parts[..., 0]),
        }

    def call(index: int) -> torch.Tensor:
        query = queries[index].to(torch.float8_e4m3fn) if is_fp8 else queries[index]
        keys, values = inputs.keys[index], inputs.values[index]
        if case.kv_dtype.has_token_scales:
            shared.update(k_scale_cache=keys.scales, v_scale_cache=values.scales)
        ops.unified_attention(query, keys.data, values.data, out, **shared)
        return out

    return call
