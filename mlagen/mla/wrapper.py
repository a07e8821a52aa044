"""Planned MLA attention over a paged cache, by the signature of FlashInfer's BatchMLA wrapper."""

from __future__ import annotations

import torch

from mlagen.api.arguments import reject, require_choice, require_flag, require_tensor, shown
from mlagen.api.traced import is_compiling, is_traced
from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.mla.batch_op import call_planless, call_planned
from mlagen.mla.batch_plan import (
    BatchLayout,
    BatchPlan,
    BatchSettings,
    HostFacts,
    checked_buffers,
    checked_layout,
    copied,
    copy_into,
    host_facts,
    mean_capacity,
)
from mlagen.mla.batch_run import reject_capture, run_planned
from mlagen.mla.planless import run_planless

_PLANNED_BACKENDS = ("auto", "fa2", "fa3")
_BACKENDS = (*_PLANNED_BACKENDS, "cutlass")


class BatchMLAPagedAttentionWrapper:
    """Multi-head latent attention over a paged cache, for requests of any lengths.

    :meth:`plan` takes the requests, :meth:`run` computes; every run until the next plan is of the
    requests of the last one. Query token ``i`` of a request sees the cached tokens ``0 .. kv_len -
    qo_len + i`` with ``causal``, else all; a row that sees nothing gives zeros and an LSE of minus
    infinity. Tensors on the CPU are computed by a slow backend in plain torch.

    Parameters
    ----------
    float_workspace_buffer : any dtype, contiguous
        Scratch of the runs, on their device, which use its end. No run needs more than 513 KiB for
        each SM of the GPU; it needs no initial value.
    use_cuda_graph : bool
        Whether plans are copied into the four buffers that follow, so that a captured run reads
        the requests of the latest plan. The number of requests is the one of ``kv_len_arr`` then.
        Without it a planned run cannot be captured.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : int32 or uint32, on the device of the workspace
        The buffers, shaped as in :meth:`plan`; ``kv_indices`` may be longer than any plan needs.
    backend : str
        ``auto``, ``fa2`` and ``fa3`` are names of the same semantics; ``cutlass`` is without plans.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.

    Notes
    -----
    Signature of ``flashinfer.mla.BatchMLAPagedAttentionWrapper``.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        backend = require_choice(backend, "backend", _BACKENDS)
        self._workspace = require_tensor(float_workspace_buffer, "float_workspace_buffer")
        self._backend = backend
        self._plan: BatchPlan | None = None
        self._buffers: BatchLayout | None = None
        if require_flag(use_cuda_graph, "use_cuda_graph") and backend != "cutlass":
            buffers = BatchLayout(
                qo_indptr=require_tensor(qo_indptr, "qo_indptr"),
                kv_indptr=require_tensor(kv_indptr, "kv_indptr"),
                kv_indices=require_tensor(kv_indices, "kv_indices"),
                kv_len_arr=require_tensor(kv_len_arr, "kv_len_arr"),
            )
            self._buffers = checked_buffers(buffers, self._workspace.device)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Take the requests of the runs that follow.

        The metadata is copied, and may be on the CPU or on the device of the workspace. Nothing
        waits for the device: what is on the CPU is checked here, what is not is trusted, unless
        ``MLAGEN_CHECK=1`` has the runs check it. Metadata on the CPU also says how long requests
        are, by which work is split. Without it they are taken to share ``kv_indices`` equally, and
        so they are for CUDA graphs if that is longer, since a graph keeps the split it was captured
        with; results do not depend on it but by rounding.

        Parameters
        ----------
        qo_indptr : int32 or uint32 [batch + 1], or longer
            Where the query tokens of each request begin; what follows is not looked at, here and in
            ``kv_indptr``.
        kv_indptr : int32 or uint32 [batch + 1], or longer
            Where the page ids of each request begin in ``kv_indices``.
        kv_indices : int32 or uint32 [at least kv_indptr[-1]]
            Page ids. What a request gives of which an id is no page is not specified.
        kv_len_arr : int32 or uint32 [batch]
            Tokens in the cache, the new ones included. Its length is the number of requests.
        num_heads : int
            1 to 256.
        head_dim_ckv, head_dim_kpe : int
            Latent and rope elements of a token: (512, 64), (256, 64) or (512, 0); of e4m3 caches
            the first or the last.
        page_size : int
            Tokens of a page, any number.
        causal : bool
            Whether a query token is hidden the tokens after it.
        sm_scale : float
            Multiplies the scores before softmax, whole. Natural domain.
        q_data_type : torch.dtype
            bf16, or fp16 if the cache is.
        kv_data_type : torch.dtype
            ``q_data_type`` or e4m3.
        use_profiler : bool
            False; there is none.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule; the plan before is kept then.
        UnsupportedError
            If no kernel covers the head dimensions, or a profiler is asked for.
        """
        if self._backend == "cutlass":
            reject("backend", f"one of {', '.join(_PLANNED_BACKENDS)} to plan for", "'cutlass'")
        settings = BatchSettings(
            num_heads=num_heads,
            head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe,
            page_size=page_size,
            causal=causal,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
        if require_flag(use_profiler, "use_profiler"):
            raise UnsupportedError(
                "use_profiler: Profiler is enabled, but not implemented, expected False, got True"
            )
        given = BatchLayout(
            qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr
        )
        device = self._workspace.device
        given = checked_layout(given, device)
        page_size = settings.page_size
        facts = host_facts(given, page_size)
        if self._buffers is None:
            layout = copied(given, device)
        else:
            layout = self._buffers
            copy_into(layout, given)
            # A graph that is captured now will be replayed with other requests.
            max_kv_len = max(facts.max_kv_len, mean_capacity(layout, page_size))
            facts = HostFacts(max_kv_len=max_kv_len, max_q_len=facts.max_q_len, tokens=facts.tokens)
        self._plan = BatchPlan(settings=settings, layout=layout, facts=facts)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned requests, or of ``kv_len`` and ``page_table``.

        Parameters
        ----------
        q_nope : [tokens, heads, head_dim_ckv]
            Absorbed queries, latent part. Strides of tokens and heads are honoured, here and in
            the three that follow, if they are whole 16 bytes: slices of one tensor will do.
        q_pe : [tokens, heads, head_dim_kpe]
            Their rope part.
        ckv_cache : [pages, page_size, head_dim_ckv]
            The latent part of the cache, keys and values alike.
        kpe_cache : [pages, page_size, head_dim_kpe]
            The rope part of the keys.
        out : as q_nope
            Written and returned, any strides; made if None.
        lse : fp32 [tokens, heads]
            Written if given, and returned if ``return_lse``; made then if None.
        return_lse : bool
            Whether to return ``(out, lse)``: the logarithm of the softmax denominator.
        profiler_buffer : torch.Tensor
            None; there is no profiler.
        kv_len, page_table : int32 or uint32 [batch], [batch, max_pages]
            Lengths and pages without a plan, as with the backend ``cutlass``: one query token a
            request, a softmax scale of ``192 ** -0.5``, head dimensions 512 and 64.
        return_lse_base_on_e : bool
            Whether the LSE is a natural logarithm; else one to base 2.
        o_scale : float
            Without a plan only: ``out``, e4m3 or e5m2, holds results divided by it.
        ckv_scale : float
            What the latent elements of an e4m3 cache are multiplied by.
        ckv_scale_arr : fp32 [pages, page_size, 4]
            The same for every 128 elements of each token; exactly one of the two is needed.
        kpe_scale : float
            What the rope elements of an e4m3 cache are multiplied by; needed without any too.

        Returns
        -------
        torch.Tensor
            ``out``, or ``(out, lse)``.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule or is not as planned, or if there is neither a plan nor
            ``kv_len`` and ``page_table``; nothing has been launched or written then.
        UnsupportedError
            If no kernel covers dtype or dimensions, or ``profiler_buffer`` is given.
        CaptureError
            If a CUDA graph is being captured and the kernel is not loaded yet, or there is a plan
            and no ``use_cuda_graph``.
        """
        return_lse = require_flag(return_lse, "return_lse")
        is_natural = require_flag(return_lse_base_on_e, "return_lse_base_on_e")
        lse_base = "basee" if is_natural else "base2"
        plan, tensors = self._plan, (q_nope, q_pe, ckv_cache, kpe_cache)
        is_planless = kv_len is not None and page_table is not None
        is_op = is_compiling() or is_traced() > 0
        if self._backend == "cutlass" or (plan is None and is_planless):
            rejected = {
                "return_lse": return_lse or None,
                "lse": lse,
                "profiler_buffer": profiler_buffer,
                "ckv_scale": ckv_scale,
                "ckv_scale_arr": ckv_scale_arr,
                "kpe_scale": kpe_scale,
            }
            return (call_planless if is_op else run_planless)(
                self._workspace,
                *tensors,
                out=out,
                kv_len=kv_len,
                page_table=page_table,
                o_scale=o_scale,
                rejected=rejected,
            )
        if o_scale is not None:
            raise ArgumentError(
                f"o_scale is only supported with the cutlass backend for now, got {shown(o_scale)}"
            )
        if plan is None:
            raise ArgumentError("run: expected plan() to be called first, got no plan")
        if profiler_buffer is not None:
            raise UnsupportedError("profiler_buffer: not implemented, expected None, got a tensor")
        if self._buffers is None and not is_op:
            reject_capture(self._workspace.device)
        result, result_lse = (call_planned if is_op else run_planned)(
            self._workspace,
            plan,
            *tensors,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            ckv_scale=ckv_scale,
            ckv_scale_arr=ckv_scale_arr,
            kpe_scale=kpe_scale,
        )
        return (result, result_lse) if return_lse and result_lse is not None else result
