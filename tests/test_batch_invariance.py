"""Batch-invariant calls: the bits of a request are those that it has alone, whatever the batch.

On the CPU backend, and by the sm80 kernels themselves, emulated; ``tests/gpu`` has every kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper
from mlagen.errors import ArgumentError
from mlagen.families.dispatch import GQA, MLA
from mlagen.families.gqa import plan as gqa_plan
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla.args import MlaArgs
from mlagen.mla import BatchMLAPagedAttentionWrapper
from mlagen.settings import current_settings
from mlagen.spec import fixed_splits
from tests.emulator.emulated import COMPILER, replace_launches
from tests.families.launches import launched, record_launches
from tests.kernels import SM_80
from tests.problems import invariance as inv
from tests.problems.invariance import Batch, Facts, Form
from tests.problems.problem import E4M3

N = 128  # tokens of an emulated split
LENS = (0, 1, N - 1, N, N + 1, 3 * N + 5)

FORMS: dict[str, tuple[Form, Facts]] = {
    "mla": (inv.mla, Facts()),
    "ragged mla": (inv.mla_ragged, Facts(q_len=4)),
    "a rank of DCP": (inv.mla_dcp, Facts(heads=1)),
    "top-k indices": (inv.mla_sparse, Facts(kv="fp8_ds_mla")),
    "two pools": (inv.dsv4, Facts(kv="dsv4")),
    "xqa_mla": (inv.xqa_mla, Facts(dtype=E4M3)),
    "xqa_batch_mla": (inv.xqa_batch_mla, Facts(q_len=2)),
    "flare": (inv.flare, Facts(min_len=1)),
    "mla wrapper": (inv.mla_wrapper, Facts(q_len=2)),
    "gqa": (inv.gqa, Facts(kv_heads=2, head_dim=64, q_len=4, window=200, soft_cap=20.0)),
    "ragged gqa": (inv.gqa_ragged, Facts(kv_heads=4, head_dim=64, q_len=3, kv="e4m3")),
    "trtllm_gqa": (inv.trtllm_gqa, Facts(kv_heads=1, heads=8, head_dim=64, kv="int8")),
    "xqa": (inv.xqa, Facts(kv_heads=8, head_dim=64)),
    "gqa wrapper": (inv.gqa_wrapper, Facts(kv_heads=2, head_dim=64)),
}


@pytest.mark.parametrize(("form", "facts"), FORMS.values(), ids=FORMS)
def test_the_cpu_backend_is_batch_invariant(form: Form, facts: Facts) -> None:
    """Out and LSE of each request have the bits that they have alone."""
    requests = inv.build(facts, LENS, "cpu")
    expected = inv.alone(form, requests)
    for seed in range(4):
        batch = inv.random_batch(requests, seed, 12)
        assert inv.differing(form(batch), batch, expected) == []


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compute calls by the sm80 kernels, with short splits; return the number of SMs."""
    sm_count = [8]
    record_launches(monkeypatch, arch=SM_80)
    monkeypatch.setattr(fixed_splits, "SM80_SPLIT_TOKENS", N)
    for calls, plan in ((MLA, mla_plan), (GQA, gqa_plan)):
        # No line of a test: the launches see the number of SMs when they are planned.
        def run(args: Any, *_: object, calls: Any = calls, plan: Any = plan) -> Any:
            replace_launches(monkeypatch, plan, sm_count=sm_count[0], seed=len(args))
            args, problem = calls.family.validate(args)
            on_gpu = replace(problem, device=torch.device("cuda", 0))
            launcher = calls.plan(args, on_gpu, current_settings())
            launcher = replace(launcher, problem=problem)
            return calls.launch(launcher, args)

        monkeypatch.setattr(calls, "run", run)
    return sm_count


# The form, its facts, and the most splits of a request.
EMULATED: dict[str, tuple[str, dict[str, Any], int]] = {
    "mla": ("mla", {"heads": 8}, 16),
    "ragged mla": ("ragged mla", {"heads": 8}, 16),
    "mla of two splits": ("mla", {"heads": 8}, 2),
    "gqa": ("gqa", {"heads": 8}, 16),
    "gqa wrapper": ("gqa wrapper", {"heads": 16}, 2),
    "ragged gqa": ("ragged gqa", {"heads": 8}, 16),
}


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("name", "facts", "max_splits"), EMULATED.values(), ids=EMULATED)
def test_the_emulated_kernels_are_batch_invariant(
    name: str,
    facts: dict[str, Any],
    max_splits: int,
    emulated: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the batch, SMs and workspace; some bits change without the mode."""
    most = dict.fromkeys((16, 32, 64), max_splits)
    monkeypatch.setattr(fixed_splits, "SM80_MAX_SPLITS", most)
    form, given = FORMS[name]
    requests = inv.build(replace(given, **facts), LENS, "cpu")
    expected = inv.alone(form, requests)
    whole = Batch(of=requests, idx=torch.arange(requests.count), batch_invariant=False)
    usual = form(whole)
    assert inv.differing(usual, whole, expected)
    for one, near in zip(form(replace(whole, batch_invariant=True)), usual, strict=True):
        torch.testing.assert_close(one, near, atol=0.02, rtol=0.02)
    for seed in range(2):
        emulated[0] = 1 + 7 * seed
        batch = inv.random_batch(requests, seed, 8, workspace_bytes=12 << (20 + seed))
        assert inv.differing(form(batch), batch, expected) == []


def test_a_small_workspace_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the bytes of all splits, of their states, and of the number of each row."""
    launches = record_launches(monkeypatch, arch=SM_80)
    needed = 8 * 16 * (4 * (512 + 1) * 4 + 4)  # requests, heads, splits
    requests = inv.build(Facts(), [10] * 8, "cpu")
    args = MlaArgs(
        query=requests.query[:8],
        kv_cache=requests.pools["cache"],
        workspace_buffer=torch.zeros(needed, dtype=torch.uint8),
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=requests.tables[:8],
        seq_lens=requests.lens[:8],
        max_seq_len=4096,
        batch_invariant=True,
    )
    assert launched(args, launches).families == ["mla_sm80", "combine"]
    rule = f"expected {needed} bytes or more for this call, got {needed - 1} bytes"
    with pytest.raises(ArgumentError, match=f"^workspace_buffer: {rule}$"):
        launched(args._replace(workspace_buffer=args.workspace_buffer[:-1]), launches)


@pytest.mark.parametrize("is_on", [False, True])
def test_a_plan_for_graphs_has_a_bound_of_the_lengths(is_on: bool) -> None:
    """Replays may have one request with all page ids; without the mode a mean is enough."""
    requests = inv.build(Facts(kv_heads=2, head_dim=64, page_size=64), (70, 1), "cpu")
    csr = Batch(of=requests, idx=torch.arange(2)).csr()
    names = {"indptr": 3, "indices": 40, "last_page_len": 2}
    buffers: dict[str, Any] = {
        f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32)
        for name, size in names.items()
    }
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(0), "NHD", use_cuda_graph=True, **buffers
    )
    sizes: dict[str, Any] = {**csr, "num_qo_heads": 16, "num_kv_heads": 2, "head_dim": 64}
    sizes |= {"page_size": 64, "q_data_type": torch.bfloat16}
    wrapper.plan(**sizes, disable_split_kv=is_on)
    assert wrapper._plan is not None
    assert wrapper._plan.max_kv_len == 64 * (40 if is_on else 20)

    mla = inv.build(Facts(), (70, 1), "cpu")
    given = Batch(of=mla, idx=torch.arange(2))
    ids = given.csr()
    parts: dict[str, Any] = {
        "qo_indptr": given.offsets,
        "kv_indptr": ids["indptr"],
        "kv_indices": ids["indices"],
        "kv_len_arr": given.lens,
    }
    own: dict[str, Any] = {name: part.clone() for name, part in parts.items()}
    graph = BatchMLAPagedAttentionWrapper(torch.empty(0), use_cuda_graph=True, **own)
    sizes = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 64}
    sizes |= {"causal": True, "sm_scale": 1.0}
    sizes |= dict.fromkeys(("q_data_type", "kv_data_type"), torch.bfloat16)
    graph.plan(**parts, **sizes, batch_invariant=is_on)
    assert graph._plan is not None
    assert graph._plan.max_kv_len == (3 * 64 if is_on else 96)


def test_a_request_to_turn_the_mode_off_beside_fixed_splits_is_an_error() -> None:
    """Both say whether a plan is batch-invariant."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    given: dict[str, Any] = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    for name, size in {"indptr": 2, "indices": 1, "last_page_len": 1}.items():
        given[name] = torch.zeros(size, dtype=torch.int32)
    rule = "expected None or True with fixed_split_size or disable_split_kv, got False"
    requested: tuple[dict[str, Any], ...] = ({"fixed_split_size": 2048}, {"disable_split_kv": True})
    for keywords in requested:
        with pytest.raises(ArgumentError, match=f"^batch_invariant: {rule}$"):
            wrapper.plan(**given, **keywords, batch_invariant=False)
