"""FlashInfer baseline: its call of a case, where it is installed."""

from __future__ import annotations

import torch

from .calls import Call
from .cases import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from .inputs import TORCH_DTYPES, Inputs

# FlashInfer does not report the size it needs; XQA's first 8 MiB are zeroed semaphores.
_WORKSPACE_BYTES = 256 << 20


def flashinfer_version() -> str:
    """Return the version of FlashInfer."""
    import flashinfer

    return str(flashinfer.__version__)


def flashinfer_call(inputs: Inputs, backend: str) -> Call:
    """Return FlashInfer's call for the case; FlashInfer may reject it here or when called.

    ``backend`` is that of ``BatchMLAPagedAttentionWrapper``. It is planned here; a call is only
    its run.
    """
    device = inputs.seq_lens.device
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if inputs.case.family == "mla":
        return _mla_call(inputs, workspace, backend)
    return _gqa_call(inputs, workspace)


def _mla_call(inputs: Inputs, workspace: torch.Tensor, backend: str) -> Call:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    case, device = inputs.case, inputs.seq_lens.device
    kv_indptr = torch.tensor([0, *inputs.pages], device=device).cumsum(0).int()
    tables = [inputs.block_tables[request, :n] for request, n in enumerate(inputs.pages)]
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len,
        kv_indptr,
        torch.cat(tables),
        inputs.seq_lens,
        case.heads,
        KV_LORA_RANK,
        QK_ROPE_HEAD_DIM,
        case.page_size,
        case.q_len > 1,
        inputs.scale,
        TORCH_DTYPES[case.dtype],
        TORCH_DTYPES[case.kv_dtype],
    )
    queries = [_split_rope(query.flatten(0, 1)) for query in inputs.queries]
    caches = [_split_rope(keys.squeeze(2)) for keys in inputs.keys]
    has_scales = case.dtype is not case.kv_dtype  # scales only for a quantized cache
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if has_scales else {}

    def call(index: int) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(*queries[index], *caches[index], **scales)
        return out

    return call


def _split_rope(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[..., :KV_LORA_RANK], tensor[..., KV_LORA_RANK:]


def _gqa_call(inputs: Inputs, workspace: torch.Tensor) -> Call:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    queries = [query.flatten(0, 1) for query in inputs.queries]
    lengths = inputs.seq_lens.to(torch.uint32)
    q_len = inputs.case.q_len
    drafts = {} if q_len == 1 else {"q_len_per_req": q_len, "mask": _causal_mask(inputs)}

    def call(index: int) -> torch.Tensor:
        out: torch.Tensor = xqa_batch_decode_with_kv_cache(
            queries[index],
            (inputs.keys[index], inputs.values[index]),
            workspace,
            inputs.block_tables,
            lengths,
            inputs.max_seq_len,
            bmm1_scale=inputs.scale,
            bmm2_scale=1.0,
            kv_layout="NHD",
            **drafts,
        )
        return out

    return call


def _causal_mask(inputs: Inputs) -> torch.Tensor:
    """Return uint16 words ``[batch, q_len, words]``: bit ``j`` of row ``i`` is ``j <= i``."""
    case = inputs.case
    words = -(-case.q_len // 32) * 2
    rows = [(2 << row) - 1 for row in range(case.q_len)]
    numbers = [[row >> 16 * word & 0xFFFF for word in range(words)] for row in rows]
    mask = torch.tensor(numbers, dtype=torch.int32).to(torch.uint16)
    return mask.expand(case.batch, -1, -1).contiguous().to(inputs.seq_lens.device)
