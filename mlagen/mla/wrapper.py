"""Planned MLA decode over a paged KV cache, with the signature of FlashInfer's BatchMLA wrapper."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.errors import ArgumentError, CaptureError, UnsupportedError
from mlagen.families.common.arguments import require, require_flag, shown
from mlagen.mla.batch_checks import checked_fp8_out, require_positive, saturated_into
from mlagen.mla.batch_op import call_planless, call_planned
from mlagen.mla.batch_planner import BatchPlanner
from mlagen.mla.batch_run import parts_of, run_planned
from mlagen.mla.planless import run_planless
from mlagen.observe.observed import observable
from mlagen.runtime.capture import is_capturing
from mlagen.torch_ops.traced import is_compiling, is_traced

_CAPTURE = (
    "use_cuda_graph: expected True with its four buffers while a CUDA graph is captured, "
    "since replays read metadata that the next plan frees, got False"
)

# Arguments that a run without a plan rejects.
_PLANNED = (
    *("return_lse", "lse", "profiler_buffer", "ckv_scale", "ckv_scale_arr", "kpe_scale", "sinks"),
    *("skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale"),
)


@observable
class BatchMLAPagedAttentionWrapper(BatchPlanner):
    """Multi-head latent attention over a paged KV cache, for requests of any lengths.

    :meth:`plan` sets the requests, and every :meth:`run` until the next plan computes them. Query
    token ``i`` of a request attends to the cached tokens ``0 .. kv_len - qo_len + i`` with
    ``causal``, else to all. A fully masked row gives zeros and an LSE of minus infinity. Tensors on
    the CPU use a slow PyTorch backend.

    Parameters
    ----------
    float_workspace_buffer : any dtype, contiguous
        Scratch of the runs, on their device; they use its end. No run needs more than 513 KiB for
        each SM of the GPU. It needs no initial value.
    use_cuda_graph : bool
        Whether a run can be captured. Plans copy metadata of the CSR form into the four buffers
        below, so that a captured run reads the requests of the latest plan; the length of
        ``kv_len_arr`` fixes the number of requests then. Block tables, their lengths and their
        query offsets are read where they are: change them in place between replays.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : int32 or uint32, on the device of the workspace
        The buffers, shaped as in :meth:`plan`, or none for plans of block tables; ``kv_indices``
        may be longer than any plan needs.
    backend : str
        FlashInfer's names, ``auto``, ``autotune``, ``fa2``, ``fa3``, ``cutlass``, ``cutile``,
        ``trtllm-gen``, ``xqa``, ``cute-dsl``, ``cute-dsl-modular``, ``cute-dsl-monolithic`` and
        ``cute-dsl-rubin-mtp``, are equivalent.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.

    Notes
    -----
    Signature of ``flashinfer.mla.BatchMLAPagedAttentionWrapper``.
    """

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned requests, or of ``kv_len`` and ``page_table``.

        Parameters
        ----------
        q_nope : [tokens, heads, head_dim_ckv]
            Latent part of the absorbed queries. Here and in the next three, strides may be any
            multiples of 16 bytes, except the last: slices of one tensor are supported.
        q_pe : [tokens, heads, head_dim_kpe]
            Rope part of the queries.
        ckv_cache : [pages, page_size, head_dim_ckv]
            Latent part of the cache, for keys and values.
        kpe_cache : [pages, page_size, head_dim_kpe]
            Rope part of the keys.
        out : as q_nope
            Written and returned, any strides; allocated if None.
        lse : fp32 [tokens, heads]
            Written if given, and returned if ``return_lse``, which allocates it if None.
        return_lse : bool
            Whether to return ``(out, lse)``: the logarithm of the softmax denominator.
        profiler_buffer : torch.Tensor
            None; there is no profiler.
        kv_len, page_table : int32 or uint32 [batch], [batch, max_pages]
            Lengths and block tables, read where they are, instead of those of the plan. Before the
            first plan: one query token per request, a softmax scale of ``192 ** -0.5``, head
            dimensions 512 and 64.
        return_lse_base_on_e : bool
            Whether the LSE is a natural logarithm; else to base 2.
        o_scale : float
            ``out``, e4m3 or e5m2, holds the results divided by it.
        query : [tokens, heads, head_dim_ckv + head_dim_kpe], or a pair
            The query in one tensor, or ``(q_nope, q_pe)``, instead of the first two arguments.
        kv_cache : [pages, page_size, head_dim_ckv + head_dim_kpe], or a pair
            The cache in one tensor, or ``(ckv_cache, kpe_cache)``.
        ckv_scale : float
            Scale of the latent elements of an e4m3 cache.
        ckv_scale_arr : fp32 [pages, page_size, 4]
            Scale of each 128 latent elements of each token. An e4m3 cache needs exactly one of the
            two.
        kpe_scale : float
            Scale of the rope elements of an e4m3 cache; required even if there are none.
        sinks : fp32, bf16 or fp16 [heads]
            Natural-domain logits, unscaled, added to the softmax denominator without a value.
        skip_softmax_threshold_scale_factor : float
            Ignored: no KV block is skipped, and the result is exact.
        bmm1_scale, bmm2_scale : float
            The whole factor of the scores, instead of ``sm_scale``, and that of the output.

        Returns
        -------
        torch.Tensor
            ``out``, or ``(out, lse)``.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule or differs from the plan, or if there is neither a plan nor
            ``kv_len`` and ``page_table``; no kernel is launched, and the outputs are unchanged.
        UnsupportedError
            If no kernel supports dtype or dimensions, or ``profiler_buffer`` is given.
        CaptureError
            During CUDA graph capture, if the kernel is not loaded yet, or there is a plan without
            ``use_cuda_graph``.
        """
        plan, workspace = self._plan, self._workspace
        if query is not None or kv_cache is not None:
            q_nope, q_pe = parts_of(query, "query", q_nope, q_pe)
            ckv_cache, kpe_cache = parts_of(kv_cache, "kv_cache", ckv_cache, kpe_cache)
        given: Any = (
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            out,
            lse,
            return_lse,
            return_lse_base_on_e,
            ckv_scale,
            ckv_scale_arr,
            kpe_scale,
            o_scale,
            sinks,
            skip_softmax_threshold_scale_factor,
            bmm1_scale,
            bmm2_scale,
        )
        is_plain = profiler_buffer is None and kv_len is None and page_table is None
        if plan is None or not is_plain or o_scale is not None or is_compiling() or is_traced():
            outputs = self._run_rare(given, profiler_buffer, kv_len, page_table)
        else:
            if not self._is_graph and is_capturing(workspace.device):
                raise CaptureError(_CAPTURE)
            outputs = run_planned(plan, workspace, *given)
        return (outputs[0], outputs[1]) if return_lse else outputs[0]

    def _run_rare(
        self, given: tuple[Any, ...], profiler_buffer: object, kv_len: Any, page_table: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of a traced run, or of one with rare arguments or without a plan."""
        plan, workspace = self._plan, self._workspace
        is_op = is_compiling() or is_traced() > 0
        *tensors, out, lse, return_lse, is_natural = given[:8]
        *kv_scales, o_scale, sinks = given[8:13]
        if plan is None and (
            self._backend == "cutlass" or (kv_len is not None and page_table is not None)
        ):
            require_flag(is_natural, "return_lse_base_on_e")
            unplanned = (require_flag(return_lse, "return_lse") or None, lse, profiler_buffer)
            rejected = (*unplanned, *kv_scales, sinks, *given[13:])
            result = (call_planless if is_op else run_planless)(
                workspace,
                *tensors,
                out=out,
                kv_len=kv_len,
                page_table=page_table,
                o_scale=o_scale,
                rejected=dict(zip(_PLANNED, rejected, strict=True)),
            )
            return (result,)
        if o_scale is not None and (plan is None or not plan.has_fp8_output):
            raise ArgumentError(
                "o_scale is only supported with the cutlass backend for now, or with output_scale "
                f"'per-tensor' of a plan, got {shown(o_scale)}"
            )
        if plan is None:
            raise ArgumentError("run: expected plan() to be called first, got no plan")
        if profiler_buffer is not None:
            raise UnsupportedError("profiler_buffer: not implemented, expected None, got a tensor")
        if kv_len is not None or page_table is not None:
            plan = plan.with_tables(kv_len, page_table)
        fp8_out = None
        if o_scale is not None:
            o_scale = require_positive(o_scale, "o_scale")
            width = plan.settings.head_dim_ckv
            fp8_out = checked_fp8_out(out, tensors[0], width, has_memory=not is_op)
            require(fp8_out.dtype is plan.out_dtype, "out.dtype", plan.out_dtype, fp8_out.dtype)
            given = (*given[:4], None, *given[5:11], o_scale, *given[12:])
        if not is_op and not self._is_graph and is_capturing(workspace.device):
            raise CaptureError(_CAPTURE)
        outputs = (call_planned if is_op else run_planned)(plan, workspace, *given)
        if fp8_out is None:
            return outputs
        return (saturated_into(fp8_out, outputs[0]), *outputs[1:])
