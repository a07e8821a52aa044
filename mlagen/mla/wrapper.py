"""Planned MLA decode over a paged KV cache, with the signature of FlashInfer's BatchMLA wrapper."""

from __future__ import annotations

from dataclasses import replace

import torch

from mlagen.errors import ArgumentError, CaptureError, UnsupportedError
from mlagen.families.common.arguments import (
    reject,
    require_choice,
    require_flag,
    require_tensor,
    shown,
)
from mlagen.mla.batch_op import call_planless, call_planned
from mlagen.mla.batch_plan import (
    BatchLayout,
    BatchPlan,
    BatchSettings,
    checked_buffers,
    checked_layout,
    copy_into,
    copy_to_device,
    host_metadata,
    mean_capacity,
)
from mlagen.mla.batch_run import run_planned
from mlagen.mla.planless import run_planless
from mlagen.observe.observed import observable
from mlagen.runtime.capture import is_capturing
from mlagen.torch_ops.traced import is_compiling, is_traced

_PLANNED_BACKENDS = ("auto", "fa2", "fa3")
_BACKENDS = (*_PLANNED_BACKENDS, "cutlass")

_CAPTURE = (
    "use_cuda_graph: expected True with its four buffers while a CUDA graph is captured, "
    "since replays read metadata that the next plan frees, got False"
)


@observable
class BatchMLAPagedAttentionWrapper:
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
        Whether plans copy their metadata into the four buffers below, so that a captured run reads
        the requests of the latest plan. The length of ``kv_len_arr`` fixes the number of requests
        then. Without it a planned run cannot be captured.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : int32 or uint32, on the device of the workspace
        The buffers, shaped as in :meth:`plan`; ``kv_indices`` may be longer than any plan needs.
    backend : str
        ``auto``, ``fa2`` and ``fa3`` are equivalent; ``cutlass`` runs without plans.

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
        self._backend = require_choice(backend, "backend", _BACKENDS)
        self._workspace = require_tensor(float_workspace_buffer, "float_workspace_buffer")
        self._plan: BatchPlan | None = None
        self._buffers: BatchLayout | None = None
        if require_flag(use_cuda_graph, "use_cuda_graph") and self._backend != "cutlass":
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
        """Set the requests of the following runs.

        The metadata is copied, from the CPU or from the device of the workspace, without
        synchronization. Metadata on the CPU is checked here; metadata on the device is trusted, or
        checked by the runs with ``MLAGEN_CHECK=1``. Split-KV scheduling uses the lengths on the
        CPU. Without them it assumes that requests share ``kv_indices`` equally, and also for CUDA
        graphs if that is longer, as a graph keeps the splits of its capture. The splits affect
        results by rounding only.

        Parameters
        ----------
        qo_indptr : int32 or uint32 [batch + 1], or longer
            Offsets of the requests' query tokens; further elements are ignored, as in
            ``kv_indptr``.
        kv_indptr : int32 or uint32 [batch + 1], or longer
            Offsets of the requests' page ids in ``kv_indices``.
        kv_indices : int32 or uint32 [at least kv_indptr[-1]]
            Page ids. The result of a request with an id out of range is unspecified.
        kv_len_arr : int32 or uint32 [batch]
            Tokens in the cache, including the new ones. Its length is the number of requests.
        num_heads : int
            1 to 256.
        head_dim_ckv, head_dim_kpe : int
            Latent and rope elements of a token: (512, 64), (256, 64) or (512, 0); for e4m3 caches
            the first or the last.
        page_size : int
            Tokens per page, any number.
        causal : bool
            Whether the tokens after a query token are masked.
        sm_scale : float
            Multiplies the scores before softmax; no other factor applies. Natural domain.
        q_data_type : torch.dtype
            bf16, or fp16 if the cache is.
        kv_data_type : torch.dtype
            ``q_data_type`` or e4m3.
        use_profiler : bool
            False; there is none.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule; the previous plan stays valid then.
        UnsupportedError
            If no kernel supports the head dimensions, or with ``use_profiler``.
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
        metadata = host_metadata(given, settings.page_size)
        if self._buffers is None:
            layout = copy_to_device(given, device)
        else:
            layout = self._buffers
            copy_into(layout, given)
            # Replays of a captured graph have other requests.
            capacity = mean_capacity(layout, settings.page_size)
            metadata = replace(metadata, max_kv_len=max(metadata.max_kv_len, capacity), q_len=0)
        self._plan = BatchPlan(settings=settings, layout=layout, metadata=metadata)

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
            Lengths and block tables without a plan, as with the backend ``cutlass``: one query
            token per request, a softmax scale of ``192 ** -0.5``, head dimensions 512 and 64.
        return_lse_base_on_e : bool
            Whether the LSE is a natural logarithm; else to base 2.
        o_scale : float
            Without a plan only: ``out``, e4m3 or e5m2, holds the results divided by it.
        ckv_scale : float
            Scale of the latent elements of an e4m3 cache.
        ckv_scale_arr : fp32 [pages, page_size, 4]
            Scale of each 128 latent elements of each token. An e4m3 cache needs exactly one of the
            two.
        kpe_scale : float
            Scale of the rope elements of an e4m3 cache; required even if there are none.

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
        tensors = (q_nope, q_pe, ckv_cache, kpe_cache)
        scales = (ckv_scale, ckv_scale_arr, kpe_scale)
        is_op = is_compiling() or is_traced() > 0
        if self._backend == "cutlass" or (
            plan is None and kv_len is not None and page_table is not None
        ):
            names = ("return_lse", "lse", "profiler_buffer", "ckv_scale", "ckv_scale_arr")
            return_lse = require_flag(return_lse, "return_lse")
            require_flag(return_lse_base_on_e, "return_lse_base_on_e")
            unplanned = (return_lse or None, lse, profiler_buffer, *scales)
            return (call_planless if is_op else run_planless)(
                workspace,
                *tensors,
                out=out,
                kv_len=kv_len,
                page_table=page_table,
                o_scale=o_scale,
                rejected=dict(zip((*names, "kpe_scale"), unplanned, strict=True)),
            )
        if o_scale is not None:
            raise ArgumentError(
                f"o_scale is only supported with the cutlass backend for now, got {shown(o_scale)}"
            )
        if plan is None:
            raise ArgumentError("run: expected plan() to be called first, got no plan")
        if profiler_buffer is not None:
            raise UnsupportedError("profiler_buffer: not implemented, expected None, got a tensor")
        flags = (return_lse, return_lse_base_on_e)
        if is_op:
            outputs = call_planned(workspace, plan, *tensors, out, lse, *flags, *scales)
        else:
            if self._buffers is None and is_capturing(workspace.device):
                raise CaptureError(_CAPTURE)
            given = (plan, workspace, *tensors, out, lse, *flags, *scales)
            outputs = run_planned(*given)
        return (outputs[0], outputs[1]) if return_lse else outputs[0]
