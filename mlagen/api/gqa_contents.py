"""What the tensors of one grouped-query decode call hold, checked where ``MLAGEN_CHECK=1`` asks."""

from __future__ import annotations

import torch

from mlagen.api.arguments import refuse
from mlagen.api.device_checks import (
    check_page_ids,
    check_seq_lens,
    query_lengths,
    require_no_capture,
)
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_request import GqaRequest


def check_contents(inputs: GqaInputs, request: GqaRequest) -> None:
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
    q_lens = torch.full((request.batch,), request.q_len)
    if inputs.cum_seq_lens_q is not None:
        q_lens = query_lengths(inputs.cum_seq_lens_q, names.cum_seq_lens_q, request.tokens)
        for position, q_len in enumerate(q_lens.tolist()):
            if q_len > request.q_len:
                rule = f"{request.q_len} ({names.q_len}) or less"
                refuse(f"{names.cum_seq_lens_q}.diff()[{position}]", rule, q_len)
    seq_lens = check_seq_lens(
        inputs.seq_lens.flatten(),
        names.seq_lens,
        capacity=request.max_pages * page_size,
        q_lens=q_lens,
    )
    check_page_ids(
        inputs.block_tables,
        names.block_tables,
        seq_lens=seq_lens,
        page_size=page_size,
        num_pages=request.num_pages,
    )
