"""Batch-invariant MLA calls by the sm90 kernels themselves, emulated: bits, values and phases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mlagen.families.common import launchers
from mlagen.families.dispatch import MLA
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.runtime.semaphores import new_schedule_id
from mlagen.settings import current_settings
from mlagen.spec.mla.sm90 import SEMAPHORE_BYTES, MlaSm90Spec
from tests.emulator.emulated import COMPILER, encode, replace_launches
from tests.emulator.mla_calls import words_beside_workspace
from tests.families.launches import record_launches
from tests.problems import invariance as inv
from tests.problems.invariance import Batch, Facts, Form
from tests.problems.problem import E4M3

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# One split, two from 192 tokens on, then one per 64 tokens, but three at most.
SPLIT_TOKENS = (64, 128)
SPLIT_PRODUCT = 192 * 128
MAX_SPLITS = 3
LENS = (0, 1, 127, 128, 129, 192, 193, 397, 640)
_SM_COUNTS = (1, 9)


@dataclass
class Gpu:
    """The GPU that runs the next calls, and the plans of the calls before."""

    sm_count: int
    num_slots: list[int]
    launches: int = 1  # of each call
    seed: int = 0  # of the order in which warps come


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Compute calls by the sm90 kernels, with short splits, and few of them."""
    found = Gpu(_SM_COUNTS[0], [])
    beside = words_beside_workspace(max(_SM_COUNTS))
    record_launches(monkeypatch)
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "sm90")
    current_settings.cache_clear()
    monkeypatch.setattr(mla_plan, "new_schedule_id", new_schedule_id)
    monkeypatch.setattr(mla_maps, "encode", encode)
    monkeypatch.setattr(launchers, "semaphores_of", lambda *_: beside.data_ptr())
    for name in ("request_split_tokens", "list_split_tokens"):
        monkeypatch.setattr(MlaSm90Spec, name, SPLIT_TOKENS)
    monkeypatch.setattr(MlaSm90Spec, "split_product", SPLIT_PRODUCT)
    monkeypatch.setattr(MlaSm90Spec, "max_splits", MAX_SPLITS)

    def run(args: Any, *_others: object) -> Any:
        replace_launches(monkeypatch, mla_plan, sm_count=found.sm_count, seed=found.seed)
        args, problem = MLA.family.validate(args)
        on_gpu = replace(problem, device=torch.device("cuda", 0))
        launcher = MLA.plan(args, on_gpu, current_settings())
        assert isinstance(launcher.plan, mla_plan.MlaSm90Plan)
        found.num_slots.append(launcher.plan.num_slots)
        for _ in range(found.launches):
            results = MLA.launch(replace(launcher, problem=problem), args)
        assert not beside[: SEMAPHORE_BYTES // 4].any()
        return results

    monkeypatch.setattr(MLA, "run", run)
    return found


FORMS: dict[str, tuple[Form, Facts]] = {
    "64 rows": (inv.mla, Facts(heads=64)),
    "16 rows, 2 tokens": (inv.mla, Facts(heads=7, q_len=2)),
    "ragged, 2 members": (inv.mla_ragged, Facts(heads=100, q_len=2)),
    "e4m3": (inv.mla, Facts(heads=40, dtype=E4M3)),
    "lists": (inv.mla_sparse, Facts(heads=30)),
    "lists over fp8_ds_mla": (inv.mla_sparse, Facts(heads=64, kv="fp8_ds_mla")),
    "pages of fp8_ds_mla": (inv.mla, Facts(heads=8, q_len=4, kv="fp8_ds_mla")),
    "two pools": (inv.dsv4, Facts(heads=64, kv="dsv4")),
}


@pytest.mark.parametrize(("form", "facts"), FORMS.values(), ids=FORMS)
def test_a_request_has_the_bits_that_it_has_alone(form: Form, facts: Facts, gpu: Gpu) -> None:
    """Whatever the batch, SMs and workspace: in one phase or several; not without the mode."""
    requests = inv.build(facts, LENS, "cpu")
    expected = inv.alone(form, requests)
    gpu.sm_count = _SM_COUNTS[1]
    whole = Batch(of=requests, idx=torch.arange(requests.count), batch_invariant=False)
    usual = form(whole)
    assert inv.differing(usual, whole, expected)
    for one, near in zip(form(replace(whole, batch_invariant=True)), usual, strict=True):
        torch.testing.assert_close(one, near, atol=0.02, rtol=0.02)
    all_slots = gpu.num_slots[-1]
    for seed, sm_count in enumerate(_SM_COUNTS):
        gpu.sm_count = sm_count
        for size in (1 << 25, 1 << 19):
            batch = inv.random_batch(requests, seed, 8, workspace_bytes=size)
            assert inv.differing(form(batch), batch, expected) == []
    assert gpu.num_slots[-1] < all_slots


def test_equal_requests_that_are_throttled_have_the_bits_that_they_have_alone(gpu: Gpu) -> None:
    """The progress of CTAs, which equal splits throttle, lies in no slot of a split."""
    form, facts = FORMS["e4m3"]
    requests = inv.build(facts, [max(LENS)] * 4, "cpu")
    expected = inv.alone(form, requests)
    gpu.sm_count = 2
    slot_bytes = 64 * (512 * 2 + 16)  # of 64 rows

    for num_slots in (12, 13):  # of all splits, and one more
        size = num_slots * slot_bytes
        batch = Batch(of=requests, idx=torch.arange(requests.count), workspace_bytes=size)
        assert inv.differing(form(batch), batch, expected) == []
        assert gpu.num_slots[-1] == num_slots


@pytest.mark.parametrize("seed", range(1, 17))
def test_lists_without_tokens_may_come_last(seed: int, gpu: Gpu) -> None:
    """The combine takes the place of their Q, which nothing but the QK warps waits for."""
    form, facts = FORMS["two pools"]
    requests = inv.build(facts, (397, 0, 0), "cpu")
    expected = inv.alone(form, requests)
    gpu.seed = seed
    batch = Batch(of=requests, idx=torch.arange(requests.count))
    assert inv.differing(form(batch), batch, expected) == []


def test_phases_of_a_cached_schedule_are_right(gpu: Gpu) -> None:
    """The next launch begins before another warp has published the first work item."""
    form, facts = FORMS["lists over fp8_ds_mla"]
    requests = inv.build(facts, LENS, "cpu")
    gpu.sm_count = _SM_COUNTS[1]
    batch = inv.random_batch(requests, 1, 8, workspace_bytes=1 << 19)
    first = form(batch)
    gpu.launches = 2
    for one, other in zip(form(batch), first, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
