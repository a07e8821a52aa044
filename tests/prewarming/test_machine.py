"""Prewarming and the machine: jobs, GPUs and their targets, and the kernels that calls take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen.families.common import plan_sm80
from mlagen.families.common.problem import ProblemShape
from mlagen.families.mla import plan as mla_plan
from mlagen.models.config import GqaModel, MlaModel, find_model
from mlagen.models.kernels import ServingOptions, model_specs
from mlagen.prewarming import machine, run
from mlagen.prewarming.machine import usable_jobs
from mlagen.runtime.device import DeviceFacts
from mlagen.settings import P_DTYPES
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.variant import SUPPORTED, MlaVariant
from tests.families.shapes import mla_shape
from tests.fixture_types import Patch
from tests.kernels import mla_sm90_two_pools

CPUS, GIB, GROUP = 8, 1 << 30, "sys/fs/cgroup"
OLD_QUOTA = (f"{GROUP}/cpu/cpu.cfs_quota_us", f"{GROUP}/cpu/cpu.cfs_period_us")


@pytest.mark.parametrize(
    ("files", "jobs"),
    [
        ({}, CPUS),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   16777216 kB\n"}, CPUS),
        ({"proc/meminfo": "MemAvailable: 1048576 kB\n"}, 4),
        ({"proc/meminfo": "MemAvailable: 1024 kB\n"}, 1),
        ({f"{GROUP}/cpu.max": "250000 100000\n"}, 3),
        ({f"{GROUP}/cpu.max": "max 100000\n"}, CPUS),
        ({f"{GROUP}/memory.max": f"{GIB}\n"}, 4),
        ({f"{GROUP}/memory.max": "max\n"}, CPUS),
        (dict(zip(OLD_QUOTA, ("200000\n", "100000\n"), strict=True)), 2),
        (dict(zip(OLD_QUOTA, ("-1\n", "100000\n"), strict=True)), CPUS),
        ({f"{GROUP}/memory/memory.limit_in_bytes": f"{GIB // 2}\n"}, 2),
        ({f"{GROUP}/memory/memory.limit_in_bytes": "9223372036854771712\n"}, CPUS),
    ],
    ids=str,
)
def test_the_tightest_limit_decides(
    files: dict[str, str], jobs: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A container of two CPUs on a machine of a hundred compiles two kernels in parallel."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CPUS)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable_jobs(tmp_path) == jobs
    assert 1 <= usable_jobs() <= CPUS


def gpu(index: int, major: int, minor: int) -> DeviceFacts:
    """Return a GPU of that compute capability."""
    known: dict[str, Any] = {"name": "GPU", "sm_count": 132, "memory_bytes": 1 << 37}
    return DeviceFacts(index=index, major=major, minor=minor, **known)


# Two kernels that compile in 0.1 s each.
SMALL: dict[str, Any] = {"archs": "sm_80", "families": ["combine"], "dtype": "bf16"}
SMALL |= {"kv_lora_rank": [512, 256]}
NATIVE = "arch: expected a supported GPU for native, got"


@pytest.fixture
def seen(monkeypatch: Patch) -> list[DeviceFacts]:
    """Return the GPUs that the driver reports."""
    seen: list[DeviceFacts] = []
    monkeypatch.setattr(machine, "visible_devices", lambda: seen)
    return seen


def test_native_is_the_targets_of_the_visible_gpus(seen: list[DeviceFacts]) -> None:
    """Each supported target is selected once; an unsupported GPU is skipped."""
    seen += gpu(0, 9, 0), gpu(1, 9, 0), gpu(2, 7, 5), gpu(3, 8, 0)
    report = mlagen.prewarm(families=["combine"], dry_run=True)
    archs = dict.fromkeys(str(unit.spec.arch) for unit in report.units)
    assert list(archs) == ["sm_90a", "sm_80"]


@pytest.mark.parametrize(
    ("of_machine", "options", "message"),
    [
        ((), {}, f"{NATIVE} none; name targets instead, such as sm_90a"),
        ([(7, 5)], {}, f"{NATIVE} GPU (7.5); name targets instead, such as sm_90a"),
        ([(9, 0)], {**SMALL, "load": True}, "load: expected a visible GPU for sm_80, got sm_90a"),
    ],
    ids=["no GPU", "an unsupported one", "load on another target"],
)
def test_a_target_without_a_gpu_is_rejected(
    of_machine: Any, options: Any, message: str, seen: list[DeviceFacts], cache_dir: Path
) -> None:
    """The message names the GPUs found and an explicit target, and nothing is compiled."""
    seen += (gpu(0, *capability) for capability in of_machine)
    with pytest.raises(mlagen.UnsupportedError) as raised:
        mlagen.prewarm(**options)
    assert str(raised.value) == message
    assert not cache_dir.exists()


@pytest.mark.parametrize("is_writable", [True, False])
def test_load_loads_each_kernel_on_each_gpu_of_its_target(
    is_writable: bool, seen: list[DeviceFacts], cache_dir: Path, monkeypatch: Patch
) -> None:
    """Kernels are loaded on the GPUs of their target, from memory if the cache is unwritable."""
    seen += gpu(0, 8, 0), gpu(1, 9, 0), gpu(2, 8, 0)
    loaded: list[tuple[KernelSpec, int]] = []
    monkeypatch.setattr(run, "kernel_for", lambda spec, device: loaded.append((spec, device)))
    if not is_writable:
        cache_dir.write_text("a file where the folder should be")

    report = mlagen.prewarm(**SMALL, load=True)

    assert [unit.status for unit in report.units] == ["built", "built"]
    assert loaded == [(unit.spec, device) for unit in report.units for device in (0, 2)]
    assert report.loaded == 4


TPS, Q_LENS, KV_DTYPES = (1, 2, 4, 8), (1, 2, 4), (DType.BF16, DType.E4M3)
PLANS = (plan_sm80.plan_sm80_call, mla_plan.plan_mla_sm90_call)


@pytest.fixture(params=ARCHS, ids=str)
def arch(request: pytest.FixtureRequest, monkeypatch: Patch) -> Iterator[Arch]:
    """Simulate a GPU 0 of that architecture."""
    of_gpu: Arch = request.param
    major, minor = divmod(of_gpu.number, 10)
    facts = gpu(0, major, minor)
    for module in (plan_sm80, mla_plan):
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


# Models of each kind of attention: latent, sparse, without rope, hybrid, and with several heads.
MODELS = (
    *("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "glm-4.7-flash", "glm-5.3-flash"),
    *("kimi-k2", "kimi-k3", "gpt-oss-120b", "llama-3-70b", "gemma-4-31b", "qwen3.5-27b"),
    "step-3.5-flash",
)


@pytest.mark.parametrize("name", MODELS)
def test_every_call_finds_its_kernel(name: str, arch: Arch) -> None:
    """The kernel of every call is among those of its model."""
    model = find_model(name)
    use = ServingOptions(tp=tps(model), q_lens=Q_LENS, kv_dtypes=KV_DTYPES)
    taken = _mla_calls(model) if isinstance(model, MlaModel) else _gqa_calls(model)
    assert {*taken} - {*model_specs(arch, model, use)} == set()


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_every_call_over_two_pools_finds_its_kernel(name: str, arch: Arch) -> None:
    """Also a small one, whose tile does not follow from its heads."""
    model = find_model(name)
    variant = mla_sm90_two_pools().variant
    taken: set[object] = set()
    for tp, batch, tokens in product(tps(model), (1, 4, 128), (128, 640, 100_000)):
        taken.update(_mla_kernels(variant, mla_shape(batch, model.heads // tp, tokens)))

    assert taken - {*model_specs(arch, model, ServingOptions(tp=tps(model)))} == set()


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
        paged = mla_shape(4, model.heads // tp, 100_000, q_len)
        shape = paged.per_token() if lookup == "sparse" else paged
        yield from _mla_kernels(variant, shape)


def _mla_kernels(variant: MlaVariant, shape: ProblemShape) -> Iterator[object]:
    yield plan_sm80.plan_sm80_call(0, variant, shape)[0]
    for p_dtype_choice in P_DTYPES:
        sm90 = mla_plan.plan_mla_sm90_call(0, variant, shape, p_dtype_choice=p_dtype_choice)
        if sm90 is not None:
            yield sm90[0]


def _gqa_calls(model: GqaModel) -> Iterator[object]:
    dtypes: Any = {"query_dtype": DType.BF16, "out_dtype": DType.BF16}
    pages = (16, 32, 64) if model.is_hybrid else (16, 64)
    calls = product(model.heads_of_layers(), tps(model), Q_LENS, KV_DTYPES, pages)
    for layer, tp, q_len, kv, page_size in calls:
        variant = GqaVariant(**dtypes, kv_dtype=kv, head_dim=layer.head_dim, page_size=page_size)
        shape = mla_shape(4, layer.heads // tp, 100_000, q_len)
        shape = replace(shape, kv_heads=max(1, layer.kv_heads // tp))
        yield plan_sm80.plan_sm80_call(0, variant, shape)[0]
