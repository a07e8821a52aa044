"""Sparse layers of MiniMax-M3 and Qwen3.8, whose decode is called as SGLang calls its own."""

from __future__ import annotations

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Log, Patch
from tests.integrations.attended import assert_near
from tests.integrations.servers import Import, is_installed, stub
from tests.integrations.sglang.conftest import layer, runner
from tests.integrations.sglang.test_warm_up import facts_of
from tests.problems.sparse_gqa_cases import msa, qsa

QWEN = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}


@pytest.fixture
def indexed(sglang: Import) -> ModuleType:
    """Return the module of the hooks."""
    return sglang("mlagen.integrations.sglang.indexed")


@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
def test_a_step_attends_to_the_blocks_of_its_indices(
    sglang: Import, indexed: ModuleType, kv: str, monkeypatch: Patch
) -> None:
    """What SGLang decodes with slots of its own, or other pages, is left to it."""
    scale = 0.5 if kv == "e4m3" else 1.0
    case = msa("", seq_lens=(500, 130, 0), kv=kv, output_scale=scale)
    problem = case.build("cpu")
    step = {"page_table": problem.block_tables, "cache_seqlens_int32": problem.seq_lens}
    backend = SimpleNamespace(page_size=128, forward_metadata=SimpleNamespace(**step))
    call: dict[str, Any] = dict.fromkeys(("sink", "req_to_token", "slot_ids", "q_scale"))
    call |= {"q": problem.query, "topk_idx": problem.indices, "seq_lens": problem.seq_lens}
    call |= {
        "k_cache": problem.store.key.flatten(0, 1),
        "v_cache": problem.store.value.flatten(0, 1),
    }
    call |= {"block_size": 128, "page_size": 128, "sm_scale": None}
    scales = (case.scale, case.output_scale) if kv == "e4m3" else (None, None)
    call |= {"k_scale": scales[0], "v_scale": scales[1], "hisparse_slots": None}

    def theirs(**_: Any) -> str:
        return "SGLang's"

    problem.check(indexed.attend_to_blocks([backend], theirs, **call))

    for change in ({"hisparse_slots": 1}, {"page_size": 64}, {"q": problem.query[:2]}):
        assert indexed.attend_to_blocks([backend], theirs, **call | change) == "SGLang's"
    assert indexed.attend_to_blocks([backend, backend], theirs, **call) == "SGLang's"
    if is_installed("sglang"):  # with blocks that another layer has chosen
        module = sglang("sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse")
        hooked = partial(indexed.attend_to_blocks, [backend], theirs)
        monkeypatch.setattr(module, "flash_decode_with_gqa_share_sparse", hooked)
        caches = call["k_cache"], call["v_cache"], torch.empty(3, 2, 128), None, None, None
        step_of = (None, None, problem.seq_lens, 500, 1, 128, 4, 0, 0)
        named = {"page_size": 128, "cached_topk_idx": problem.indices}
        named |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
        _, out = module.minimax_sparse_decode(problem.query, None, *caches, *step_of, **named)
        problem.check(out)


def test_a_step_attends_to_the_tokens_of_its_indices(sglang: Import, indexed: ModuleType) -> None:
    """Rows of drafts have requests of their own, and no token beyond their lengths is read."""
    case = qsa("", page_size=1, seq_lens=(70, 33), requests=(0, 1, 1, 0), kv_heads=2)
    problem = case.build("cpu")
    lengths = torch.tensor([case.seq_lens[each] for each in case.requests], dtype=torch.int32)
    named = problem.indices[:, :-1].clone()
    named[:, 0] = torch.where(named[:, 0] < 0, lengths, named[:, 0])
    requests = torch.tensor(case.requests)
    caches = problem.store.key.flatten(0, 1), problem.store.value.flatten(0, 1)
    step = SimpleNamespace(sequence_lengths=lengths, row_req_pool_indices=None)
    step.token_to_batch_idx, step.token_slot_table = requests, problem.block_tables
    theirs = sglang("sglang.srt.layers.attention.qwen_sparse_attn_backend").QwenSparseAttnBackend
    backend = SimpleNamespace(
        _resolve_metadata=lambda _: step,
        _expand_block_indices=lambda indices, _: indices,
        _logical_to_physical=getattr(theirs, "_logical_to_physical", None),
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda _: caches[0], get_value_buffer=lambda _: caches[1]
        ),
        req_to_token_pool=SimpleNamespace(req_to_token=problem.block_tables),
    )
    attention = layer(case.heads, case.head_dim, case.kv_heads)
    attention.scaling = case.head_dim**-0.5
    given = (problem.query, attention, SimpleNamespace(req_pool_indices=requests), named)

    out = indexed.attend_to_tokens(None, backend, *given)

    problem.check(out.view(problem.query.shape))
    step.row_req_pool_indices = requests
    assert torch.equal(indexed.attend_to_tokens(None, backend, *given), out)
    if is_installed("sglang"):
        caches = caches[0].nan_to_num(), caches[1].nan_to_num()  # SGLang multiplies them by zero
        assert_near(out, theirs._forward_paged_attention(backend, *given))


@pytest.mark.parametrize(
    ("architecture", "fields", "page_size", "kinds"),
    [
        ("MiniMaxM3SparseForCausalLM", {}, 128, [(128, 0), (128, 128)]),
        ("MiniMaxM3SparseForCausalLM", {}, 64, [(64, 0)]),
        ("Qwen4ExpForCausalLM", QWEN, 1, [(1, 1)]),
        ("LlamaForCausalLM", {}, 64, [(64, 0)]),
    ],
)
def test_the_model_says_which_kernels_are_warmed_up_and_what_is_replaced(
    *,
    mha: ModuleType,
    indexed: ModuleType,
    calls: list[Any],
    caplog: Log,
    monkeypatch: Patch,
    architecture: str,
    fields: dict[str, Any],
    page_size: int,
    kinds: list[tuple[int, int]],
) -> None:
    """A page of MiniMax-M3 is a block; other pages leave its sparse layers to SGLang."""
    hooks: list[Any] = []
    monkeypatch.setattr(indexed, "hook", lambda *hook: hooks.append(hook))
    made = runner(use_mla_backend=False, architecture=architecture, page_size=page_size)
    vars(made.model_config.hf_config).update(fields)

    mha.backend_of(made, "mlagen_mha")

    assert [(each["page_size"], each["sparse_block"]) for each in facts_of(calls)] == kinds
    is_replaced = any(block for _, block in kinds)
    assert len(hooks) == is_replaced
    warns = architecture.startswith("MiniMax") and not is_replaced
    assert ("pass --page-size" in caplog.text) is warns


def test_the_blocks_of_a_second_backend_are_left_to_sglang(
    indexed: ModuleType, monkeypatch: Patch
) -> None:
    """SGLang applies the first hook alone, which has the pages of the first backend's steps."""
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(indexed, "hook", hooks.setdefault)
    monkeypatch.setattr(indexed, "resolve_name", lambda _: stub(indexed._NEEDS[indexed._BLOCKS]))
    monkeypatch.setattr(indexed, "_dense", [])
    config = SimpleNamespace(architectures=["MiniMaxM3SparseForCausalLM"])
    made = SimpleNamespace(model_config=SimpleNamespace(hf_config=config), page_size=128)
    problem = msa("", seq_lens=(500, 130)).build("cpu")
    for tables in (problem.block_tables.flip(0), problem.block_tables):
        step = SimpleNamespace(page_table=tables, cache_seqlens_int32=problem.seq_lens)
        indexed.serve(made, SimpleNamespace(page_size=128, forward_metadata=step))
    caches = problem.store.key.flatten(0, 1), problem.store.value.flatten(0, 1)
    call = {"q": problem.query, "topk_idx": problem.indices, "block_size": 128, "page_size": 128}
    call |= dict(zip(("k_cache", "v_cache"), caches, strict=True))
    call |= dict.fromkeys(("sink", "sm_scale", "k_scale", "v_scale"))

    assert hooks[indexed._BLOCKS](lambda **_: "SGLang's", **call) == "SGLang's"


def test_another_sglang_is_rejected(indexed: ModuleType, monkeypatch: Patch) -> None:
    """Where the function that decodes has other parameters."""
    monkeypatch.setattr(indexed, "resolve_name", lambda _: stub("q k"))
    config = SimpleNamespace(architectures=["Qwen4ExpForCausalLM"], **QWEN)
    made = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    with pytest.raises(ValueError, match=r"_forward_paged_attention\(self, q, .*, got \(q, k\)$"):
        indexed.serve(made, None)
