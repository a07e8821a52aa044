"""FlashMLA as vLLM and SGLang build it: two compilers, two speeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mlagen.spec.dtype import DType

from ..calls import Call
from ..cases import KV_LORA_RANK, Case
from ..inputs import Inputs, Stored
from ..pools import PoolInputs, TopkList
from ..timing import Replays
from .baseline import Baseline, shared_library

PACKAGES = "vllm or sgl-flash-mla"
INSTALL = "pip install --no-deps --target DIR vllm sgl-flash-mla, and pass --libraries DIR"

# The kernels take pages of this many tokens only.
_PAGE_SIZE = 64

# The sparse kernels take a multiple of this many heads; over two pools, up to twice as many, and a
# multiple of as many top-k indices.
_SPARSE_HEADS = 64


def find() -> list[Baseline]:
    """Return the builds that are found."""
    builds = (_find_vllm(), _find_sglang())
    return [build for build in builds if build is not None]


def _find_vllm() -> Baseline | None:
    dense = shared_library("vllm", "vllm/_flashmla_C.abi3.so")
    fp8 = shared_library("vllm", "vllm/_flashmla_extension_C.abi3.so")
    if dense is None or fp8 is None:
        return None

    def make(inputs: Inputs) -> Call:
        dense.load()
        fp8.load()
        ops, fp8_ops = torch.ops._flashmla_C, torch.ops._flashmla_extension_C  # noqa: SLF001
        return _call(inputs, partial(_dense, ops.dense_decode_fwd, 1), ops, fp8_ops)

    return Baseline(name="flashmla-vllm", version=dense.version, serves=_serves, make=make)


def _find_sglang() -> Baseline | None:
    library = shared_library("sgl-flash-mla", "flash_mla/_C_legacy.abi3.so")
    if library is None:
        return None

    def make(inputs: Inputs) -> Call:
        library.load()
        ops = torch.ops.flash_mla_legacy
        return _call(inputs, partial(_dense, ops.dense_decode_fwd, 0), ops, ops)

    return Baseline(
        name="flashmla-sglang", version=library.version, serves=_sglang_serves, make=make
    )


def _serves(case: Case) -> bool:
    if case.has_two_pools:
        return _sglang_serves(case)
    return _sglang_serves(case) and case.qk_rope_head_dim > 0 and not _has_16bit_lists(case)


def _sglang_serves(case: Case) -> bool:
    """Whether SGLang's build serves a case: sparse ones also without rope, and over bf16 rows."""
    if case.has_two_pools:
        is_known = case.kv_dtype is DType.FP8_DSV4 and case.heads <= 2 * _SPARSE_HEADS
        return is_known and case.top_k % _SPARSE_HEADS == 0
    if case.family != "mla" or case.page_size != _PAGE_SIZE:
        return False
    if case.top_k:
        return case.dtype is DType.BF16 and case.kv_dtype in (DType.BF16, DType.FP8_DS_MLA)
    return case.dtype is case.kv_dtype and case.qk_rope_head_dim > 0


def _has_16bit_lists(case: Case) -> bool:
    return case.top_k > 0 and case.kv_dtype is DType.BF16


def _call(inputs: Inputs, dense: Callable[[Inputs], Call], ops: Any, fp8_ops: Any) -> Call:
    if isinstance(inputs, PoolInputs):
        return _two_pools(ops.sparse_decode_fwd, inputs)
    if _has_16bit_lists(inputs.case):
        return _sparse_16bit(ops.sparse_prefill_fwd, inputs)
    if inputs.topk_indices is not None:
        return _sparse(ops.sparse_decode_fwd, inputs)
    if inputs.case.kv_dtype is DType.E4M3:
        return _dense_fp8(fp8_ops, inputs)
    return dense(inputs)


def _dense(op: Any, unused: int, inputs: Inputs) -> Call:
    """Return the 16-bit call; ``unused`` is how many optional arguments more a build has."""
    case = inputs.case
    caches = [keys.data for keys in inputs.keys]
    metadata: list[Any] = [None, None]  # made by the first call, as in a decode step

    def call(index: int) -> torch.Tensor:
        out, _, metadata[0], metadata[1] = op(
            inputs.queries[index],
            caches[index],
            KV_LORA_RANK,
            inputs.seq_lens,
            inputs.block_tables,
            inputs.scale,
            case.q_len > 1,
            *metadata,
            *(None,) * unused,
        )
        result: torch.Tensor = out
        return result

    return call


def _dense_fp8(ops: Any, inputs: Inputs) -> Call:
    case = inputs.case
    rows = case.q_len * case.heads
    metadata = ops.get_mla_decoding_metadata_dense_fp8(inputs.seq_lens, rows, 1)
    one = torch.ones(1, device=inputs.seq_lens.device)
    caches = [keys.data for keys in inputs.keys]

    def call(index: int) -> torch.Tensor:
        out: torch.Tensor = ops.fwd_kvcache_mla_fp8(
            inputs.queries[index],
            caches[index],
            KV_LORA_RANK,
            inputs.seq_lens,
            inputs.block_tables,
            inputs.scale,
            case.q_len > 1,
            *metadata,
            one,
            one,
        )[0]
        return out

    return call


def _sparse(op: Any, inputs: Inputs) -> Call:
    """Return the call over `fp8_ds_mla` rows; without a rope part their size does not name them."""
    caches = [keys.data.view(torch.float8_e4m3fn) for keys in inputs.keys]
    kv_format = None if inputs.case.qk_rope_head_dim else "V32_NO_ROPE"
    lists = [(cache, inputs.topk_indices, None) for cache in caches]  # and no lengths
    return _list_call(op, inputs, _padded(inputs), lists, (), kv_format)


def _list_call(
    op: Any,
    inputs: Inputs,
    queries: list[torch.Tensor],
    first: Sequence[tuple[Any, ...]],
    second: Sequence[tuple[Any, ...]],
    kv_format: str | None,
) -> Call:
    """Return the call over caches with top-k indices and lengths, and maybe over second ones."""
    metadata: list[Any] = [None, None]

    def call(index: int) -> torch.Tensor:
        out, _, metadata[0], metadata[1] = op(
            queries[index],
            *first[index],
            None,  # sinks
            *metadata,
            *(second[index] if second else (None,) * 3),
            KV_LORA_RANK,
            inputs.scale,
            kv_format,
        )
        result: torch.Tensor = out[..., : inputs.case.heads, :]
        return result

    return call


def _two_pools(op: Any, inputs: PoolInputs) -> Call:
    """Return the call over rows of DeepSeek-V4, the faster of two with several query tokens.

    Top-k lengths are those of a request: vLLM passes every query token as one, which is right for
    any lengths, and all tokens of a request are one otherwise.
    """
    case = inputs.case
    calls = [_two_pool_call(op, inputs, case.batch * case.q_len)]
    if case.q_len > 1 and not case.is_ragged:
        calls.append(_two_pool_call(op, inputs, case.batch))
    if len(calls) == 1 or inputs.seq_lens.device.type == "cpu":
        return calls[-1]
    return min(calls, key=lambda call: Replays(call).median_us())


def _two_pool_call(op: Any, inputs: PoolInputs, batch: int) -> Call:
    q_len = len(inputs.swa[0].lengths) // batch
    queries = [query.view(batch, q_len, *query.shape[2:]) for query in _padded(inputs)]

    def pool(keys: list[Stored], lists: list[TopkList]) -> list[tuple[torch.Tensor, ...]]:
        return [
            (
                stored.data.view(torch.float8_e4m3fn),
                listed.indices.view(batch, q_len, -1),
                listed.lengths[::q_len].contiguous(),
            )
            for stored, listed in zip(keys, lists, strict=True)
        ]

    swa, extra = pool(inputs.keys, inputs.swa), pool(inputs.extra_keys, inputs.extra)
    # The size of the rows names the format.
    return _list_call(op, inputs, queries, swa, extra, None)


def _sparse_16bit(op: Any, inputs: Inputs) -> Call:
    """Return the call of the prefill kernel, which SGLang runs in decode too."""
    heads = inputs.case.heads
    queries = [query.flatten(0, 1) for query in _padded(inputs)]
    caches = [keys.data.flatten(0, 1) for keys in inputs.keys]
    assert inputs.topk_indices is not None, "the case is sparse"
    indices = inputs.topk_indices.flatten(0, 1).unsqueeze(1)

    def call(index: int) -> torch.Tensor:
        results = op(queries[index], caches[index], indices, inputs.scale, KV_LORA_RANK)
        out: torch.Tensor = results[0]
        return out[..., :heads, :]

    return call


def _padded(inputs: Inputs) -> list[torch.Tensor]:
    """Return the queries with heads that the kernels take; servers pad them as well."""
    padding = -inputs.case.heads % _SPARSE_HEADS
    return [torch.nn.functional.pad(query, (0, 0, 0, padding)) for query in inputs.queries]
