"""The DEBUG log of kernel, tile and grid choices."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.families.gqa import launch_sm90 as gqa_sm90_launcher
from mlagen.families.mla import launch_sm90 as mla_sm90_launcher
from mlagen.spec.arch import Arch
from tests.families.gqa_launches import args_of, launches_of
from tests.families.launches import H200, launched, record_launches
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase

CASE = MlaCase(name="", seq_lens=(70, 3), heads=128)


@pytest.fixture(autouse=True)
def at_debug(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log at DEBUG, with a simulated GPU."""
    caplog.set_level(logging.DEBUG, logger="mlagen")
    for module in (mla_sm90_launcher, gqa_sm90_launcher):
        monkeypatch.setattr(module, "arch_of_device", lambda _: H200)


@pytest.mark.parametrize(
    ("changes", "kernel", "max_len", "lines"),
    [
        ({}, "auto", 900, ["kernel mla_sm90(arch=sm_90a, ", "tile of 16 rows for "]),
        ({}, "auto", 10000, ["kernel mla_sm90(arch=sm_90a, ", "tile of 64 rows for "]),
        ({}, "sm80", 10000, ["sm80 kernel: MLAGEN_MLA_KERNEL=sm80"]),
        ({"heads": 16}, "auto", 100, ["sm80 kernel: the call is so small that "]),
        ({"kv_lora_rank": 256}, "auto", 10000, ["sm80 kernel: no such kernel for sm_90a, "]),
    ],
    ids=["short KV", "long KV", "requested", "small", "unsupported"],
)
def test_the_plan_of_an_mla_call_is_logged(
    changes: dict[str, Any],
    kernel: str,
    max_len: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A new MLA signature logs the reason for its kernel, if any, and last its grid."""
    inputs = replace(CASE, **changes).build("cpu").inputs()._replace(max_seq_len=max_len)

    call, _, _ = launched(inputs, record_launches(monkeypatch), kernel)

    messages = [record.getMessage().removeprefix("planning: ") for record in caplog.records]
    for line, start in zip(messages, lines, strict=False):
        assert line.startswith(start)
    requests = f"grid of {call.plan.num_ctas} CTAs for 2 requests of up to {max_len} KV tokens: "
    assert messages[-1].startswith(requests)
    assert f"kernel {call.decode.spec}" in messages


@pytest.mark.parametrize(
    ("kernel", "start"),
    [("auto", "kernel gqa_sm90("), ("sm80", "sm80 kernel: MLAGEN_GQA_KERNEL=sm80")],
)
def test_the_plan_of_a_grouped_query_call_is_logged(
    kernel: str, start: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new grouped-query signature logs the same as an MLA one."""
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    inputs = args_of(GqaCase(name="", seq_lens=(70, 3)), monkeypatch, workspace_buffer=workspace)

    call, _, _ = launches_of(inputs, monkeypatch, kernel)

    messages = [record.getMessage().removeprefix("planning: ") for record in caplog.records]
    assert messages[0].startswith(start)
    assert messages[-1].startswith(f"grid of {call.plan.num_ctas} CTAs for 2 requests")


def test_a_gpu_without_such_a_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names a GPU that has no sm90 kernel."""
    arch = Arch(80)
    monkeypatch.setattr(mla_sm90_launcher, "arch_of_device", lambda _: arch)
    launches = record_launches(monkeypatch, arch=arch)

    launched(CASE.build("cpu").inputs(), launches, "auto")

    assert (
        caplog.records[0]
        .getMessage()
        .startswith("planning: sm80 kernel: no such kernel for sm_80, ")
    )
