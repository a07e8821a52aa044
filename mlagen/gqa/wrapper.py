"""Planned grouped-query decode with the signature of FlashInfer's batch decode wrapper."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.errors import ArgumentError, CaptureError, UnsupportedError
from mlagen.families.common.arguments import (
    canonical_scale,
    require_choice,
    require_flag,
    require_number,
    require_scale,
    require_tensor,
    shown,
)
from mlagen.families.gqa.args import LAYOUTS
from mlagen.gqa.aliases import DecodeAliases
from mlagen.gqa.batch_op import call_planned
from mlagen.gqa.batch_plan import DecodePlan, GraphBuffers, PageMetadata, plan_of
from mlagen.gqa.batch_run import run_planned
from mlagen.gqa.batch_settings import reject_unserved, settings_of
from mlagen.observe.observed import observable
from mlagen.runtime.capture import is_capturing
from mlagen.torch_ops.traced import is_compiling, is_traced, require_eager_memory

_BACKENDS = ("auto", "fa2", "fa3", "trtllm-gen", "cute-dsl", "cudnn")
_CAPTURE = (
    "use_cuda_graph: expected True with its three buffers while a CUDA graph is captured, "
    "since replays read metadata that the next plan frees, got False"
)


@observable
class BatchDecodeWithPagedKVCacheWrapper(DecodeAliases):
    """Grouped-query decode over a paged KV cache, by one plan and many runs.

    :meth:`plan` sets the requests, and every :meth:`run` until the next plan computes them. A row
    that attends to nothing gives zeros, and its sink as LSE, or minus infinity without one. Tensors
    on the CPU use a slow PyTorch backend.

    Parameters
    ----------
    float_workspace_buffer : any dtype, contiguous
        Scratch of the runs, on their device; they use its end. It needs no initial value.
    kv_layout : str
        ``NHD`` or ``HND``.
    use_cuda_graph : bool
        Whether plans copy their metadata into the three buffers below, so that a captured run reads
        the requests of the latest plan. The number of requests and ``q_len_per_req`` are fixed
        then. Without it a run cannot be captured.
    use_tensor_cores : bool
        Ignored; every kernel uses them.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : int32 or uint32
        The buffers, on the device of the workspace, shaped as in :meth:`plan`; the second may be
        longer than any plan needs. Runs read the page ids there, and offsets and lengths in copies
        that a plan makes.
    backend : str
        ``auto``, ``fa2``, ``fa3``, ``trtllm-gen``, ``cute-dsl`` and ``cudnn`` are equivalent.
    jit_args, jit_kwargs : None
        Customized kernels are not implemented; ``jit_kwargs`` may be empty.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.
    UnsupportedError
        With ``jit_args`` or ``jit_kwargs``.

    Notes
    -----
    Signature of ``flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper``.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._workspace = require_tensor(float_workspace_buffer, "float_workspace_buffer")
        self._kv_layout = require_choice(kv_layout, "kv_layout", LAYOUTS)
        require_flag(use_tensor_cores, "use_tensor_cores")
        require_choice(backend, "backend", _BACKENDS)
        reject_unserved({"jit_args": (jit_args, (None,))})
        reject_unserved({"jit_kwargs": (None if jit_kwargs == {} else jit_kwargs, (None,))})
        self._plan: DecodePlan | None = None
        self._buffers: GraphBuffers | None = None
        self._paged_kv_indices_buf = paged_kv_indices_buffer  # SGLang writes page ids there
        if require_flag(use_cuda_graph, "use_cuda_graph"):
            names = (
                ("indptr", paged_kv_indptr_buffer),
                ("indices", paged_kv_indices_buffer),
                ("last_page_len", paged_kv_last_page_len_buffer),
            )
            buffers = {
                name: require_tensor(buffer, f"paged_kv_{name}_buffer") for name, buffer in names
            }
            self._buffers = GraphBuffers(PageMetadata(**buffers), self._workspace.device)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Set the requests of the following runs.

        The metadata is copied, from the CPU or from the device of the workspace, without
        synchronization. Metadata on the CPU is checked here; offsets and lengths on the device are
        clamped to the page ids. Split-KV scheduling uses the lengths on the CPU. Without them it
        assumes that requests share ``indices`` equally, and also for CUDA graphs if that is longer.
        The splits affect results by rounding only.

        Parameters
        ----------
        indptr : int32 or uint32 [batch + 1]
            Offsets of the requests' page ids in ``indices``.
        indices : int32 or uint32 [at least indptr[-1]]
            Page ids. The result of a request with an id out of range is unspecified.
        last_page_len : int32 or uint32 [batch]
            Tokens in the last page of each request. Its length is the number of requests.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Sizes of query and cache; ``num_qo_heads`` is a multiple of ``num_kv_heads``.
        pos_encoding_mode : str
            ``NONE``: query and keys are rotated already.
        window_left : int
            Number of tokens before its own that a row attends to; unlimited if negative.
        logits_soft_cap : float
            None or 0: scores are not capped.
        q_data_type, kv_data_type, o_data_type : torch.dtype or str
            bf16, fp16 or e4m3, which one small kernel of each run converts; a 16-bit one, e4m3,
            int8 or uint8 (NVFP4), by default as the query; and as the query, 16-bit for e4m3, or
            e4m3 from a cache of e4m3.
        data_type : torch.dtype or str
            The default of the first two where they are None.
        sm_scale : float
            Multiplies the scores before softmax; ``head_dim ** -0.5`` if None.
        rope_scale, rope_theta, non_blocking, block_tables
            Ignored: nothing is rotated, no copy waits, and ``indices`` has the page ids.
        seq_lens : int32 or uint32 [batch]
            Tokens of each request, instead of those that ``last_page_len`` implies.
        fixed_split_size, disable_split_kv : int, bool
            None and False: splits follow the batch.
        q_len_per_req : int
            Query tokens of every request, the last of its tokens.
        window_right : int
            0.
        is_causal : bool
            Whether the tokens after a query token are masked; None means yes.
        use_token_head_sf : bool
            False: a scale of each token and head is not implemented.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule; the previous plan stays valid then.
        UnsupportedError
            If a keyword requests what no kernel implements.
        """
        settings = settings_of(dict(locals()), self._kv_layout)
        given = PageMetadata(indptr=indptr, indices=indices, last_page_len=last_page_len)
        self._plan = plan_of(given, seq_lens, settings, self._workspace.device, self._buffers)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor
        | tuple[torch.Tensor, torch.Tensor]
        | list[torch.Tensor]
        | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned requests.

        Parameters
        ----------
        q : as planned [batch * q_len_per_req, num_qo_heads, head_dim]
            Any strides that are multiples of 16 bytes, except the last.
        paged_kv_cache : as planned
            Keys and values, in one tensor or two, as in
            :func:`mlagen.decode.xqa_batch_decode_with_kv_cache`.
        *args
            None: arguments of customized kernels.
        q_scale, k_scale : float or fp32 tensor of one element
            Multiply the scores, besides ``sm_scale``; 1 if None.
        v_scale : float or fp32 tensor of one element
            Multiplies the output; 1 if None.
        out : as q, of the planned dtype
            Written and returned; allocated if None.
        lse : fp32 [batch * q_len_per_req, num_qo_heads]
            Written if given, and returned if ``return_lse``, which allocates it if None.
        return_lse : bool
            Whether to return ``(out, lse)``: the base-2 logarithm of the softmax denominator,
            including the sink.
        enable_pdl : bool
            Whether to use programmatic dependent launch; None means yes where the GPU supports it.
        window_left : int
            As planned if None.
        sinks : fp32, bf16 or fp16 [num_qo_heads]
            Natural-domain logits, unscaled, added to the softmax denominator without a value.
        q_len_per_req : int
            As planned if None.
        skip_softmax_threshold_scale_factor : float
            Ignored: no KV block is skipped, and the result is exact.
        kv_cache_sf : e4m3 or uint8 [..., head_dim / 16]
            One scale for 16 elements of an NVFP4 cache, in one of the layouts of the cache.

        Returns
        -------
        torch.Tensor
            ``out``, or ``(out, lse)``.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule or differs from the plan, or without a plan; no kernel is
            launched, and the outputs are unchanged.
        UnsupportedError
            If no kernel supports dtypes or head dimension, or with ``args``.
        CaptureError
            During CUDA graph capture, if the kernel is not loaded yet, or without
            ``use_cuda_graph``.
        """
        plan, workspace = self._plan, self._workspace
        if plan is None:
            raise ArgumentError("run: expected plan() to be called first, got no plan")
        if args:
            raise UnsupportedError(f"args: not implemented, expected none, got {shown(args)}")
        if window_left is not None or q_len_per_req is not None:
            plan = plan.of_run(window_left, q_len_per_req)
        if skip_softmax_threshold_scale_factor is not None:
            name = "skip_softmax_threshold_scale_factor"
            require_number(skip_softmax_threshold_scale_factor, name)
        factor: float | torch.Tensor = plan.settings.sm_scale
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
            if scale is not None:
                require_scale(number := canonical_scale(scale, name), name, workspace.device)
                if isinstance(number, torch.Tensor):
                    require_eager_memory(**{name: number})
                factor = factor * number
        given = (
            *(plan, workspace, q, paged_kv_cache, kv_cache_sf, factor),
            1.0 if v_scale is None else v_scale,
            *(out, lse, sinks, return_lse, enable_pdl),
        )
        if is_compiling() or is_traced() > 0:
            outputs = call_planned(*given)
        else:
            if self._buffers is None and is_capturing(workspace.device):
                raise CaptureError(_CAPTURE)
            outputs = run_planned(*given)
        return (outputs[0], outputs[1]) if return_lse else outputs[0]
