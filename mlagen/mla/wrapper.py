"""Planned MLA decode over a paged KV cache, with the signature of FlashInfer's BatchMLA wrapper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mlagen.errors import ArgumentError, CaptureError, UnsupportedError
from mlagen.families.common.arguments import (
    chooses_batch_invariant,
    is_pdl_enabled,
    require,
    require_choice,
    require_flag,
    require_tensor,
    shown,
)
from mlagen.mla.contract import MLAInputContract, MLAPlanMetadata, given_metadata
from mlagen.mla.plan import MlaSettings, plan_of, planless, with_tables
from mlagen.mla.run import (
    OP,
    MlaRun,
    checked_fp8_out,
    parts_of,
    require_positive,
    run_planned,
    saturated_into,
)
from mlagen.observe.observed import observable
from mlagen.planned.metadata import Requests, checked_buffers
from mlagen.planned.plan import NO_CAPTURE, Plan
from mlagen.runtime.capture import is_capturing
from mlagen.torch_ops.traced import is_compiling, is_traced

_BACKENDS = (
    *("auto", "autotune", "fa2", "fa3", "cutlass", "cutile", "trtllm-gen", "xqa"),
    *("cute-dsl", "cute-dsl-modular", "cute-dsl-monolithic", "cute-dsl-rubin-mtp"),
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
        self._plan: Plan[MlaSettings] | None = None
        self._buffers: Requests | None = None
        self._is_graph = require_flag(use_cuda_graph, "use_cuda_graph")
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if self._is_graph and any(buffer is not None for buffer in given):
            buffers = Requests(
                qo_indptr=require_tensor(qo_indptr, "qo_indptr"),
                kv_indptr=require_tensor(kv_indptr, "kv_indptr"),
                kv_indices=require_tensor(kv_indices, "kv_indices"),
                kv_len_arr=require_tensor(kv_len_arr, "kv_len_arr"),
            )
            self._buffers = checked_buffers(buffers, self._workspace.device)

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
        batch_invariant: bool | None = None,
    ) -> None:
        """Set the requests of the following runs, and what the runs may ask for.

        The metadata is one of two forms, in ``metadata`` or by name: flat page ids (CSR), or block
        tables (dense). It is copied, from the CPU or from the device of the workspace, without
        synchronization. Metadata on the CPU is checked here; metadata on the device is trusted, or
        checked by the runs with ``MLAGEN_CHECK=1``. Split-KV scheduling uses the lengths on the
        CPU. Without them it assumes that requests share the page ids equally, and also for CUDA
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
            1 to 256. It and the next seven are required.
        head_dim_ckv, head_dim_kpe : int
            Latent and rope elements of a token: (512, 64), (256, 64) or (512, 0); for e4m3 caches
            under a bf16 query the first or the last.
        page_size : int
            Tokens per page, any number.
        causal : bool
            Whether the tokens after a query token are masked.
        sm_scale : float
            Multiplies the scores before softmax; no other factor applies. Natural domain.
        q_data_type : torch.dtype
            bf16, fp16 if the cache is, or e4m3 if the cache is.
        kv_data_type : torch.dtype
            ``q_data_type``, or e4m3 under a bf16 query.
        use_profiler : bool
            False; there is none.
        metadata : MLAPlanMetadata
            The metadata as one object, of the CSR form, the dense form, or both.
        cum_seq_lens_q, block_tables, seq_lens : int32 or uint32
            The dense form, as :class:`MLAPlanMetadata` has it, instead of the first four.
        max_q_len : int
            The most query tokens of a request, a scheduling hint of the dense form.
        query_layout, kv_cache_layout : str
            ``packed`` or ``split``; ignored: a run may pass either.
        lse_mode : str
            ``none``, ``base2`` or ``basee``: the LSE that each run asks for. With metadata by name
            ``none`` leaves it to the runs.
        output_dtype : torch.dtype
            None, the dtype of the query, or bf16 for an e4m3 one; e4m3 or e5m2 with
            ``output_scale``.
        output_scale : str
            ``none``, or ``per-tensor``: each run has an ``o_scale``.
        scale_mode : str
            ``default``; ``kv-per-tensor``, which ``default`` means for an e4m3 cache under a bf16
            query: each run has the scales of the cache; or ``bmm-scalar``: each run has
            ``bmm1_scale`` and ``bmm2_scale``.
        skip_softmax : bool
            Whether each run has a ``skip_softmax_threshold_scale_factor``.
        enable_pdl : bool
            Whether runs use programmatic dependent launch; None means yes.
        use_sinks : bool
            Whether each run has ``sinks``.
        batch_invariant : bool
            Whether the bits of a request's results must not depend on the rest of the batch; None
            means what ``MLAGEN_BATCH_INVARIANT`` says. The plan then needs an upper bound of the
            lengths: without lengths on the CPU it reads the longest back, and for CUDA graphs it
            takes the width of the block tables, or all page ids of ``kv_indices``.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule; the previous plan stays valid then.
        UnsupportedError
            If no kernel supports the head dimensions, or with ``use_profiler``.
        """
        sizes: Any = {
            "num_heads": num_heads,
            "head_dim_ckv": head_dim_ckv,
            "head_dim_kpe": head_dim_kpe,
            "page_size": page_size,
            "causal": causal,
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        settings = MlaSettings(**sizes)
        if require_flag(use_profiler, "use_profiler"):
            raise UnsupportedError(
                "use_profiler: Profiler is enabled, but not implemented, expected False, got True"
            )
        flat = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
            "cum_seq_lens_q": cum_seq_lens_q,
            "block_tables": block_tables,
            "seq_lens": seq_lens,
            "max_q_len": max_q_len,
        }
        given = given_metadata(metadata, flat)
        contract = MLAInputContract.declared(
            by_name=metadata is None,
            is_dequantized=settings.is_dequantized,
            kernel_dtype=settings.kernel_dtype,
            lse_mode=lse_mode,
            output_dtype=output_dtype,
            output_scale=output_scale,
            scale_mode=scale_mode,
            query_layout=query_layout,
            kv_cache_layout=kv_cache_layout,
            skip_softmax=skip_softmax,
            use_sinks=use_sinks,
        )
        self._plan = plan_of(
            replace(
                settings,
                contract=contract,
                enable_pdl=is_pdl_enabled(enable_pdl),
                batch_invariant=chooses_batch_invariant(batch_invariant),
            ),
            given,
            self._workspace.device,
            is_graph=self._is_graph,
            buffers=self._buffers,
            before=self._plan,
        )

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
        if query is not None:
            q_nope, q_pe = parts_of(query, "query", q_nope, q_pe)
        elif q_pe is None:
            require_tensor(q_pe, "q_pe")
        if kv_cache is not None:
            ckv_cache, kpe_cache = parts_of(kv_cache, "kv_cache", ckv_cache, kpe_cache)
        elif kpe_cache is None:
            require_tensor(kpe_cache, "kpe_cache")
        run: Any = (
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
        plan, workspace, fp8_out = self._plan, self._workspace, None
        tables = kv_len is not None or page_table is not None
        if plan is None or tables or profiler_buffer is not None or o_scale is not None:
            plan, run, fp8_out = self._prepared(MlaRun(*run), kv_len, page_table, profiler_buffer)
        if is_compiling() or is_traced():
            outputs = OP.call(plan, workspace, run)
        else:
            # A run without a plan, which has no text, reads the caller's tables.
            if not self._is_graph and is_capturing(workspace.device) and plan.text:
                raise CaptureError(NO_CAPTURE)
            outputs = run_planned(plan, workspace, *run)
        if fp8_out is not None:
            outputs = (saturated_into(fp8_out, outputs[0]), *outputs[1:])
        return (outputs[0], outputs[1]) if return_lse else outputs[0]

    def _prepared(
        self, run: MlaRun, kv_len: object, page_table: object, profiler_buffer: object
    ) -> tuple[Plan[Any], MlaRun, torch.Tensor | None]:
        """Return plan, arguments and FP8 output of a run with rare arguments or without a plan."""
        plan, scale = self._plan, run.o_scale
        is_op = is_compiling() or is_traced() > 0
        has_tables = kv_len is not None and page_table is not None
        if plan is None and (self._backend == "cutlass" or has_tables):
            plan = planless(run, kv_len, page_table, profiler_buffer, is_traced=is_op)
        elif scale is not None and (plan is None or not plan.settings.has_fp8_output):
            raise ArgumentError(
                "o_scale is only supported with the cutlass backend for now, or with output_scale "
                f"'per-tensor' of a plan, got {shown(scale)}"
            )
        elif plan is None:
            raise ArgumentError("run: expected plan() to be called first, got no plan")
        elif profiler_buffer is not None:
            raise UnsupportedError("profiler_buffer: not implemented, expected None, got a tensor")
        elif kv_len is not None or page_table is not None:
            plan = with_tables(plan, kv_len, page_table)
        if scale is None:
            return plan, run, None
        scale, settings = require_positive(scale, "o_scale"), plan.settings
        out = checked_fp8_out(run.out, run.q_nope, settings.head_dim_ckv, has_memory=not is_op)
        if settings.contract is not None:
            dtype = settings.contract.output_dtype
            require(out.dtype is dtype, "out.dtype", dtype, out.dtype)
        return plan, run._replace(out=None, o_scale=scale), out
