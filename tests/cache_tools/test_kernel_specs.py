"""Kernels as users name them."""

from __future__ import annotations

import pytest

from cache_tools.tools.kernel_specs import spec_named, spec_texts
from mlagen.errors import ArgumentError
from mlagen.prewarming import gpus
from mlagen.spec.arch import Arch, parse_arch
from mlagen.spec.families import FAMILIES
from tests.kernels import SM_80, gqa_sm80, mla_sm90


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_alone_is_its_default_kernel(family: str) -> None:
    """Without a GPU it is the bf16 kernel for sm_90a, with pages of 64 tokens."""
    fields = spec_named(family).key_fields()

    assert fields["arch"] == "sm_90a"
    assert fields.get("page_size", "64") == "64"
    expected = "e4m3" if family == "mla_sm90_fp8" else "bf16"
    assert fields.get("query_dtype", fields.get("dtype")) == expected


def test_the_default_target_is_the_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an A100, a family without kernels for it takes the next target."""
    monkeypatch.setattr(gpus, "visible_archs", lambda: {0: SM_80})

    assert spec_named("combine").arch == SM_80
    assert spec_named("mla_sm90").arch == Arch(90, "a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mla_sm90(block_m=16)", {"block_m": "16", "page_size": "64"}),
        ("mla_sm80( page_size=48, block_m = 16 )", {"page_size": "48", "block_m": "16"}),
        ("combine(arch=H100, dtype=fp16)", {"arch": "sm_90a", "dtype": "fp16"}),
        ("mla_sm90_fp8kv(lookup=sparse)", {"lookup": "sparse", "query_dtype": "bf16"}),
    ],
)
def test_names_that_are_left_out_have_defaults(text: str, expected: dict[str, str]) -> None:
    """The given values are kept, one beyond the kernels of prewarming too."""
    fields = spec_named(text).key_fields()

    assert expected.items() <= fields.items()


def test_a_target_replaces_that_of_the_text() -> None:
    """A whole spec becomes the kernel that the same calls use on the other target."""
    spec = gqa_sm80()

    other = spec_named(str(spec), SM_80)

    assert spec_named(str(spec)) == spec
    assert other == gqa_sm80(arch=SM_80)
    assert other.tile != spec.tile
    assert spec_named("combine(arch=sm_90a)", SM_80).arch == SM_80


@pytest.mark.parametrize(
    ("text", "arch", "message"),
    [
        ("mla_sm9", None, "kernel: expected a family out of mla_sm80, mla_sm90, "),
        ("mla_sm90 64", None, "kernel: expected family(name=value, ...), got 'mla_sm90 64'"),
        ("mla_sm90(rows=1)", None, "mla_sm90: expected name=value with a name out of arch, "),
        ("mla_sm90(block_m=48)", None, "mla_sm90: expected a kernel that calls use, the nearest "),
        ("mla_sm90(kv_dtype=e4m3)", None, "mla_sm90: expected a kernel that calls use, the "),
        ("mla_sm90", "sm_80", "arch: expected sm_90a for mla_sm90, got sm_80"),
        (str(mla_sm90()), "sm_80", "arch: expected sm_90a for mla_sm90, got sm_80"),
    ],
)
def test_what_does_not_exist_is_rejected(text: str, arch: str | None, message: str) -> None:
    """The message has the rule, and the nearest kernel that exists."""
    with pytest.raises(ArgumentError) as caught:
        spec_named(text, None if arch is None else parse_arch(arch))

    assert str(caught.value).startswith(message)
    _, has_nearest, rest = str(caught.value).partition("the nearest ")
    assert bool(has_nearest) == ("calls use" in message)
    assert not has_nearest or spec_named(rest.partition("), got ")[0] + ")").family == "mla_sm90"


def test_completed_texts_name_kernels() -> None:
    """Families are completed first, and behind a bracket the kernels of one."""
    assert spec_texts("mla") == list(FAMILIES)
    assert all(str(spec_named(text)) == text for text in spec_texts("combine("))
