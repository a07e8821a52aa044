"""Long sparse prefills over ``fp8_ds_mla`` rows, converted by vLLM's kernels."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.attended import attended
from tests.integrations.servers import is_installed
from tests.problems.mla_rows import store

BLOCK, TOP_K, HEADS = 64, 2048, 64
SEQ_LENS, Q_LENS = (5000, 2500), (300, 200)


@pytest.mark.skipif(not is_installed("vllm"), reason="needs vLLM with its kernels")
@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
@pytest.mark.parametrize("layers", [1, 3], ids=["a layer alone", "blocks of three layers in turn"])
def test_each_token_attends_to_its_converted_rows(layers: int, device: str) -> None:
    """The tokens of two requests see their top-k tokens, in a bf16 copy of the rows."""
    module = import_module("mlagen.integrations.vllm.sparse")
    generator = torch.Generator().manual_seed(4)
    num_blocks = [-(-seq_len // BLOCK) for seq_len in SEQ_LENS]
    blocks = sum(num_blocks)
    stored = store(torch.randn(blocks * BLOCK, 576, generator=generator), 512, "fp8_ds_mla")
    cache = torch.zeros(blocks, layers, BLOCK, 656, dtype=torch.uint8, device=device)
    cache[:, -1] = stored.rows.view(blocks, BLOCK, 656).to(device)
    order = torch.randperm(blocks, generator=generator).int()
    table = torch.zeros(2, max(num_blocks), dtype=torch.int32)
    for request, own in enumerate(torch.split(order, num_blocks)):
        table[request, : len(own)] = own
    requests = torch.tensor([0, 1]).repeat_interleave(torch.tensor(Q_LENS))
    indices = torch.cat(
        [
            torch.rand(q_len, seq_len, generator=generator).topk(TOP_K).indices
            for q_len, seq_len in zip(Q_LENS, SEQ_LENS, strict=True)
        ]
    ).int()
    indices[0, 100:] = -1
    query = torch.randn(len(requests), HEADS, 576, generator=generator).bfloat16().to(device)
    out = torch.full((len(requests), HEADS, 512), torch.nan, dtype=torch.bfloat16, device=device)
    dims = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    impl = SimpleNamespace(**dims, scale=192**-0.5)
    rows = torch.full((8192, 576), torch.nan, dtype=torch.bfloat16, device=device)
    conversion = module.Conversion(
        workspace=rows,
        num_rows=sum(SEQ_LENS),
        block_table=table.to(device),
        starts=torch.tensor([0, SEQ_LENS[0]]).int().to(device),
        request_ids=requests.int().to(device),
    )

    conversion.attend(
        *(impl, (query[..., :512], query[..., 512:]), cache[:, -1]),
        *(indices.to(device), BLOCK, out),
    )

    elements = stored.elements.view(blocks, BLOCK, 576)
    for token in range(0, len(requests), 37):
        own = elements[table[requests[token]].long()].flatten(0, 1)
        seen = own[indices[token][indices[token] >= 0].long()]
        want, _ = attended(query[token].cpu().double(), seen, impl.scale, 512)
        got = out[token].cpu().double()
        assert ((got - want).norm() / want.norm()) < 8e-3
