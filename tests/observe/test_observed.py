"""MLAGEN_LOG=api: one line for each call, and nothing where it is not requested."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mlagen
from mlagen.errors import ArgumentError
from mlagen.observe import dump, observed
from mlagen.settings import current_settings
from tests.cache.builds import ROOT
from tests.fixture_types import Log, Patch
from tests.observed_calls import BUILDERS, built, dumps_in, observe
from tests.odd_values import ODD
from tests.programs import run_program


@pytest.fixture
def log(monkeypatch: Patch, caplog: Log, tmp_path: Path) -> Any:
    """Return the messages of calls, which are logged and dumped."""
    observe(monkeypatch, MLAGEN_LOG="api", MLAGEN_DUMP=str(tmp_path))
    caplog.set_level(logging.INFO, logger="mlagen")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_call_of_an_entry_point_is_a_line_and_a_dump(name: str, log: Any, tmp_path: Path) -> None:
    """The line names the entry point and the backend; a dump has no contents unless requested."""
    function, arguments = built(name)
    before = len(log())
    function(**arguments)
    (line,) = log()[before:]
    entry = line.partition("(")[0].rpartition(".")[2]
    known = {getattr(function, "__name__", ""), "flare_mla_decoding", "__init__"}
    assert entry in known
    has_result = name not in {"constructor", "plan", "dense_plan", "plan_decode"}
    assert line.endswith(": CPU backend") is has_result
    dumps = dumps_in(tmp_path)
    expected = {"mlagen_dump": dump.FORMAT, "torch": torch.__version__, "gpu": None}
    assert dumps[-1].items() >= {**expected, "has_tensors": False}.items()
    assert dumps[-1]["environment"]["MLAGEN_DUMP"] == str(tmp_path)
    assert dumps[-1]["outcome"]["error"] is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"] * len(dumps)


def test_a_line_has_the_metadata_of_each_argument(log: Any) -> None:
    """Shape, dtype and device of tensors, strides of those with gaps; not the defaults."""
    function, arguments = built("trtllm")
    arguments["query"] = torch.zeros(2, 1, 2, 1152, dtype=torch.bfloat16)[..., :576]

    function(**arguments)

    expected = (
        "trtllm_batch_decode_with_kv_cache_mla("
        "query=bfloat16[2, 1, 2, 576] strides [2304, 2304, 1152, 1] cpu, "
        "kv_cache=bfloat16[6, 8, 576] cpu, workspace_buffer=uint8[67108864] cpu, "
        "qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, "
        "block_tables=int32[2, 4] cpu, seq_lens=int32[2] cpu, max_seq_len=7, "
        "bmm1_scale=0.0721688, return_lse=True)"
        " -> (bfloat16[2, 1, 2, 512] cpu, float32[2, 2] cpu): CPU backend"
    )
    assert log() == [expected]


def test_a_call_that_raises_is_logged_with_its_error(log: Any, monkeypatch: Patch) -> None:
    """The error reaches the caller unchanged, also that of wrong names; a captured call says so."""
    function, arguments = built("xqa")
    with pytest.raises(TypeError, match=r"^xqa\(\) got an unex"):
        function(no_such_argument=1)
    assert log() == []
    with pytest.raises(ArgumentError) as caught:
        function(**{**arguments, "page_size": 0})
    monkeypatch.setattr(observed, "is_capturing", lambda _: True)
    function(**arguments)
    assert log()[0].endswith(f" raises ArgumentError: {caught.value}")
    assert log()[1].endswith(": CPU backend, captured")


def test_a_traced_call_is_not_logged(log: Any) -> None:
    """Fake tensors have no kernel."""
    function, arguments = built("xqa_batch_mla")
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        function(**fakes)
    assert log() == []


def test_a_wrapper_is_part_of_one_graph(log: Any) -> None:
    """A compiler traces its construction and its run, which are not logged; the op is."""
    _, arguments = built("planless")
    given = {name: arguments[name] for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")}
    rows = {"kv_len": arguments["kv_len"], "page_table": arguments["page_table"]}
    workspace = torch.empty(0)
    expected: Any = BUILDERS["planless"]()[0](**given, **rows)
    before = len(log())

    def decode(**tensors: Any) -> Any:
        wrapper = mlagen.mla.BatchMLAPagedAttentionWrapper(workspace, backend="cutlass")
        return wrapper.run(**tensors)

    out = torch.compile(decode, fullgraph=True, backend="eager")(**given, **rows)

    assert torch.equal(out, expected)
    assert [line.partition("(")[0] for line in log()[before:]] == ["batch_mla_run"]


@pytest.mark.parametrize("name", ["trtllm", "xqa_batch", "flare"])
def test_an_odd_value_has_the_same_outcome_as_without_a_log(
    name: str, log: Any, monkeypatch: Patch
) -> None:
    """Neither the log nor a dump raises, whatever the arguments are."""
    monkeypatch.setenv("MLAGEN_DUMP_TENSORS", "1")
    current_settings.cache_clear()
    function, arguments = built(name)
    nested: list[Any] = []
    nested.append(nested)

    def outcome(call: Any, given: dict[str, Any]) -> str:
        try:
            call(**given)
        except Exception as error:  # noqa: BLE001 - which is compared
            return f"{type(error).__name__}: {error}"
        return "a result"

    for index, value in enumerate((*ODD, nested)):
        key = list(arguments)[index % len(arguments)]
        changed = {**arguments, key: value}
        seen = outcome(function, changed)
        with monkeypatch.context() as patch:
            patch.setattr(observed._thread, "is_observed", True)
            assert seen == outcome(function, changed)
    assert any(" raises " in line for line in log())


def test_the_setting_is_read_at_each_call(monkeypatch: Patch, caplog: Log) -> None:
    """The next call of a function is logged once the settings say so, and each part of it once."""
    caplog.set_level(logging.INFO, logger="mlagen")
    function, arguments = built("flare")
    function(**arguments)
    before = len(caplog.records)
    observe(monkeypatch, MLAGEN_LOG="api")
    function(**arguments)

    assert (before, len(caplog.records)) == (0, 1)


PROGRAM = """
import mlagen
mlagen.mla.BatchMLAPagedAttentionWrapper(__import__("torch").empty(0))
"""


def test_a_process_that_requests_it_logs_calls() -> None:
    """Lines go to stderr."""
    environ = os.environ | {"MLAGEN_LOG": "api"}
    command = [sys.executable, "-c", PROGRAM]
    done = run_program(command, cwd=ROOT, env=environ)
    assert (done.returncode, done.stdout) == (0, "")
    assert "]: BatchMLAPagedAttentionWrapper.__init__(float_workspace_buffer=" in done.stderr
