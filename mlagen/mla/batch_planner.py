"""Construction and plans of BatchMLA's wrapper."""

from __future__ import annotations

import torch

from mlagen.families.common.arguments import require_choice, require_flag, require_tensor
from mlagen.mla.batch_contract import MLAPlanMetadata
from mlagen.mla.batch_layout import BatchLayout
from mlagen.mla.batch_plan import BatchPlan, graph_buffers, plan_of

_BACKENDS = (
    *("auto", "autotune", "fa2", "fa3", "cutlass", "cutile", "trtllm-gen", "xqa"),
    *("cute-dsl", "cute-dsl-modular", "cute-dsl-monolithic", "cute-dsl-rubin-mtp"),
)


class BatchPlanner:
    """The part of the wrapper that sets the requests of its runs."""

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
        self._is_graph = require_flag(use_cuda_graph, "use_cuda_graph")
        if self._is_graph:
            buffers = {
                "qo_indptr": qo_indptr,
                "kv_indptr": kv_indptr,
                "kv_indices": kv_indices,
                "kv_len_arr": kv_len_arr,
            }
            self._buffers = graph_buffers(buffers, self._workspace.device)

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

        Raises
        ------
        ArgumentError
            If an argument breaks a rule; the previous plan stays valid then.
        UnsupportedError
            If no kernel supports the head dimensions, or with ``use_profiler``.
        """
        self._plan = plan_of(
            {name: value for name, value in locals().items() if name != "self"},
            self._workspace.device,
            is_graph=self._is_graph,
            buffers=self._buffers,
            before=self._plan,
        )
