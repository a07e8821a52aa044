"""Launcher of the sm80 MLA kernel, which supports every signature on every GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.engine import kernel_for
from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.families.common.launchers import (
    CombineLauncher,
    make_combine_launcher,
    scale_of,
    scratch_offset,
)
from mlagen.families.common.outputs import LSE_FACTORS
from mlagen.families.common.plan_sm80 import Sm80Plan
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.problem import MlaProblem, check_pointers
from mlagen.families.mla.select import plan_mla_sm80_call, shape_of
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.spec.combine import CombineSpec
from mlagen.spec.kernel import pack_constants
from mlagen.spec.mla.sm80 import MlaSm80Spec


@dataclass(frozen=True, kw_only=True)
class MlaSm80Launcher:
    """A validated call signature with loaded kernels and a launch plan."""

    problem: MlaProblem
    plan: Sm80Plan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    combine: CombineLauncher | None
    packed_constants: bytes  # the constant kernel parameters
    is_plain: bool  # no argument of :class:`_RarePointers` is used

    def launch(
        self, args: MlaArgs, enable_pdl: bool, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> Sequence[Launch]:
        """Enqueue the kernels of one call with this signature."""
        problem = self.problem
        query = args.query.data_ptr()
        cache = args.kv_cache.data_ptr()
        tables = args.block_tables.data_ptr()
        workspace = args.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        query_rope = query + problem.query_rope_offset
        rope_cache = cache + problem.rope_cache_offset
        if self.is_plain:
            rare = _RarePointers(query_rope, rope_cache)
        else:
            rare = _rare_pointers(
                args,
                query_rope=query_rope,
                rope_cache=rope_cache,
                value_tables=tables + problem.value_tables_offset,
            )
        query_rope, rope_cache, query_scales, value_cache, kv_scales = rare[:5]
        all_pointers = (
            query | query_rope | cache | rope_cache | value_cache | workspace | out_pointer
        )
        if all_pointers % ALIGNMENT_BYTES:
            check_pointers(args)
        bmm1_tensor, bmm1_scale = scale_of(args.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(args.bmm2_scale)
        sinks = args.sinks.data_ptr() if args.sinks is not None else 0
        lse_pointer = lse.data_ptr() if lse is not None else 0
        lse_factor = LSE_FACTORS[args.return_lse_base]
        combine = self.combine
        partial_lse = scratch if combine is None else scratch + combine.lse_offset
        decode_launch = launch(
            self.decode,
            self.plan.num_ctas,
            enable_pdl,
            query,
            query_rope,
            query_scales,
            cache,
            rope_cache,
            value_cache,
            kv_scales,
            tables,
            rare.value_tables,
            rare.kv_indptr,
            args.seq_lens.data_ptr(),
            args.cum_seq_lens_q.data_ptr() if args.cum_seq_lens_q is not None else 0,
            rare.top_k_lens,
            rare.bias,
            bmm1_tensor,
            bmm2_tensor,
            sinks,
            out_pointer,
            lse_pointer,
            scratch,
            partial_lse,
            *_dcp_pointers(args),
            self.packed_constants,
            bmm1_scale,
            bmm2_scale,
            args.latent_scale,
            args.rope_scale,
            lse_factor,
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
            1.0,
            lse_factor,
        )
        return decode_launch, combine_launch


class _RarePointers(NamedTuple):
    """Base addresses of rarely used arguments, 0 where unused."""

    query_rope: int
    rope_cache: int
    query_scales: int = 0
    value_cache: int = 0
    kv_scales: int = 0
    value_tables: int = 0
    kv_indptr: int = 0
    top_k_lens: int = 0
    bias: int = 0


def make_sm80_launcher(
    args: MlaArgs, problem: MlaProblem, index: int, sms: int = WHOLE_GPU
) -> MlaSm80Launcher:
    """Return the launcher for the signature of ``args`` on ``sms`` SMs of GPU ``index``."""
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    shape = shape_of(args, problem)
    spec, plan = plan_mla_sm80_call(index, problem.variant, shape, sms=sms)
    if plan.workspace_bytes > workspace.nbytes:  # one for the whole GPU must suffice
        spec, plan = plan_mla_sm80_call(index, problem.variant, shape)
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    combine_spec = CombineSpec(arch=spec.arch, dtype=spec.out_dtype, head_dim_vo=spec.head_dim_vo)
    return MlaSm80Launcher(
        problem=problem,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        combine=make_combine_launcher(
            combine_spec, plan, tokens=problem.tokens, heads=problem.heads, device=index
        ),
        packed_constants=_packed_constants(args, problem, spec, plan),
        is_plain=_is_plain(args),
    )


def _is_plain(args: MlaArgs) -> bool:
    rare = _rare_pointers(args, query_rope=0, rope_cache=0, value_tables=0)
    return not any(rare)


def _packed_constants(
    args: MlaArgs, problem: MlaProblem, spec: MlaSm80Spec, plan: Sm80Plan
) -> bytes:
    values = {
        **problem.strides,
        "total_rows": problem.tokens * problem.heads,
        "num_seqs": problem.batch,
        "heads": problem.heads,
        "q_len": problem.q_len,
        "max_pages": problem.max_pages,
        "num_pages": problem.num_pages,
        "row_tiles": plan.row_tiles,
        "num_splits": plan.splits,
        "topk": problem.top_k,
        "is_causal": int(args.is_causal),
        "cp_world": args.cp_world,
        "cp_rank": args.cp_rank,
        "bmm2_scales_scores": int(args.bmm2_scales_scores),
    }
    return pack_constants(spec, values)


def _rare_pointers(
    args: MlaArgs, *, query_rope: int, rope_cache: int, value_tables: int
) -> _RarePointers:
    """Return the addresses; the three parameters are defaults for parts without a tensor."""
    value_cache = _pointer(args.value_cache)
    return _RarePointers(
        query_rope=_pointer(args.query_rope) or query_rope,
        rope_cache=_pointer(args.rope_cache) or rope_cache,
        query_scales=_pointer(args.query_scales),
        value_cache=value_cache,
        kv_scales=_pointer(args.kv_scales),
        value_tables=value_tables if value_cache else 0,
        kv_indptr=_pointer(args.kv_indptr),
        top_k_lens=_pointer(args.top_k_lens),
        bias=_pointer(args.bias),
    )


def _dcp_pointers(args: MlaArgs) -> tuple[int, ...]:
    """Return the parameter that only kernels of context parallel have."""
    lengths = args.causal_seqlens_kv_global
    return () if lengths is None else (lengths.data_ptr(),)


def _pointer(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0
