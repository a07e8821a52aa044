"""A batch from vLLM's scheduler to the output, by vLLM's own builder; needs vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.attended import Batch, assert_near
from tests.integrations.servers import Import, is_installed
from tests.integrations.vllm.conftest import LAYER, ImplOf

pytestmark = pytest.mark.skipif(not is_installed("vllm"), reason="needs vLLM: make test-vllm")


def common_metadata(vllm: Import, batch: Batch) -> Any:
    """Return a batch as vLLM's model runner describes it to every builder."""
    starts = torch.tensor([0, *batch.q_lens]).cumsum(0).int()
    seq_lens = torch.tensor(batch.seq_lens).int()
    return vllm("vllm.v1.attention.backend").CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=len(batch.q_lens),
        num_actual_tokens=sum(batch.q_lens),
        max_query_len=max(batch.q_lens),
        max_seq_len=max(batch.seq_lens),
        block_table_tensor=batch.table,
        slot_mapping=torch.zeros(sum(batch.q_lens)).long(),
        seq_lens_cpu_upper_bound=seq_lens,
    )


@pytest.mark.parametrize("q_lens", [(1, 1, 1), (3, 3, 3), (2, 1, 3)])
def test_a_built_batch_is_decoded(vllm: Import, impl_of: ImplOf, q_lens: tuple[int, ...]) -> None:
    """Requests with drafts, of equal numbers or not, are decodes of one batch, not prefills."""
    dense = vllm("mlagen.integrations.vllm.dense")
    batch = Batch(576, q_lens, (40, 3, 64))
    builder = object.__new__(dense.MlagenMLAMetadataBuilder)
    builder.device, builder.dcp_world_size, builder.use_pcp = torch.device("cpu"), 1, False
    builder.metadata_cls, builder.reorder_batch_threshold = dense.MLACommonMetadata, 4
    builder.model_config = SimpleNamespace(get_head_size=lambda: 576)
    impl = impl_of(dense.MlagenMLAImpl)

    metadata = builder.build(0, common_metadata(vllm, batch))
    out, _ = impl.forward_mqa(batch.query, batch.cache, metadata, LAYER)

    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    want, _ = batch.expected(batch.query, batch.cache, impl.scale)
    assert_near(out, want)
