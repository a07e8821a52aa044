"""Launcher of the sm80 grouped-query kernel, which supports every signature on every GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlagen.engine import kernel_for
from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.families.common.launchers import (
    CombineLauncher,
    make_combine_launcher,
    scale_of,
    scratch_offset,
)
from mlagen.families.common.plan_sm80 import Sm80Plan
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.problem import GqaProblem
from mlagen.families.gqa.select import plan_gqa_sm80_call, shape_of
from mlagen.families.gqa.validate_kv import MASK_ALIGNMENT_BYTES, alignment_of, check_pointers
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import pack_constants


@dataclass(frozen=True, kw_only=True)
class GqaSm80Launcher:
    """A validated call signature with loaded kernels and a launch plan."""

    problem: GqaProblem
    plan: Sm80Plan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    combine: CombineLauncher | None
    packed_constants: bytes  # the constant kernel parameters
    cache_alignment: int  # bytes

    def launch(
        self, args: GqaArgs, enable_pdl: bool, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> Sequence[Launch]:
        """Enqueue the kernels of one call with this signature."""
        problem = self.problem
        query = args.query.data_ptr()
        key = args.key_cache.data_ptr()
        value = args.value_cache
        value_pointer = key + problem.value_offset if value is None else value.data_ptr()
        workspace = args.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        lse_pointer = lse.data_ptr() if lse is not None else 0
        mask = args.mask
        mask_pointer = mask.data_ptr() if mask is not None and problem.mask_words else 0
        if (
            (query | workspace | out_pointer) % ALIGNMENT_BYTES
            or (key | value_pointer) % self.cache_alignment
            or mask_pointer % MASK_ALIGNMENT_BYTES
        ):
            check_pointers(args)
        key_scales = value_scales = 0
        if args.key_scales is not None:
            key_scales = args.key_scales.data_ptr()
            value_scales = key_scales + problem.value_scale_offset
            if args.value_scales is not None:
                value_scales = args.value_scales.data_ptr()
        bmm1_tensor, bmm1_scale = scale_of(args.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(args.bmm2_scale) if problem.takes_bmm2 else (0, 1.0)
        is_e4m3 = problem.variant.out_dtype is DType.E4M3
        factor = args.out_e4m3_factor if is_e4m3 else args.out_16bit_factor
        sinks = args.sinks.data_ptr() if args.sinks is not None else 0
        combine = self.combine
        partial_lse = scratch if combine is None else scratch + combine.lse_offset
        decode_launch = launch(
            self.decode,
            self.plan.num_ctas,
            enable_pdl,
            query,
            key,
            value_pointer,
            key_scales,
            value_scales,
            args.block_tables.data_ptr(),
            args.seq_lens.data_ptr(),
            args.cum_seq_lens_q.data_ptr() if args.cum_seq_lens_q is not None else 0,
            args.kv_indptr.data_ptr() if args.kv_indptr is not None else 0,
            mask_pointer,
            bmm1_tensor,
            bmm2_tensor,
            sinks,
            out_pointer,
            lse_pointer,
            scratch,
            partial_lse,
            self.packed_constants,
            bmm1_scale,
            bmm2_scale,
            factor,
        )
        if combine is None:
            return (decode_launch,)
        combine_launch = combine.launch(
            enable_pdl,
            scratch,
            bmm2_tensor,
            sinks,
            out_pointer,
            lse_pointer,
            bmm2_scale,
            factor,
            problem.lse_factor,
        )
        return decode_launch, combine_launch


def make_sm80_launcher(
    args: GqaArgs, problem: GqaProblem, index: int, sms: int = WHOLE_GPU
) -> GqaSm80Launcher:
    """Return the launcher for the signature of ``args`` on ``sms`` SMs of GPU ``index``."""
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    shape = shape_of(args, problem)
    spec, plan = plan_gqa_sm80_call(index, problem.variant, shape, sms=sms)
    if plan.workspace_bytes > workspace.nbytes:  # one for the whole GPU must suffice
        spec, plan = plan_gqa_sm80_call(index, problem.variant, shape)
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    combine_spec = CombineSpec(
        arch=spec.arch, dtype=spec.variant.out_dtype, head_dim_vo=spec.variant.head_dim
    )
    return GqaSm80Launcher(
        problem=problem,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        combine=make_combine_launcher(
            combine_spec, plan, tokens=problem.tokens, heads=problem.heads, device=index
        ),
        packed_constants=pack_constants(
            spec,
            {
                **problem.constants,
                "total_rows": problem.tokens * problem.heads,
                "row_tiles": plan.row_tiles,
                "num_splits": plan.splits,
            },
        ),
        cache_alignment=alignment_of(args.key_cache),
    )
