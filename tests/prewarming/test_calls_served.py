"""The kernels that calls of a model take on a GPU are among its prewarmed kernels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from mlagen.families.common.plan_sm80 import GqaProblemShape
from mlagen.families.gqa import select as gqa_plan
from mlagen.families.mla import select as mla_plan
from mlagen.models.config import GqaModel, MlaModel, find_model, preset_names
from mlagen.models.kernels import ServingOptions, model_specs
from mlagen.runtime.device import DeviceFacts
from mlagen.settings import P_DTYPES
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.mla.variant import SUPPORTED, MlaVariant
from tests.fixture_types import Patch

TPS, Q_LENS, KV_DTYPES = (1, 2, 4, 8), (1, 2, 4), (DType.BF16, DType.E4M3)
PLANS = (mla_plan.plan_call, mla_plan.plan_mla_sm90_call, gqa_plan.plan_gqa_sm80_call)


@pytest.fixture(params=ARCHS, ids=str)
def arch(request: pytest.FixtureRequest, monkeypatch: Patch) -> Iterator[Arch]:
    """Simulate a GPU 0 of that architecture."""
    of_gpu: Arch = request.param
    major, minor = divmod(of_gpu.number, 10)
    facts = DeviceFacts(
        index=0, name="GPU", major=major, minor=minor, sm_count=132, memory_bytes=1 << 37
    )
    for module in (mla_plan, gqa_plan):
        monkeypatch.setattr(module, "arch_of_device", lambda _: of_gpu)
        monkeypatch.setattr(module, "device_facts", lambda _: facts)
    for plan in PLANS:
        plan.cache_clear()
    yield of_gpu
    for plan in PLANS:
        plan.cache_clear()


def tps(model: MlaModel | GqaModel) -> list[int]:
    """Return tensor-parallel sizes that divide the heads."""
    return [tp for tp in TPS if model.heads % tp == 0]


@pytest.mark.parametrize("name", preset_names())
def test_every_call_finds_its_kernel(name: str, arch: Arch) -> None:
    """The kernel of every call is among those of its model."""
    model = find_model(name)
    use = ServingOptions(tp=tps(model), q_lens=Q_LENS, kv_dtypes=KV_DTYPES)
    taken = _mla_calls(model) if isinstance(model, MlaModel) else _gqa_calls(model)
    assert {*taken} - {*model_specs(arch, model, use)} == set()


def _mla_calls(model: MlaModel) -> Iterator[object]:
    lookups = ("paged", "sparse") if model.is_sparse else ("paged",)
    pairs = [(DType.BF16, kv) for kv in KV_DTYPES] + [(DType.E4M3, DType.E4M3)]
    for tp, q_len, (query, kv), lookup in product(tps(model), Q_LENS, pairs, lookups):
        variant = MlaVariant(
            query_dtype=query,
            kv_dtype=kv,
            kv_lora_rank=model.kv_lora_rank,
            qk_rope_head_dim=model.qk_rope_head_dim,
            lookup=lookup,
        )
        if not any(row.covers(variant) for row in SUPPORTED):
            assert (model.qk_rope_head_dim, query) == (0, DType.E4M3)  # no kernel supports that
            continue
        shape = {"batch": 4, "q_len": q_len, "tile_q_len": q_len, "tokens": 4 * q_len}
        heads = model.heads // tp
        call = {"device": 0, "variant": variant, "heads": heads, "max_kv_len": 100_000, **shape}
        yield mla_plan.plan_call(**call)[0]
        for p_dtype_choice in P_DTYPES:
            sm90 = mla_plan.plan_mla_sm90_call(**call, p_dtype_choice=p_dtype_choice)
            if sm90 is not None:
                yield sm90[0]


def _gqa_calls(model: GqaModel) -> Iterator[object]:
    dtypes = {"query_dtype": DType.BF16, "out_dtype": DType.BF16}
    for tp, q_len, kv, page_size in product(tps(model), Q_LENS, KV_DTYPES, (16, 64)):
        variant = GqaVariant(**dtypes, kv_dtype=kv, head_dim=model.head_dim, page_size=page_size)
        shape = GqaProblemShape(
            batch=4,
            q_len=q_len,
            max_q_len=q_len,
            heads=model.heads // tp,
            kv_heads=max(1, model.kv_heads // tp),
            total_rows=4 * q_len * model.heads // tp,
            max_kv_len=100_000,
        )
        yield gqa_plan.plan_gqa_sm80_call(0, variant, shape)[0]
