"""Batch decode for CUDA graphs by FlashInfer's other names: the wrapper's buffers and its plan."""

from __future__ import annotations

import torch

from mlagen.gqa.wrapper import BatchDecodeWithPagedKVCacheWrapper


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
        ``q_data_type`` is ``data_type`` if None, and fp16 without both. The dtype of the output is
        that of the plan before.
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
    )
