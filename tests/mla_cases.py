"""The MLA decode problems that every backend is tested on."""

from __future__ import annotations

from itertools import product

import torch

from tests.cases import MlaCase

EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 300)

CASES = (
    *(
        MlaCase(
            name=f"page size {page}", page_size=page, seq_lens=(*EDGES, page - 1, page, page + 1)
        )
        for page in (1, 8, 16, 32, 64, 128)
    ),
    *(
        MlaCase(name=f"{heads} heads", heads=heads, seq_lens=(0, 5, 130), seed=heads)
        for heads in (1, 3, 8, 15, 16, 17, 24, 32, 33, 48, 63, 64, 65, 100, 126, 128, 129, 200, 256)
    ),
    *(
        MlaCase(
            name=f"{q_len} query tokens of {heads} heads",
            heads=heads,
            q_len=q_len,
            seq_lens=(0, 1, q_len - 1, q_len, q_len + 1, 64 + q_len // 2, 200),
            with_sinks=True,
            seed=q_len,
        )
        for heads, q_len in ((1, 2), (1, 33), (3, 7), (16, 2), (16, 4), (24, 3), (128, 2), (128, 4))
    ),
    *(
        MlaCase(
            name=f"{str(dtype)[6:]}, kv_lora_rank {rank}, page {page}, {heads} heads",
            dtype=dtype,
            kv_lora_rank=rank,
            page_size=page,
            heads=heads,
            seq_lens=(0, 1, 33, 70, 257),
            with_sinks=True,
            output_scale=0.7,
        )
        for dtype, rank, page, heads in product(
            (torch.bfloat16, torch.float16), (512, 256), (1, 16, 64), (8, 30, 128)
        )
    ),
    MlaCase(name="long enough to split", seq_lens=(5000,), heads=16),
    MlaCase(name="long enough to split, 128 heads", seq_lens=(5000, 1), heads=128, with_sinks=True),
    MlaCase(
        name="split and ragged", seq_lens=(9000, 0, 40, 2500), heads=5, q_len=3, with_sinks=True
    ),
    MlaCase(name="split, fp16, rank 256", seq_lens=(7001,), dtype=torch.float16, kv_lora_rank=256),
    MlaCase(name="131072 tokens", seq_lens=(131072,), heads=8, page_size=128),
    MlaCase(name="all requests empty", seq_lens=(0, 0, 0), with_sinks=True),
    MlaCase(name="growing scores", seq_lens=(700,), query_magnitude=30.0, heads=128),
    MlaCase(name="no scale", seq_lens=(200,), score_scale=0.0),
    MlaCase(name="negative scale", seq_lens=(200,), score_scale=-0.05),
    *(
        MlaCase(name=f"cache as {form}", seq_lens=(1, 64, 200), cache_form=form, page_size=page)
        for form, page in product(("[P,1,ps,d]", "[P,ps,1,d]", "strided"), (1, 16, 64))
    ),
    MlaCase(
        name="ragged queries", seq_lens=(5, 100, 64, 300, 0), q_lens=(1, 4, 0, 17, 2), heads=16
    ),
    MlaCase(
        name="ragged queries, split", seq_lens=(4000, 33), q_lens=(3, 1), heads=128, with_sinks=True
    ),
)
