"""Problems for the entry points of flashinfer.xqa."""

from __future__ import annotations

from itertools import product

import torch

from tests.cases import MlaCase
from tests.gqa_cases import DTYPES
from tests.gqa_problems import E4M3, GqaCase

XQA_CASES = (
    *(
        GqaCase(
            name=f"page {page}, {heads} x {group} heads of {head_dim}, window {window}, {dtypes}",
            seq_lens=(2, 15, 256, 514, 0),
            page_size=page,
            kv_heads=heads,
            group=group,
            head_dim=head_dim,
            window=window,
            sink=None if group == 8 else 3.0,
            layout="NHD" if window else "HND",
            cache_layout="strided" if page == 16 else "tuple",
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            out_dtype=dtypes.out_dtype,
            output_scale=1.0 if dtypes.kv == "16-bit" else 0.5,
        )
        for window, (page, heads, group, head_dim), dtypes in product(
            (0, 256), ((16, 2, 8, 128), (64, 4, 16, 32)), DTYPES
        )
    ),
    *(
        GqaCase(name=f"drafts of {q_len}, {mask} mask", seq_lens=(70, 300), q_len=q_len, mask=mask)
        for q_len, mask in ((2, None), (4, "causal"), (5, "full"), (33, "random"))
    ),
    GqaCase(name="ragged drafts", seq_lens=(70, 300, 9), q_lens=(3, 0, 2), mask="random"),
    GqaCase(name="split", seq_lens=(5000, 9), sink=3.0),
)

MLA_CASES = (
    *(
        MlaCase(
            name=f"page {page}, cache as {cache_layout}, {values} values, scale {scale}",
            page_size=page,
            cache_layout=cache_layout,
            values=values,
            dtype=E4M3,
            heads=128,
            seq_lens=(0, 2, page - 1, page, page + 1, 514),
            score_scale=scale * 192**-0.5,
            output_scale=scale,
            scores_take_bmm2=True,
        )
        for page, cache_layout, values, scale in (
            (16, "[P,ps,1,d]", "other cache", 1.0),
            (32, "[P,ps,1,d]", "shared", 0.5),
            (32, "[P,1,ps,d]", "other cache", 0.5),
            (64, "[P,1,ps,d]", "shared", 1.0),
            (64, "3-D", "other cache", 0.5),
            (128, "3-D", "shared", 0.5),
            (128, "strided", "other cache", 0.5),
            (48, "strided", "shared", 1.0),
        )
    ),
    *(
        MlaCase(
            name=f"{str(dtype)[6:]}, {heads} heads, {values} values",
            dtype=dtype,
            heads=heads,
            values=values,
            seq_lens=(2, 15, 256, 514, 2048),
            output_scale=0.5,
            scores_take_bmm2=True,
        )
        for dtype in (torch.bfloat16, torch.float16, E4M3)
        for heads, values in ((1, "shared"), (20, "other cache"), (128, "shared"))
    ),
)
