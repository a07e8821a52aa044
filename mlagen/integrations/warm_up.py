"""What a server's worker has before the first request: scratch, and kernels compiled and loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch

from mlagen import max_workspace_bytes
from mlagen.engine import kernel_for, prewarm_advice
from mlagen.errors import UnsupportedError
from mlagen.jit import freeze
from mlagen.models import kernels
from mlagen.models.kernels import call_specs
from mlagen.prewarming.build import build_all, build_unit, look_up_all
from mlagen.prewarming.machine import usable_jobs
from mlagen.prewarming.report import PrewarmUnit, Progress
from mlagen.runtime.device import arch_of_device
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import batch_invariant
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.variant import MlaVariant

# A variant, and the query rows of a sequence and KV head that a tile is chosen for.
Calls = tuple[MlaVariant | GqaVariant, int]

_DTYPES = {
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
    torch.float8_e4m3fn: DType.E4M3,
    torch.uint8: DType.FP8_DS_MLA,
}
_GQA_DTYPES = _DTYPES | {
    torch.float8_e5m2: DType.E5M2,
    torch.int8: DType.INT8,
    torch.uint8: DType.NVFP4,
}
_logger = logging.getLogger("mlagen")


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """Return the scratch of all layers on ``device``, whose calls follow each other on a stream."""
    # Not the server's own: trtllm-gen kernels have semaphores in that one, which must stay zero.
    return torch.empty(max_workspace_bytes(device), dtype=torch.uint8, device=device)


def mla_calls(
    *,
    heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    query_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_q_len: int = 1,
    is_sparse: bool = False,
    dcp_size: int = 1,
) -> list[tuple[MlaVariant, int]]:
    """Return the decode calls of MLA layers, by what a server knows of them.

    ``heads`` are those of a call, of all ranks if decode context parallel gathers the query;
    ``kv_dtype`` is that of the cache, uint8 for rows of ``fp8_ds_mla``; ``max_q_len`` is the most
    query tokens of a request.
    """
    variant = MlaVariant(
        query_dtype=_DTYPES[query_dtype],
        kv_dtype=_DTYPES[kv_dtype],
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        page_size=page_size,
        lookup="sparse" if is_sparse else "paged",
    )
    return list(kernels.mla_calls(variant, heads, range(1, max_q_len + 1), dcp_size))


def gqa_calls(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    query_dtype: torch.dtype,
    kv_dtype: torch.dtype | DType,
    max_q_len: int = 1,
    head_dim_vo: int = 0,
    has_soft_cap: bool = False,
    sparse_block: int = 0,
    has_output_gate: bool = False,
) -> list[tuple[GqaVariant, int]]:
    """Return the decode calls of layers of grouped-query attention, as :func:`mla_calls`.

    A cache in uint8 is NVFP4's; one with scales of tokens has the name of its format. Each query
    token of a sparse call is a sequence.
    """
    variant = GqaVariant(
        query_dtype=_DTYPES[query_dtype],
        kv_dtype=kv_dtype if isinstance(kv_dtype, DType) else _GQA_DTYPES[kv_dtype],
        out_dtype=_DTYPES[query_dtype],
        head_dim=head_dim,
        head_dim_vo=head_dim_vo,
        page_size=page_size,
        has_soft_cap=has_soft_cap,
        sparse_block=sparse_block,
        has_output_gate=has_output_gate,
    )
    return [(variant, heads // kv_heads * q_len) for q_len in range(1, max_q_len + 1)]


def warm_up(
    calls: Iterable[Calls], device: int, log: Callable[[str], object] = _logger.info
) -> None:
    """Compile and load the kernels that these calls may take on a GPU, then freeze if asked.

    ``MLAGEN_JIT=freeze`` makes later compilations of calls errors; a later warm-up, of another
    model of the process, may still compile. With ``MLAGEN_JIT=error`` or ``off`` only cached
    kernels are loaded. A kernel that cannot be had is a warning, as the server may not need it.
    ``log`` receives one line, which the server's own logger shows.
    """
    start = time.perf_counter()
    specs = _specs_of(calls, arch_of_device(device))
    progress = Progress(None, len(specs))
    progress.finished = {unit.spec: unit for unit in look_up_all(specs, is_dry=False)}
    mode, units = current_settings().jit, progress.finished
    missing = [unit for unit in units.values() if unit.status == "missing"]
    if missing and mode not in {"error", "off"}:
        build_all(missing, usable_jobs(), partial(build_unit, may_stay_in_memory=True), progress)
    loaded = 0
    for spec, unit in units.items():
        if unit.status in {"hit", "built"}:
            kernel_for(spec, device)
            loaded += 1
        else:
            problem = unit.error or f"not in the cache; {prewarm_advice(spec)}"
            _logger.warning("warm-up: %s: %s", spec, problem)
    if mode == "freeze":
        freeze()
    log(_line(loaded, list(units.values()), time.perf_counter() - start, mode))


def _specs_of(calls: Iterable[Calls], arch: Arch) -> list[KernelSpec]:
    specs: dict[KernelSpec, None] = {}
    for call in dict.fromkeys(calls):
        made = call_specs(arch, *call)
        if isinstance(made, UnsupportedError):
            _logger.warning("warm-up: %s", made)
        else:
            specs |= dict.fromkeys(made)
    has_mode = current_settings().batch_invariant
    return batch_invariant(specs) if has_mode else list(specs)


def _line(loaded: int, units: list[PrewarmUnit], seconds: float, mode: str) -> str:
    built = sum(unit.status == "built" for unit in units)
    missing = f", {len(units) - loaded} missing" if loaded < len(units) else ""
    frozen = "frozen" if mode in {"freeze", "error", "off"} else "not frozen"
    return (
        f"mlagen: warm-up of {seconds:.1f} s: {loaded} kernels loaded, {built} of them compiled"
        f"{missing}; {frozen}"
    )
