"""Planned grouped-query decode with the signature of FlashInfer's batch decode wrapper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from mlagen.errors import ArgumentError, CaptureError, UnsupportedError
from mlagen.families.common.arguments import (
    INT32_MAX,
    canonical_scale,
    chooses_batch_invariant,
    reject_dtype,
    reject_unserved,
    require,
    require_choice,
    require_flag,
    require_float32,
    require_number,
    require_scale,
    require_tensor,
    require_whole_number,
    shown,
)
from mlagen.families.gqa.args import LAYOUTS, soft_cap_of, window_of
from mlagen.gqa.plan import (
    BUFFER_NAMES,
    NAMES,
    OP,
    TOKEN_SCALED,
    DecodeSettings,
    GraphBuffers,
    data_types,
    plan_of,
    run_planned,
)
from mlagen.observe.observed import observable
from mlagen.planned.metadata import Requests
from mlagen.planned.plan import NO_CAPTURE, Plan, text_of
from mlagen.runtime.capture import is_capturing
from mlagen.torch_ops.traced import is_compiling, is_traced, require_eager_memory
from mlagen.values import is_scalar

_BACKENDS = ("auto", "fa2", "fa3", "trtllm-gen", "cute-dsl", "cudnn")
_OF_TABLES = ("trtllm-gen", "cudnn")  # whose plans may have block tables

Both = tuple[torch.Tensor, torch.Tensor]


@observable
class BatchDecodeWithPagedKVCacheWrapper:
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
        ``auto``, ``fa2``, ``fa3``, ``trtllm-gen``, ``cute-dsl`` and ``cudnn`` are equivalent,
        but for ``block_tables`` of a plan.
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
        self._reads_tables = require_choice(backend, "backend", _BACKENDS) in _OF_TABLES
        reject_unserved("jit_args", jit_args, None)
        reject_unserved("jit_kwargs", jit_kwargs or None, None)
        self._plan: Plan[DecodeSettings] | None = None
        self._plans_of_runs: dict[tuple[int, int, float], Plan[DecodeSettings]] = {}
        self._buffers: GraphBuffers | None = None
        self._paged_kv_indices_buf = paged_kv_indices_buffer  # SGLang writes page ids there
        if require_flag(use_cuda_graph, "use_cuda_graph"):
            names = BUFFER_NAMES
            buffers = Requests(
                kv_indptr=require_tensor(paged_kv_indptr_buffer, names["kv_indptr"]),
                kv_indices=require_tensor(paged_kv_indices_buffer, names["kv_indices"]),
                kv_len_arr=require_tensor(paged_kv_last_page_len_buffer, names["kv_len_arr"]),
                names=names,
            )
            self._buffers = GraphBuffers(buffers, self._workspace.device)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans copy their metadata into the buffers of a captured graph."""
        return self._buffers is not None

    @property
    def use_tensor_cores(self) -> bool:
        """True: every kernel uses them."""
        return True

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replace the scratch of later runs; the plan stays.

        Parameters
        ----------
        float_workspace_buffer : any dtype, contiguous
            The scratch, on the device of the one before. A captured graph keeps its own.
        int_workspace_buffer : any dtype
            Ignored: a plan has no schedule to store.

        Raises
        ------
        ArgumentError
            If one is no tensor, or the first is on another device.
        """
        given = require_tensor(float_workspace_buffer, "float_workspace_buffer")
        require_tensor(int_workspace_buffer, "int_workspace_buffer")
        device = self._workspace.device
        require(given.device == device, "float_workspace_buffer.device", device, given.device)
        self._workspace = given

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
        head_dim_vo: int | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        """Set the requests of the following runs.

        The metadata is copied, from the CPU or from the device of the workspace. Metadata on the
        CPU is checked here; offsets and lengths on the device are clamped to the page ids. Split-KV
        scheduling uses the longest sequence, so that a run has the bits of a call of
        :func:`mlagen.decode.trtllm_batch_decode_with_kv_cache` with that ``max_seq_len``. A plan
        with neither ``indptr`` nor ``seq_lens`` on the CPU waits for the device, to read the
        longest back; no other plan does. Plans for CUDA graphs never wait: they assume that
        requests share ``indices`` equally, if that is longer than the lengths on the CPU.

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
            Scores, scaled, become ``logits_soft_cap * tanh(score / logits_soft_cap)``, before any
            mask; sinks do not. None or 0: none.
        q_data_type, kv_data_type, o_data_type : torch.dtype or str
            bf16, fp16 or e4m3, which one small kernel of each run converts; a 16-bit one, e4m3,
            e5m2, int8 or uint8 (NVFP4), by default as the query; and as the query, 16-bit for e4m3,
            or e4m3 from a cache of e4m3.
        data_type : torch.dtype or str
            The default of the first two where they are None.
        sm_scale : float
            Multiplies the scores before softmax; ``head_dim ** -0.5`` if None.
        rope_scale, rope_theta, non_blocking
            Ignored: nothing is rotated, and no copy waits.
        block_tables : int32 or uint32 [batch, max_pages]
            With backend ``trtllm-gen`` or ``cudnn`` the page ids, copied as those of ``indices``,
            which are ignored then; with other backends ignored, as in FlashInfer.
        seq_lens : int32 or uint32 [batch]
            Tokens of each request, instead of those that ``last_page_len`` implies.
        fixed_split_size : int
            1 or more requests what ``batch_invariant`` does, with splits of mlagen's own size; None
            and -1 do not.
        disable_split_kv : bool
            True requests the same.
        q_len_per_req : int
            Query tokens of every request, the last of its tokens.
        window_right : int
            0.
        is_causal : bool
            Whether the tokens after a query token are masked; None means yes.
        use_token_head_sf : bool
            Whether ``kv_cache_sf`` of each run has a scale of each token and KV head.
        head_dim_vo : int
            Elements of a value and of an output row, at most those of a key; ``head_dim`` if None.
        batch_invariant : bool
            Whether the bits of a request's results must not depend on the rest of the batch; None
            means what the two keywords above and ``MLAGEN_BATCH_INVARIANT`` say. The plan then
            needs an upper bound of the lengths; for CUDA graphs it is all of ``indices``.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule; the previous plan stays valid then.
        UnsupportedError
            If a keyword requests what no kernel implements.
        """
        reject_unserved("pos_encoding_mode", pos_encoding_mode, "NONE")
        reject_unserved("window_right", window_right, 0)
        require_flag(non_blocking, "non_blocking")
        for keyword, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
            if value is not None:
                require_number(value, keyword)
        if block_tables is not None:
            require_tensor(block_tables, "block_tables")
        sizes = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
        }
        whole: Any = {name: require_whole_number(n, name, min_value=1) for name, n in sizes.items()}
        q_len = require_whole_number(q_len_per_req, "q_len_per_req", min_value=1)
        heads, kv_heads = whole["num_qo_heads"], whole["num_kv_heads"]
        require(
            heads % kv_heads == 0, "num_qo_heads", f"a multiple of {kv_heads} (num_kv_heads)", heads
        )
        scale = whole["head_dim"] ** -0.5 if sm_scale is None else sm_scale
        dtypes: Any = data_types(q_data_type, kv_data_type, o_data_type, data_type)
        settings = DecodeSettings(
            **whole,
            **dtypes,
            is_causal=True if is_causal is None else require_flag(is_causal, "is_causal"),
            window=_window(window_left),
            soft_cap=soft_cap_of(logits_soft_cap),
            sm_scale=require_float32(scale, "sm_scale"),
            kv_layout=self._kv_layout,
            head_dim_vo=_value_dim(head_dim_vo, whole["head_dim"]),
            batch_invariant=_batch_invariant(batch_invariant, fixed_split_size, disable_split_kv),
            use_token_head_sf=require_flag(use_token_head_sf, "use_token_head_sf"),
        )
        cached = settings.kv_data_type
        if settings.use_token_head_sf and cached not in TOKEN_SCALED:
            rule = f"{' or '.join(map(str, TOKEN_SCALED))} with use_token_head_sf"
            reject_dtype("kv_data_type", rule, cached)
        given = Requests(
            kv_indptr=require_tensor(indptr, "indptr"),
            kv_indices=require_tensor(indices, "indices"),
            kv_len_arr=require_tensor(last_page_len, "last_page_len"),
            names=NAMES,
        )
        device = self._workspace.device
        tables = block_tables if self._reads_tables else None
        self._plan = plan_of(given, seq_lens, settings, q_len, device, self._buffers, tables)
        self._plans_of_runs = {}

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
        logits_soft_cap: float | None = None,
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
        kv_cache_sf : e4m3 or uint8 [..., head_dim / 16], or fp32 with ``use_token_head_sf``
            One scale for 16 elements of an NVFP4 cache, or for a token and KV head of an FP8 or
            int8 cache, as in :func:`mlagen.decode.xqa_batch_decode_with_kv_cache`.
        logits_soft_cap : float
            As planned if None; 0: none.

        Returns
        -------
        torch.Tensor
            ``out``, or ``(out, lse)``.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule or differs from the plan, or without a plan; the outputs
            are unchanged.
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
        own = (window_left, q_len_per_req, logits_soft_cap)
        if any(value is not None for value in own):
            plan = self._plan_of_run(plan, *own)
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
        v_scale, sf = 1.0 if v_scale is None else v_scale, kv_cache_sf
        run = (q, paged_kv_cache, sf, factor, v_scale, out, lse, sinks, return_lse, enable_pdl)
        if is_compiling() or is_traced():
            outputs = OP.call(plan, workspace, run)
        else:
            if self._buffers is None and is_capturing(workspace.device):
                raise CaptureError(NO_CAPTURE)
            outputs = run_planned(plan, workspace, *run)
        return (outputs[0], outputs[1]) if return_lse else outputs[0]

    def _plan_of_run(
        self,
        plan: Plan[DecodeSettings],
        window_left: object,
        q_len_per_req: object,
        logits_soft_cap: object,
    ) -> Plan[DecodeSettings]:
        """Return the plan of a run with a window, query tokens or a soft cap of its own."""
        settings = plan.settings
        window, q_len, soft_cap = settings.window, plan.q_len, settings.soft_cap
        if window_left is not None:
            window = _window(window_left)
        if q_len_per_req is not None:
            q_len = require_whole_number(q_len_per_req, "q_len_per_req", min_value=1)
        if logits_soft_cap is not None:
            soft_cap = soft_cap_of(logits_soft_cap)
        own = (window, q_len, soft_cap)
        if own == (settings.window, plan.q_len, settings.soft_cap):
            return plan
        known = self._plans_of_runs.get(own)
        if known is None:
            settings = replace(settings, window=window, soft_cap=soft_cap)
            tokens, text = plan.requests.batch * q_len, text_of(settings)
            known = replace(plan, settings=settings, text=text, q_len=q_len, tokens=tokens)
            self._plans_of_runs[own] = known
        return known

    def begin_forward(self, *args: Any, **kwargs: Any) -> None:
        """Do what :meth:`plan` does."""
        self.plan(*args, **kwargs)

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Any, **kwargs: Any) -> Both:
        """Do what :meth:`run` does with ``return_lse``."""
        return cast("Both", self.run(q, paged_kv_cache, return_lse=True, **kwargs))

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | Both:
        """Do what :meth:`run` does, with a softmax scale, a window and a soft cap of this run.

        ``sm_scale`` is ``head_dim ** -0.5`` if None, the window unlimited if ``window_left`` is
        negative, and there is no soft cap if ``logits_soft_cap`` is None or 0, whatever the plan
        says. ``rope_scale`` and ``rope_theta`` are ignored.

        Raises
        ------
        ArgumentError
            If an argument breaks a rule.
        UnsupportedError
            If a keyword requests what no kernel implements.
        """
        del rope_scale, rope_theta
        reject_unserved("pos_encoding_mode", pos_encoding_mode, "NONE")
        soft_cap = soft_cap_of(logits_soft_cap)
        if self._plan is not None:
            planned = self._plan.settings
            given = planned.head_dim**-0.5 if sm_scale is None else sm_scale
            scale = require_float32(given, "sm_scale")
            if scale != planned.sm_scale:
                require(planned.sm_scale != 0, "sm_scale", "0 (of plan)", scale)
                number = 1.0 if q_scale is None else canonical_scale(q_scale, "q_scale")
                q_scale = scale / planned.sm_scale * number
        own: Any = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        own |= {"window_left": window_left, "logits_soft_cap": soft_cap}
        result: torch.Tensor | Both = self.run(q, paged_kv_cache, **own, return_lse=return_lse)
        return result

    def forward_return_lse(
        self, q: torch.Tensor, paged_kv_cache: Any, *args: Any, **kwargs: Any
    ) -> Both:
        """Do what :meth:`forward` does with ``return_lse``."""
        both = self.forward(q, paged_kv_cache, *args, return_lse=True, **kwargs)
        return cast("Both", both)


def _value_dim(head_dim_vo: object, head_dim: int) -> int:
    """Return the elements of a value; 0 where no number is given, for those of a key."""
    if head_dim_vo is None:
        return 0
    number = require_whole_number(head_dim_vo, "head_dim_vo", min_value=1)
    is_value = number == head_dim or (number < head_dim and number % 16 == 0)
    require(is_value, "head_dim_vo", f"a multiple of 16 up to {head_dim} (head_dim)", number)
    return number


def _batch_invariant(
    batch_invariant: object, fixed_split_size: object, disable_split_kv: object
) -> bool:
    """Return whether a plan is batch-invariant, as FlashInfer's keywords may request too."""
    has_fixed_splits = require_flag(disable_split_kv, "disable_split_kv")
    is_none = fixed_split_size is None or (is_scalar(fixed_split_size) and fixed_split_size == -1)
    if not is_none:
        require_whole_number(fixed_split_size, "fixed_split_size", min_value=1)
        has_fixed_splits = True
    if not has_fixed_splits:
        return chooses_batch_invariant(batch_invariant)
    if batch_invariant is not None:
        is_on = require_flag(batch_invariant, "batch_invariant")
        rule = "None or True with fixed_split_size or disable_split_kv"
        require(is_on, "batch_invariant", rule, is_on)
    return True


def _window(window_left: object) -> int:
    return min(window_of(window_left, "window_left"), INT32_MAX)


def CUDAGraphBatchDecodeWithPagedKVCacheWrapper(  # noqa: N802 - FlashInfer's name of a class
    workspace_buffer: torch.Tensor,
    indptr_buffer: torch.Tensor,
    indices_buffer: torch.Tensor,
    last_page_len_buffer: torch.Tensor,
    kv_layout: str = "NHD",
    use_tensor_cores: bool = False,
) -> BatchDecodeWithPagedKVCacheWrapper:
    """Return a :class:`mlagen.decode.BatchDecodeWithPagedKVCacheWrapper` with its three buffers.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule.
    """
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace_buffer,
        kv_layout,
        use_cuda_graph=True,
        use_tensor_cores=use_tensor_cores,
        paged_kv_indptr_buffer=indptr_buffer,
        paged_kv_indices_buffer=indices_buffer,
        paged_kv_last_page_len_buffer=last_page_len_buffer,
    )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
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
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan a wrapper by the offsets that the host has; otherwise what its ``plan`` does.

    No plan waits for the device. This one may replace the ``plan`` of a wrapper.

    Parameters
    ----------
    self : BatchDecodeWithPagedKVCacheWrapper
        The wrapper.
    indptr, indices, last_page_len, ... : as in :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`
        ``q_data_type`` is ``data_type`` if None, and fp16 without both. The dtype of the output,
        the elements of a value and ``use_token_head_sf`` are those of the plan before.
    global_override_indptr_cpu : int32 or uint32 [batch + 1]
        ``indptr`` on the CPU, which is read instead.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; the previous plan stays valid then.
    UnsupportedError
        If a keyword requests what no kernel implements.
    """
    before = self._plan
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type or data_type or "float16",
        kv_data_type=kv_data_type,
        o_data_type=None if before is None else before.settings.o_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
        head_dim_vo=None if before is None else before.settings.head_dim_vo or None,
        use_token_head_sf=before is not None and before.settings.use_token_head_sf,
    )
