"""Sparse decode of the backend ``mlagen_dsa``, called as SGLang's models call it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.integrations.attended import E4M3, HEADS, assert_near, attended
from tests.integrations.sglang.conftest import runner
from tests.problems.mla_rows import store, viewed

SLOTS, TOP_K = 128, 8
COUNTS = (8, 3, 1)  # of a long request, a short one, and one that pads a CUDA graph


@pytest.mark.parametrize("row_format", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(COUNTS, id="a length for each token"),
        pytest.param((*COUNTS, 5), id="lengths of padding"),
        pytest.param(COUNTS[:2], id="tokens of padding"),
    ],
)
def test_a_step_attends_to_its_slots(
    dsa: ModuleType, row_format: str, lengths: tuple[int, ...]
) -> None:
    """A token sees the first of its slots, as many as its length says; padding gives zeros."""
    generator = torch.Generator().manual_seed(3)
    stored = store(torch.randn(SLOTS, 576, generator=generator), 512, row_format)
    rows = viewed(stored.rows, row_format).unsqueeze(1)
    cache = rows if row_format == "bf16" else rows.view(E4M3)  # as SGLang's pool returns it
    query = torch.randn(3, HEADS, 704, generator=generator).bfloat16()
    q_nope, q_rope = query[..., :512].contiguous(), query[..., 640:]
    slots = torch.randint(SLOTS, (3, TOP_K), generator=generator)
    chosen = slots.where(torch.arange(TOP_K) < torch.tensor(COUNTS)[:, None], -1).int()
    backend = dsa.MlagenDSABackend(runner())
    backend.hisparse_coordinator, backend.use_fused_topk = None, True
    backend.dsa_topk_backend = SimpleNamespace(is_sgl_kernel=lambda: True)
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda _: cache)
    backend.forward_metadata = SimpleNamespace(
        dsa_cache_seqlens_int32=torch.tensor(lengths).int(),
        dsa_cu_seqlens_q=None,
        dsa_cu_seqlens_k=None,
        dsa_max_seqlen_q=1,
    )
    sizes = {"tp_q_head_num": HEADS, "head_dim": 576, "v_head_dim": 512}
    facts = {"scaling": 192**-0.5, "logit_cap": 0.0, "layer_id": 0, "is_cross_attention": False}
    layer = SimpleNamespace(**sizes, **facts)

    out = backend.forward_decode(
        q_nope, None, None, layer, None, q_rope=q_rope, topk_indices=chosen
    )

    assert out.shape == (3, HEADS, 512)
    both = torch.cat([q_nope, q_rope], dim=-1).double()
    for token, count in enumerate((*lengths[:3], 0)[:3]):
        want, _ = attended(both[token], stored.elements[slots[token, :count]], 192**-0.5, 512)
        assert_near(out[token], want)


def test_a_soft_cap_is_refused(dsa: ModuleType) -> None:
    """A layer with a feature that no kernel has fails, and says which."""
    names = ("q_rope", "kv_cache", "q_nope", "page_table", "cache_seqlens", "cu_seqlens_q")
    rest = {"cu_seqlens_k": None, "max_seqlen_q": 1, "v_head_dim": 512, "sm_scale": 1.0}
    call = dict.fromkeys(names) | rest | {"page_size": 1, "logit_cap": 30.0}
    with pytest.raises(NotImplementedError, match="logit_cap"):
        dsa.MlagenDSABackend(runner())._forward_fa3(**call)
