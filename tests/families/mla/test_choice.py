"""Kernel choice of MLA calls; needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlagen.errors import DriverError, UnsupportedError
from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.families.mla.launch_sm80 import MlaSm80Launcher
from mlagen.families.mla.launch_sm90 import MlaSm90Launcher
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from tests.families.launches import Launch, launched, record_launches
from tests.families.mla.conftest import E4M3, RAGGED, UNIFORM
from tests.problems.mla import MlaCase

SUPPORTED = {
    "bf16": UNIFORM,
    "fp16": replace(UNIFORM, dtype=torch.float16),
    "ragged": RAGGED,
    "separate parts": replace(UNIFORM, separate_rope=True, flat_tables=True),
    "pages of 48": replace(UNIFORM, page_size=48),
    "e4m3": replace(UNIFORM, dtype=E4M3),
    "e4m3, ragged": replace(RAGGED, dtype=E4M3),
    "e4m3, separate parts": replace(UNIFORM, dtype=E4M3, separate_rope=True, flat_tables=True),
    "e4m3, pages of 16": replace(UNIFORM, dtype=E4M3, page_size=16),
}
CONVERTED = {
    "e4m3, sparse": replace(UNIFORM, dtype=E4M3, top_k=4096),
    "e4m3, pages of 8": replace(UNIFORM, dtype=E4M3, page_size=8),
    "640-byte rows": replace(UNIFORM, dtype=E4M3, kv_format="fp8_per_token"),
}
UNSUPPORTED = {
    "rank 256": replace(UNIFORM, kv_lora_rank=256),
    "no rope": replace(UNIFORM, qk_rope_head_dim=0),
    "sparse": replace(UNIFORM, top_k=70),
    "separate values": replace(UNIFORM, values="other pages"),
    "a bias": replace(UNIFORM, bias="for each head"),
    "pages of 8": replace(UNIFORM, page_size=8),
    "e4m3, rank 256": replace(UNIFORM, dtype=E4M3, kv_lora_rank=256),
}


@pytest.mark.parametrize("case", SUPPORTED.values(), ids=SUPPORTED)
@pytest.mark.parametrize("kernel", ["auto", "sm80", "sm90"])
def test_calls_that_both_kernels_support_use_the_requested_one(
    case: MlaCase, kernel: str, launches: list[Launch]
) -> None:
    """Without a request the sm90 kernel is used, unless the call is small."""
    inputs = case.build("cpu").inputs()._replace(max_seq_len=10000)
    call, _, _ = launched(inputs, launches, kernel)

    is_sm80 = kernel == "sm80"
    sm90_family = "mla_sm90_fp8" if case.dtype is E4M3 else "mla_sm90"
    assert isinstance(call, MlaSm80Launcher if is_sm80 else MlaSm90Launcher)
    assert launches[0].family == ("mla_sm80" if is_sm80 else sm90_family)


@pytest.mark.parametrize("case", CONVERTED.values(), ids=CONVERTED)
@pytest.mark.parametrize("kernel", ["auto", "sm80", "sm90"])
def test_fp8_kv_calls_use_the_fp8kv_kernel(
    case: MlaCase, kernel: str, launches: list[Launch]
) -> None:
    """Calls with converted KV use the sm90 kernel for an FP8 KV cache."""
    inputs = case.build("cpu").inputs()._replace(max_seq_len=5000)
    call, _, _ = launched(inputs, launches, kernel)

    is_sm80 = kernel == "sm80"
    assert isinstance(call, MlaSm80Launcher if is_sm80 else MlaSm90Launcher)
    assert launches[0].family == ("mla_sm80" if is_sm80 else "mla_sm90_fp8kv")


@pytest.mark.parametrize("page_size", [16, 64])
def test_fp16_p_selects_another_kernel_for_e4m3(
    page_size: int, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``MLAGEN_MLA_P_DTYPE=fp16`` changes the kernel of calls with e4m3 query and cache only."""
    monkeypatch.setenv("MLAGEN_MLA_P_DTYPE", "fp16")
    current_settings.cache_clear()
    for dtype in (E4M3, torch.bfloat16):
        case = replace(UNIFORM, dtype=dtype, page_size=page_size)
        launched(case.build("cpu").inputs(), launches, "sm90")

    assert [launch.family for launch in launches] == ["mla_sm90_fp8kv", "mla_sm90"]


def test_a_small_call_uses_the_sm80_kernel(launches: list[Launch]) -> None:
    """A small call uses the sm80 kernel, unless the settings force the sm90 kernel."""
    inputs = UNIFORM.build("cpu").inputs()

    by_itself, _, _ = launched(inputs, launches, "auto")
    by_name, _, _ = launched(inputs, launches, "sm90")

    assert isinstance(by_itself, MlaSm80Launcher)
    assert isinstance(by_name, MlaSm90Launcher)


@pytest.mark.parametrize("case", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_calls_use_the_sm80_kernel(case: MlaCase, launches: list[Launch]) -> None:
    """Calls that the sm90 kernel does not support are rejected only if the settings force it."""
    inputs = case.build("cpu").inputs()

    call, _, _ = launched(inputs, launches, "auto")

    assert isinstance(call, MlaSm80Launcher)
    launches.clear()
    with pytest.raises(UnsupportedError, match=r"^MLAGEN_MLA_KERNEL=sm90: no such kernel for"):
        launched(inputs, launches, "sm90")
    assert launches == []


@pytest.mark.parametrize("arch", [Arch(80, ""), Arch(100, "f")], ids=str)
def test_another_gpu_uses_the_sm80_kernel(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the settings force the sm90 kernel, the message names the GPU and the supported calls."""
    launches = record_launches(monkeypatch, arch=arch)
    inputs = UNIFORM.build("cpu").inputs()

    call, _, _ = launched(inputs, launches, "auto")

    assert isinstance(call, MlaSm80Launcher)
    with pytest.raises(UnsupportedError) as caught:
        launched(inputs, launches, "sm90")
    assert str(caught.value) == (
        f"MLAGEN_MLA_KERNEL=sm90: no such kernel for {arch}, query bf16, cache bf16, "
        "(kv_lora_rank, qk_rope_head_dim) (512, 64), (lookup, values, mask) "
        "(paged, shared, causal), page_size 64; covered: sm_90a, "
        "(kv_lora_rank, qk_rope_head_dim) (512, 64), and of (lookup, values, mask) "
        "(paged, shared, causal) with query and cache both bf16, fp16 or e4m3, page_size a "
        "multiple of 16, strides of the cache below 2^40 bytes; (paged, shared, causal) with "
        "query and cache e4m3, another page_size, or fp8_per_token; (sparse, shared, causal) with "
        "query and cache e4m3; either of both with a cache of e4m3 or fp8_ds_mla under a query of "
        "bf16; mask dcp as causal where paged"
    )


def test_a_cache_whose_tensor_map_fails_uses_the_sm80_kernel(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature falls back once; if the sm90 kernel is forced, the message has the reason."""

    def reject(_: TiledTensor, __: int) -> bytes:
        raise DriverError("cuTensorMapEncodeTiled: invalid argument", symbol="")

    monkeypatch.setattr(mla_maps, "encode", reject)
    inputs = UNIFORM.build("cpu").inputs()

    call, _, _ = launched(inputs, launches, "auto")

    assert isinstance(call, MlaSm80Launcher)
    with pytest.raises(
        UnsupportedError,
        match=r"^MLAGEN_MLA_KERNEL=sm90: cuTensorMapEncodeTiled: invalid argument; covered: ",
    ):
        launched(inputs, launches, "sm90")
