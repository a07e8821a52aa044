"""The kernel of a call of either family, and the log of the choice; needs no GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.errors import DriverError, UnsupportedError
from mlagen.families.gqa import launch as gqa_launch
from mlagen.families.gqa import plan as gqa_plan
from mlagen.families.gqa import tensor_maps as gqa_maps
from mlagen.families.mla import launch as mla_launch
from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from tests.families.launches import Case, Launched, Launches, args_of, launched, record_launches
from tests.fixture_types import Log, Patch
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, mla_case
from tests.problems.problem import E4M3

MLA = MlaCase(seq_lens=(70, 3), with_sinks=True)
FP8 = replace(MLA, dtype=E4M3)
RAGGED = MlaCase(seq_lens=(70, 3), q_lens=(1, 4))
FP8_DS_MLA = mla_case("bf16 over fp8_ds_mla", seq_lens=(200,))
GQA = GqaCase(seq_lens=(70, 3), q_len=2, mask="random", sink=3.0, window=50)
PLAIN_GQA = GqaCase(seq_lens=(70, 3))
APART: dict[str, Any] = {"separate_rope": True, "flat_tables": True}
# Rows begin at multiples of 4 bytes, where TMA boxes may not.
SCALES_IN_ROWS: dict[str, Any] = {
    "kv": "int8",
    "has_token_scales": True,
    "cache_layout": "inline",
}

# The sm90 kernel, and cases that it and the sm80 kernel support.
SUPPORTED: dict[str, list[Any]] = {
    "mla_sm90": [
        *(MLA, replace(MLA, dtype=torch.float16), RAGGED),
        *(replace(MLA, **APART), replace(MLA, page_size=48), replace(MLA, qk_rope_head_dim=0)),
        *(replace(MLA, top_k=8192, page_size=1), replace(RAGGED, top_k=4096, heads=64)),
        replace(MLA, top_k=8192, qk_rope_head_dim=0),
    ],
    "mla_sm90_fp8": [
        *(FP8, replace(RAGGED, dtype=E4M3), replace(FP8, **APART), replace(FP8, page_size=16)),
        replace(FP8, qk_rope_head_dim=0),
    ],
    "mla_sm90_fp8kv": [
        *(replace(FP8, top_k=4096), replace(FP8, page_size=8), FP8_DS_MLA),
        *(replace(FP8, kv_format="fp8_per_token"), replace(FP8_DS_MLA, page_size=3)),
        mla_case("bf16 over e4m3", seq_lens=(200,)),
        mla_case("bf16 over e4m3 with scales for 128 elements", seq_lens=(200,)),
        replace(FP8_DS_MLA, seq_lens=(70,) * 40, top_k=128, heads=64),
    ],
    "gqa_sm90": [
        *(GQA, replace(GQA, dtype=torch.float16), replace(GQA, kv="e4m3", out_dtype=E4M3)),
        *(GqaCase(seq_lens=(70, 3), q_lens=(1, 4)), replace(PLAIN_GQA, head_dim=256)),
        replace(PLAIN_GQA, cache_layout="strided", layout="HND"),
        replace(PLAIN_GQA, page_size=48),
        *(replace(PLAIN_GQA, layout=layout, **SCALES_IN_ROWS) for layout in ("NHD", "HND")),
        replace(PLAIN_GQA, kv="int8", has_token_scales=True),
    ],
}
UNSUPPORTED = [
    *(replace(MLA, kv_lora_rank=256), replace(MLA, kv_lora_rank=256, top_k=70)),
    *(replace(MLA, values="other pages"), replace(MLA, bias="for each head")),
    *(replace(MLA, page_size=8), replace(FP8, kv_lora_rank=256)),
    mla_case("fp16 over e4m3", seq_lens=(200,)),
    mla_case("fp16 over fp8_ds_mla", seq_lens=(200,)),
    *(replace(GQA, head_dim=512, head_dim_vo=256), replace(GQA, page_size=8)),
]


def choose(case: Case, launches: Launches, kernel: str, **changes: Any) -> Launched:
    """Launch a case with a sufficient workspace."""
    workspace = torch.empty(1 << 22, dtype=torch.uint8)
    changes = {"workspace_buffer": workspace} | changes if isinstance(case, GqaCase) else changes
    return launched(args_of(case, **changes), launches, kernel)


def reject_sm90(case: Case, launches: Launches, message: str) -> str:
    """Require the sm80 kernel, and the rejection of a forced sm90 kernel before any launch."""
    family = "GQA" if isinstance(case, GqaCase) else "MLA"
    assert choose(case, launches, "auto").families[0] == f"{family.lower()}_sm80"
    launches.clear()
    with pytest.raises(UnsupportedError) as caught:
        choose(case, launches, "sm90")

    assert launches == []
    assert str(caught.value).startswith(f"MLAGEN_{family}_KERNEL=sm90: {message}")
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "sm90"), [(case, sm90) for sm90, cases in SUPPORTED.items() for case in cases], ids=str
)
@pytest.mark.parametrize("kernel", ["auto", "sm80", "sm90"])
def test_calls_that_both_kernels_support_use_the_requested_one(
    case: Case, sm90: str, kernel: str, launches: Launches
) -> None:
    """Without a request a long call uses the sm90 kernel."""
    call = choose(case, launches, kernel, max_seq_len=10_000)

    assert call.families[0] == (f"{sm90[:3]}_sm80" if kernel == "sm80" else sm90)


@pytest.mark.parametrize(
    ("case", "sm90"),
    [
        *((MLA, "mla_sm90"), (replace(MLA, top_k=70, page_size=3), "mla_sm90")),
        *((replace(FP8_DS_MLA, heads=h), "mla_sm90_fp8kv") for h in (16, 128)),
    ],
    ids=str,
)
def test_a_small_call_uses_the_sm80_kernel(case: MlaCase, sm90: str, launches: Launches) -> None:
    """A small call uses the sm80 kernel, unless the settings force the sm90 kernel."""
    assert choose(case, launches, "auto").families[0] == "mla_sm80"
    assert choose(case, launches, "sm90").families[0] == sm90


@pytest.mark.parametrize("page_size", [16, 64])
def test_fp16_p_selects_another_kernel_for_e4m3(
    page_size: int, launches: Launches, monkeypatch: Patch
) -> None:
    """``MLAGEN_MLA_P_DTYPE=fp16`` changes the kernel of calls with e4m3 query and cache only."""
    monkeypatch.setenv("MLAGEN_MLA_P_DTYPE", "fp16")
    current_settings.cache_clear()
    for case in (FP8, MLA):
        choose(replace(case, page_size=page_size), launches, "sm90")

    assert [launch.family for launch in launches] == ["mla_sm90_fp8kv", "mla_sm90"]


@pytest.mark.parametrize("case", UNSUPPORTED, ids=str)
def test_unsupported_calls_use_the_sm80_kernel(case: Case, launches: Launches) -> None:
    """Calls that the sm90 kernel does not support are rejected only if the settings force it."""
    reject_sm90(case, launches, "no such kernel for sm_90a, query ")


MLA_COVERED = (
    "query bf16, cache bf16, "
    "(kv_lora_rank, qk_rope_head_dim) (512, 64), (lookup, values, mask) "
    "(paged, shared, causal), page_size 64; covered: sm_90a, "
    "(kv_lora_rank, qk_rope_head_dim) (512, 64) or (512, 0), and of (lookup, values, mask) "
    "(paged, shared, causal) with query and cache both bf16, fp16 or e4m3, page_size a "
    "multiple of 16, strides of the cache below 2^40 bytes; (sparse, shared, causal) "
    "with query and cache both bf16 or fp16; (paged or sparse, shared, causal) with a cache of "
    "e4m3 or fp8_ds_mla under a query of bf16 or e4m3; (paged, shared, causal) with fp8_per_token; "
    "mask dcp as causal where paged"
)
GQA_COVERED = (
    "query bf16, cache bf16, head_dim 128, page_size 16; covered: sm_90a, block indices none, of "
    "pages or, unless batch-invariant, of tokens, cache as the query, e4m3, e5m2, int8 or NVFP4, "
    "keys and values of a multiple of 32 bytes and up to 256 elements, or both of 512 (NVFP4: both "
    "of 64, 128 or 256), and but for indices of tokens page_size a multiple of 16 and strides of "
    "the cache below 2^40 bytes"
)


@pytest.mark.parametrize(("case", "covered"), [(MLA, MLA_COVERED), (GQA, GQA_COVERED)], ids=str)
@pytest.mark.parametrize("arch", [Arch(80, ""), Arch(100, "f")], ids=str)
def test_another_gpu_uses_the_sm80_kernel(
    arch: Arch, case: Case, covered: str, monkeypatch: Patch, caplog: Log
) -> None:
    """The log names the GPU; the message of a forced sm90 kernel also lists what it covers."""
    caplog.set_level(logging.DEBUG, logger="mlagen")
    launches = record_launches(monkeypatch, arch=arch)

    message = reject_sm90(case, launches, f"no such kernel for {arch}, ")

    assert message.endswith(f" for {arch}, {covered}")
    assert f"planning: sm80 kernel: no such kernel for {arch}, " in caplog.text


def test_scales_elsewhere_than_behind_unaligned_rows_use_the_sm80_kernel(
    launches: Launches,
) -> None:
    """Their strides are those of rows with scales behind them."""
    case = replace(PLAIN_GQA, **SCALES_IN_ROWS)
    in_rows, elsewhere = choose(case, launches, "auto"), args_of(case)
    others = {"key_scales": elsewhere.key_scales, "value_scales": elsewhere.value_scales}

    assert in_rows.families == ["gqa_sm90"]
    assert choose(case, launches, "auto", **others).families[0] == "gqa_sm80"
    with pytest.raises(UnsupportedError, match="or with their scales behind them"):
        choose(case, launches, "sm90", **others)


def test_strides_of_one_kv_head_do_not_matter(launches: Launches) -> None:
    """Scales behind rows of one KV head may have any stride of heads."""
    case = replace(PLAIN_GQA, kv_heads=1, **SCALES_IN_ROWS)
    args = args_of(case)
    page, token, _ = args.key_scales.stride()
    scales = args.key_scales.as_strided(args.key_scales.shape, (page, token, 1))
    given = {name: getattr(args, name) for name in ("key_cache", "value_cache", "value_scales")}

    call = choose(case, launches, "sm90", **given, key_scales=scales)

    assert call.families == ["gqa_sm90"]


@pytest.mark.parametrize("case", [MLA, GQA], ids=["mla", "gqa"])
def test_a_cache_whose_tensor_map_fails_uses_the_sm80_kernel(
    case: Case, launches: Launches, monkeypatch: Patch
) -> None:
    """If the sm90 kernel is forced, the message has the driver's error."""

    def reject(*_: object) -> bytes:
        raise DriverError("cuTensorMapEncodeTiled: invalid argument", symbol="")

    for module in (mla_maps, gqa_maps):
        monkeypatch.setattr(module, "encode", reject)

    reject_sm90(case, launches, "cuTensorMapEncodeTiled: invalid argument; covered: ")


@pytest.mark.parametrize(("case", "tokens"), [(MLA, 64), (GQA, 128)], ids=["mla", "gqa"])
def test_a_schedule_beyond_32_bits_uses_the_sm80_kernel(
    case: Case, tokens: int, launches: Launches, monkeypatch: Patch
) -> None:
    """A linear block index has 31 bits, so a longer schedule is rejected if forced."""
    for module in (mla_launch, gqa_launch):
        monkeypatch.setattr(module, "fits_in_int32", lambda *_: False)

    message = reject_sm90(case, launches, "")

    assert f"fewer than 2^31 KV blocks of {tokens} tokens" in message


def test_a_cta_takes_one_head_if_tiles_of_several_heads_exceed_32_bits(
    launches: Launches, monkeypatch: Patch
) -> None:
    """One head per CTA makes larger KV tiles, so that their number fits in 32 bits."""
    monkeypatch.setattr(gqa_plan, "choose_kv_heads_per_cta", lambda *_: 2)
    gqa_plan.plan_gqa_sm90_call.cache_clear()
    heads = []
    for most in (2, 1):
        monkeypatch.setattr(
            gqa_launch,
            "fits_in_int32",
            lambda spec, *_, most=most: spec.kv_heads_per_cta <= most,
        )
        call = choose(replace(GQA, kv="e4m3", page_size=64), launches, "auto").call
        heads.append(call.decode.spec.kv_heads_per_cta)
    gqa_plan.plan_gqa_sm90_call.cache_clear()

    assert heads == [2, 1]


@pytest.mark.parametrize(
    ("case", "launch"), [(MLA, mla_launch), (PLAIN_GQA, gqa_launch)], ids=["mla", "gqa"]
)
def test_no_batch_changes_the_kernel_of_a_batch_invariant_call(
    case: Case, launch: Any, launches: Launches, monkeypatch: Patch
) -> None:
    """It takes the sm90 kernel, small calls too; where that has no grid for a batch, it raises."""
    call = choose(case, launches, "auto", batch_invariant=True).call
    assert call.decode.spec.family.endswith("_sm90")
    monkeypatch.setattr(launch, "fits_in_int32", lambda *_: False)
    assert choose(case, launches, "auto").call.decode.spec.family.endswith("_sm80")
    with pytest.raises(UnsupportedError, match=r"^batch_invariant: another kernel, as exp"):
        choose(case, launches, "auto", batch_invariant=True)
    forced = choose(case, launches, "sm80", batch_invariant=True).call
    assert forced.decode.spec.family.endswith("_sm80")


LONG_MLA = MlaCase(seq_lens=(70, 3), heads=128)


@pytest.mark.parametrize(
    ("case", "kernel", "max_len", "lines"),
    [
        (LONG_MLA, "auto", 900, ["kernel mla_sm90(arch=sm_90a, ", "tile of 16 rows for "]),
        (LONG_MLA, "auto", 10000, ["kernel mla_sm90(arch=sm_90a, ", "tile of 64 rows for "]),
        (LONG_MLA, "sm80", 10000, ["sm80 kernel: MLAGEN_MLA_KERNEL=sm80"]),
        (MLA, "auto", 100, ["sm80 kernel: the call is so small that "]),
        (replace(MLA, kv_lora_rank=256), "auto", 9999, ["sm80 kernel: no such kernel for sm_90a"]),
        (PLAIN_GQA, "auto", 70, ["kernel gqa_sm90("]),
        (PLAIN_GQA, "sm80", 70, ["sm80 kernel: MLAGEN_GQA_KERNEL=sm80"]),
    ],
    ids=str,
)
def test_a_choice_is_logged(
    case: Case, kernel: str, max_len: int, lines: list[str], launches: Launches, caplog: Log
) -> None:
    """A new signature logs the reason for its kernel, if any, and last its grid."""
    caplog.set_level(logging.DEBUG, logger="mlagen")

    call = choose(case, launches, kernel, max_seq_len=max_len).call

    messages = [record.getMessage().removeprefix("planning: ") for record in caplog.records]
    for line, start in zip(messages, lines, strict=False):
        assert line.startswith(start)
    requests = f"grid of {call.plan.num_ctas} CTAs for 2 requests of up to {max_len} KV tokens: "
    assert messages[-1].startswith(requests)
    assert f"kernel {call.decode.spec}" in messages
