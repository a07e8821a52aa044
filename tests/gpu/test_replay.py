"""Calls on a GPU that are logged and dumped, and their replays."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from cache_tools.replay.dump import read_dump
from cache_tools.replay.run import replay
from mlagen.decode import xqa_batch_decode_with_kv_cache
from mlagen.mla import (
    BatchMLAPagedAttentionWrapper,
    trtllm_batch_decode_with_kv_cache_mla,
)
from tests.device_sync import no_device_sync
from tests.observed_calls import dumps_in, observe
from tests.problems.batch_mla import batch_case, plan_arguments, run_arguments, wrapper_of
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase

MLA = {
    "bf16": MlaCase(seq_lens=(700, 70, 1), heads=16),
    "e4m3": MlaCase(seq_lens=(700, 70, 1), heads=16, dtype=torch.float8_e4m3fn),
    "ragged": MlaCase(seq_lens=(700, 70, 9), q_lens=(2, 1, 3), heads=16),
    "sparse": MlaCase(seq_lens=(700, 70, 9), heads=16, top_k=64),
}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Request dumps with contents in a folder, and the log."""
    variables = {"MLAGEN_DUMP": str(tmp_path / "dumps"), "MLAGEN_DUMP_TENSORS": "1"}
    observe(monkeypatch, **variables, MLAGEN_LOG="api")
    return tmp_path / "dumps"


def require_right(folder: Path) -> None:
    """Replay the last dump on the GPU, and compare it with the CPU backend."""
    path = max(folder.glob("*.json"), key=lambda path: path.stem[-4:])
    served_by = json.loads(path.read_text(encoding="utf-8"))["outcome"]["served_by"]

    outcome = replay(read_dump(path))

    assert outcome.error is None
    assert outcome.device != "cpu"
    assert outcome.served_by == served_by != []
    assert outcome.relative_error is not None
    assert outcome.relative_error <= outcome.error_bound


@pytest.mark.parametrize("name", MLA)
def test_an_mla_call_is_replayed_within_the_bound(name: str, folder: Path) -> None:
    """By the same kernel, with the contents of the GPU."""
    trtllm_batch_decode_with_kv_cache_mla(**MLA[name].build("cuda").arguments())

    require_right(folder)


@pytest.mark.parametrize("kv", ["16-bit", "e4m3", "nvfp4"])
def test_a_gqa_call_is_replayed_within_the_bound(kv: str, folder: Path) -> None:
    """Likewise for each kind of cache."""
    case = GqaCase(seq_lens=(700, 70, 1), kv=kv)
    xqa_batch_decode_with_kv_cache(**case.build("cuda").arguments())

    require_right(folder)


def test_a_planned_run_is_replayed_within_the_bound(folder: Path) -> None:
    """The dump has the construction and the plan."""
    problem = batch_case(((1, 700), (2, 30)), heads=16).build("cuda")
    wrapper = wrapper_of(problem)
    wrapper.plan(**plan_arguments(problem))
    assert isinstance(wrapper, BatchMLAPagedAttentionWrapper)
    wrapper.run(**run_arguments(problem))

    require_right(folder)


def test_a_replayed_launch_names_its_kernel(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first call, a cached one and a replayed one are logged with the same kernel."""
    call = trtllm_batch_decode_with_kv_cache_mla
    arguments = MLA["bf16"].build("cuda").arguments()
    out = call(**arguments)
    assert isinstance(out, torch.Tensor)
    caplog.set_level(logging.INFO, logger="mlagen.api")
    caplog.clear()

    for _ in range(4):
        call(**arguments, out=out)

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert len(set(lines)) == 1
    assert dumps_in(folder)[0]["outcome"]["served_by"][0] in lines[0]


def test_a_captured_call_is_dumped_without_a_sync(
    folder: Path,
) -> None:
    """A capture dumps metadata only, though contents are requested."""
    arguments = MLA["bf16"].build("cuda").arguments()
    trtllm_batch_decode_with_kv_cache_mla(**arguments)  # loads the kernel
    graph = torch.cuda.CUDAGraph()

    with no_device_sync(), torch.cuda.graph(graph):
        trtllm_batch_decode_with_kv_cache_mla(**arguments)

    (dump,) = [dump for dump in dumps_in(folder) if dump["is_captured"]]
    assert not dump["has_tensors"]
    assert dump["gpu"]["name"] == torch.cuda.get_device_name()
