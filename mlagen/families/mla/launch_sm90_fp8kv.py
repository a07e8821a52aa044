"""Launcher of the sm90 MLA kernel for an FP8 KV cache, whose PV GEMM is in fp16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlagen.engine import kernel_for
from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.families.common.launchers import scale_of, scratch_offset
from mlagen.families.mla.args import LSE_FACTORS, MlaArgs
from mlagen.families.mla.plan_sm90 import MlaSm90Plan
from mlagen.families.mla.problem import MlaProblem, check_pointers
from mlagen.families.mla.select import schedule_id_of
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.semaphores import semaphores_of
from mlagen.spec.kernel import pack_scalars
from mlagen.spec.mla.sm90_fp8kv import MlaSm90Fp8KvSpec


@dataclass(frozen=True, kw_only=True)
class MlaSm90Fp8KvLauncher:
    """A validated call signature with a loaded kernel and a launch plan."""

    problem: MlaProblem
    plan: MlaSm90Plan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    packed_scalars: bytes  # the integer kernel parameters
    lse_factor: float

    def launch(
        self, args: MlaArgs, enable_pdl: bool, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> Sequence[Launch]:
        """Enqueue the kernel of one call with this signature."""
        problem, plan = self.problem, self.plan
        query = args.query.data_ptr()
        cache = args.kv_cache.data_ptr()
        workspace = args.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        query_rope = _pointer(args.query_rope) or query + problem.query_rope_offset
        rope_cache = _pointer(args.rope_cache) or cache + problem.rope_cache_offset
        all_pointers = query | query_rope | cache | rope_cache | workspace | out_pointer
        if all_pointers % ALIGNMENT_BYTES:
            check_pointers(args)
        cu_seqlens_q = _pointer(args.cum_seq_lens_q)
        bmm1_tensor, bmm1_scale = scale_of(args.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(args.bmm2_scale)
        decode_launch = launch(
            self.decode,
            plan.num_ctas,
            enable_pdl,
            query,
            query_rope,
            cache,
            rope_cache,
            _pointer(args.query_scales),
            _pointer(args.kv_scales),
            args.block_tables.data_ptr(),
            _pointer(args.kv_indptr),
            args.seq_lens.data_ptr(),
            0 if problem.top_k else cu_seqlens_q,
            cu_seqlens_q,
            _pointer(args.top_k_lens),
            bmm1_tensor,
            bmm2_tensor,
            _pointer(args.sinks),
            out_pointer,
            _pointer(lse),
            scratch,
            scratch + plan.partial_rows_offset,
            semaphores_of(self.decode.device, workspace),
            self.packed_scalars,
            bmm1_scale,
            bmm2_scale,
            args.latent_scale,
            args.rope_scale,
            self.lse_factor,
        )
        return (decode_launch,)


def make_fp8kv_launcher(
    args: MlaArgs, problem: MlaProblem, index: int, spec: MlaSm90Fp8KvSpec, plan: MlaSm90Plan
) -> MlaSm90Fp8KvLauncher:
    """Return the launcher of ``plan`` for the signature of ``args`` on GPU ``index``."""
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    return MlaSm90Fp8KvLauncher(
        problem=problem,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        packed_scalars=_packed_scalars(args, problem, spec, plan),
        lse_factor=LSE_FACTORS[args.return_lse_base],
    )


def _packed_scalars(
    args: MlaArgs, problem: MlaProblem, spec: MlaSm90Fp8KvSpec, plan: MlaSm90Plan
) -> bytes:
    # In a sparse call every query token is a sequence, and its table is its top-k indices.
    values = {
        **problem.strides,
        "total_rows": problem.tokens * problem.heads,
        "num_seqs": problem.tokens if problem.top_k else problem.batch,
        "heads": problem.heads,
        "q_len": 1 if problem.top_k else problem.q_len,
        "max_pages": problem.top_k or problem.max_pages,
        "num_pages": problem.num_pages,
        "sparse_num_seqs": problem.batch,
        "sparse_q_len": problem.q_len,
        "topk": problem.top_k,
        "num_cta_groups": plan.num_cta_groups,
        "cta_group_size": plan.cta_group_size,
        "is_causal": int(args.is_causal),
        "scores_take_bmm2": int(args.scores_take_bmm2),
        "schedule_id": schedule_id_of(args, problem, spec),
    }
    return pack_scalars(spec, values)


def _pointer(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0
