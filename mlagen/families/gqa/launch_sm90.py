"""Launcher of the sm90 grouped-query kernel: one persistent kernel for any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mlagen.engine import kernel_for
from mlagen.errors import DriverError, UnsupportedError
from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.families.common.choice_log import decline
from mlagen.families.common.launchers import scale_of, scratch_offset
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.plan_sm90 import GqaSm90Plan, fits_in_int32
from mlagen.families.gqa.problem import MAX_TOKENS, GqaProblem
from mlagen.families.gqa.select import plan_gqa_sm90_call, shape_of
from mlagen.families.gqa.tensor_maps import GqaCacheMaps, GqaTensorMapLayout, maps_of
from mlagen.families.gqa.validate_kv import MASK_ALIGNMENT_BYTES, check_pointers
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.runtime.semaphores import semaphores_of
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.variant import HEAD_DIMS, GqaVariant
from mlagen.spec.kernel import pack_constants

_COVERED = (
    f"covered: sm_90a, cache as the query or e4m3, head_dim {', '.join(map(str, HEAD_DIMS))}, "
    f"page_size a multiple of 16, strides of the cache below 2^40 bytes"
)

_AXES = ("page", "token", "head")


@dataclass(frozen=True, kw_only=True)
class GqaSm90Launcher:
    """A validated call signature with a loaded kernel and a launch plan."""

    problem: GqaProblem
    plan: GqaSm90Plan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    maps: GqaCacheMaps
    packed_constants: bytes  # the constant kernel parameters

    def launch(
        self, args: GqaArgs, enable_pdl: bool, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> Sequence[Launch]:
        """Enqueue the kernel of one call with this signature."""
        problem, plan = self.problem, self.plan
        query = args.query.data_ptr()
        base_addresses = _base_addresses(args, problem)
        workspace = args.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        lse_pointer = lse.data_ptr() if lse is not None else 0
        mask = args.mask
        mask_pointer = mask.data_ptr() if mask is not None and problem.mask_words else 0
        all_pointers = query | base_addresses[0] | base_addresses[1] | workspace | out_pointer
        if all_pointers % ALIGNMENT_BYTES or mask_pointer % MASK_ALIGNMENT_BYTES:
            check_pointers(args)
        bmm1_tensor, bmm1_scale = scale_of(args.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(args.bmm2_scale) if problem.takes_bmm2 else (0, 1.0)
        is_e4m3 = problem.variant.out_dtype is DType.E4M3
        decode_launch = launch(
            self.decode,
            plan.num_ctas,
            enable_pdl,
            self.maps[base_addresses],
            query,
            base_addresses[1],
            args.block_tables.data_ptr(),
            args.seq_lens.data_ptr(),
            args.cum_seq_lens_q.data_ptr() if args.cum_seq_lens_q is not None else 0,
            args.kv_indptr.data_ptr() if args.kv_indptr is not None else 0,
            mask_pointer,
            bmm1_tensor,
            bmm2_tensor,
            args.sinks.data_ptr() if args.sinks is not None else 0,
            out_pointer,
            lse_pointer,
            scratch,
            scratch + plan.partial_rows_offset,
            semaphores_of(self.decode.device, workspace),
            self.packed_constants,
            bmm1_scale,
            bmm2_scale,
            args.out_e4m3_factor if is_e4m3 else args.out_16bit_factor,
        )
        return (decode_launch,)


def make_sm90_launcher(
    args: GqaArgs, problem: GqaProblem, index: int, sms: int = WHOLE_GPU, *, is_forced: bool
) -> GqaSm90Launcher | None:
    """Return the launcher for the signature of ``args`` on ``sms`` SMs of GPU ``index``.

    None if the kernel does not support it, or the driver rejects the tensor map of the cache.

    Raises
    ------
    UnsupportedError
        Instead of returning None, if the settings force the kernel.
    """
    shape = shape_of(args, problem)
    plan_on = partial(plan_gqa_sm90_call, index, problem.variant, shape, sms=sms)
    planned = plan_on()
    if planned is None:
        decline(lambda: not_covered(index, problem.variant), is_forced=is_forced)
        return None
    max_tokens = problem.max_pages * problem.variant.page_size
    if not fits_in_int32(*planned, max_tokens):  # KV tiles of one head have more tokens
        planned = plan_on(has_one_head=True) or planned
    spec, plan = planned
    if sms != WHOLE_GPU and plan.workspace_bytes > args.workspace_buffer.nbytes:
        # A workspace sized for the whole GPU must suffice.
        return make_sm90_launcher(args, problem, index, is_forced=is_forced)
    if not fits_in_int32(spec, plan, max_tokens):
        too_long = UnsupportedError(
            f"MLAGEN_GQA_KERNEL=sm90: expected fewer than 2^31 KV blocks of {spec.block_n} "
            f"tokens in all work tiles, got {plan.total_tiles} of up to {max_tokens} tokens"
        )
        decline(lambda: too_long, is_forced=is_forced)
        return None
    maps = maps_of(
        GqaTensorMapLayout(
            spec=spec,
            num_pages=problem.num_pages,
            kv_heads=problem.kv_heads,
            key_strides=_cache_strides(problem, "key"),
            value_strides=_cache_strides(problem, "value"),
        )
    )
    try:
        _ = maps[_base_addresses(args, problem)]
    except DriverError as error:
        no_map = UnsupportedError(f"MLAGEN_GQA_KERNEL=sm90: {error}; {_COVERED}")
        decline(lambda: no_map, is_forced=is_forced)
        return None
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    return GqaSm90Launcher(
        problem=problem,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        maps=maps,
        packed_constants=pack_constants(
            spec,
            {**problem.constants, **vars(plan), "max_tokens": min(max_tokens, MAX_TOKENS)},
        ),
    )


def not_covered(index: int, variant: GqaVariant) -> UnsupportedError:
    """Return the error where the settings force the kernel and it does not support the call."""
    return UnsupportedError(
        f"MLAGEN_GQA_KERNEL=sm90: no such kernel for {arch_of_device(index)}, "
        f"query {variant.query_dtype}, cache {variant.kv_dtype}, head_dim {variant.head_dim}, "
        f"page_size {variant.page_size}; {_COVERED}"
    )


def _base_addresses(args: GqaArgs, problem: GqaProblem) -> tuple[int, int]:
    """Return the base addresses of keys and values."""
    key = args.key_cache.data_ptr()
    if args.value_cache is None:
        return key, key + problem.value_offset
    return key, args.value_cache.data_ptr()


def _cache_strides(problem: GqaProblem, part: str) -> tuple[int, int, int]:
    """Return the bytes between pages, tokens and heads of keys or values."""
    page, token, head = (problem.strides[f"{part}_{axis}_stride"] for axis in _AXES)
    return page, token, head
