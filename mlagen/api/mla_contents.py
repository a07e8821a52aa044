"""What the tensors of one MLA decode call hold, checked where ``MLAGEN_CHECK=1`` asks for it."""

from __future__ import annotations

import torch

from mlagen.api.arguments import refuse
from mlagen.api.device_checks import (
    check_flat_page_ids,
    check_page_ids,
    check_seq_lens,
    query_lengths,
    require_no_capture,
    table_capacity,
)
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_request import MlaRequest


def check_contents(inputs: MlaInputs, request: MlaRequest) -> None:
    """Refuse lengths, tables and ends that contradict each other; waits for the device.

    Raises
    ------
    ArgumentError
        If they do; the message names request and position.
    CaptureError
        If a CUDA graph is being captured.
    """
    require_no_capture(inputs.query)
    names, page_size = inputs.names, request.variant.page_size
    # With page ids in a row comes FlashInfer's wrapper: it has query tokens without a key, and in
    # graphs tokens without a request.
    is_planned = inputs.table_starts is not None
    q_lens = torch.full((request.batch,), request.q_len)
    if inputs.cum_seq_lens_q is not None:
        q_lens = query_lengths(
            inputs.cum_seq_lens_q,
            names.cum_seq_lens_q,
            request.tokens,
            may_have_more=is_planned,
        )
    if inputs.top_k_lens is not None:  # no length of a request is read then
        return
    capacity: int | torch.Tensor | None = request.max_pages * page_size
    if request.top_k:  # the entries of a list that are no tokens are meant to be skipped
        capacity = None
    elif inputs.table_starts is not None:
        capacity = table_capacity(
            inputs.table_starts,
            names.table_starts,
            page_ids=request.max_pages,
            page_size=page_size,
        )
    seq_lens = check_seq_lens(
        inputs.seq_lens,
        names.seq_lens,
        capacity=capacity,
        q_lens=q_lens if inputs.is_causal and not is_planned else None,
    )
    if request.top_k:
        return
    if inputs.bias is not None and len(seq_lens) and int(seq_lens.max()) > inputs.bias.shape[2]:
        refuse(
            f"max({names.seq_lens})", f"{inputs.bias.shape[2]} (bias) or less", int(seq_lens.max())
        )
    if inputs.table_starts is not None:
        check_flat_page_ids(
            inputs.block_tables,
            names.block_tables,
            starts=inputs.table_starts,
            seq_lens=seq_lens,
            page_size=page_size,
            num_pages=request.num_pages,
        )
        return
    tables = inputs.block_tables
    for part in (tables,) if tables.dim() == 2 else tables.unbind(1):
        check_page_ids(
            part,
            names.block_tables,
            seq_lens=seq_lens,
            page_size=page_size,
            num_pages=request.num_pages,
        )
