"""The decorator of entry points: keys that nothing escapes, and the generated function."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen.entry_point import OUT, entry_point
from mlagen.errors import ArgumentError
from mlagen.families.dispatch import MLA
from mlagen.families.mla.args import MlaArgs
from mlagen.mla import trtllm, xqa
from tests.families.entry_points import ROWS, make_entry_point
from tests.fixture_types import Patch

TENSOR = torch.zeros(1)

# A parameter, two values that a key distinguishes, and one that has no key.
PLANTED: dict[str, tuple[Any, Any, Any]] = {
    "soft_cap: float = 30.0": (30.0, 50.0, 30),
    "soft_cap: float | None = None": (None, 50.0, TENSOR),
    "soft_cap: float | torch.Tensor = 30.0": (30.0, 50.0, "30"),
    "levels: int = 3": (3, 4, True),
    "is_capped: bool = False": (False, True, TENSOR),
    "is_capped: bool": (False, True, 0),
    "mode: str = 'a'": ("a", "b", TENSOR),
    "mode: str | None = 'a'": ("a", None, ["a"]),
    "caps: torch.Tensor | None = None": (None, TENSOR, "a"),
    "caps: torch.Tensor": (TENSOR, torch.zeros(1), None),
    "caps: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None": (
        *((TENSOR, TENSOR), [TENSOR, TENSOR]),
        (TENSOR, None),
    ),
    "caps: torch.Tensor | list[torch.Tensor] | None = None": (None, (), "a"),
    "kind: torch.dtype | None = None": (None, torch.float32, "float32"),
    "anything: object = None": (None, 1, object()),
    "anything = 0": (0, 1, object()),
    "anything: object = 1": (1, True, (TENSOR,)),
}


BODY = """
def copy(query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor,
         block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
         out: torch.Tensor, *, {parameter}) -> MlaArgs:
    return MlaArgs(query, kv_cache, workspace_buffer, 512, 64, block_tables, seq_lens, max_seq_len,
                   out)
"""


def planted(parameter: str) -> Callable[..., Any]:
    """Return a copy of an entry point with one more parameter, which its body does not use."""
    namespace: dict[str, Any] = {"torch": torch, "MlaArgs": MlaArgs}
    text = f"from __future__ import annotations\n{BODY.format(parameter=parameter)}"
    exec(text, namespace)  # noqa: S102 - one parameter
    decorate = entry_point(MLA, outputs="out", returns=OUT, length="max_seq_len")
    return decorate(namespace["copy"])


@pytest.mark.parametrize("parameter", PLANTED)
def test_a_planted_parameter_is_part_of_the_key(parameter: str, monkeypatch: Patch) -> None:
    """Without being named anywhere: another value is no replay, and takes no launcher."""
    row = make_entry_point(monkeypatch, ROWS["trtllm"])
    names = "query kv_cache workspace_buffer block_tables seq_lens max_seq_len out"
    given = {name: row.row.build()[name] for name in names.split()}
    copy, name = planted(parameter), parameter.partition(":")[0].split()[0]
    first, other, odd = PLANTED[parameter]

    def steps(value: object) -> str:
        row.plans.clear()
        row.dispatches.clear()
        copy(**given, **{name: value})
        return "planned" if row.plans else "guarded" if row.dispatches else "replayed"

    for value in (first, other):
        # Kernels get a scale, and the address of a tensor of the same metadata, at each launch.
        is_passed = parameter in {"soft_cap: float | torch.Tensor = 30.0", "caps: torch.Tensor"}
        expected = "guarded" if is_passed and value is other else "planned"
        assert [steps(value) for _ in range(2)] == [expected, "replayed"]
    assert [steps(odd) for _ in range(2)] == ["planned"] * 2


@pytest.mark.parametrize("name", ["wrapper", "batch_decode"])
def test_the_plan_of_a_run_is_part_of_the_key(name: str, monkeypatch: Patch) -> None:
    """Runs that differ in a scale share a launcher, and those of another plan share none."""
    entry_point, scale = make_entry_point(monkeypatch, ROWS[name]), {"v_scale": 0.5}
    arguments = entry_point.row.build()
    entry_point.call(arguments)
    if name == "batch_decode":
        assert entry_point.is_planned(arguments | scale)  # no longer 1
        assert not entry_point.is_planned(arguments | {"v_scale": 0.25})
        assert entry_point.is_planned(arguments | {"window_left": 3} | scale)
    plan = arguments["wrapper"]._plan
    monkeypatch.setattr(arguments["wrapper"], "_plan", replace(plan, max_q_len=77))

    assert entry_point.is_planned(arguments)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("bits: int = 0", "bits: expected another name of a parameter, got one of the text"),
        ("cap: float = 0.0", "cap: expected a default of None or not 0.0, got 0.0"),
        ("cap: float = -0.0", "cap: expected a default of None or not 0.0, got 0.0"),
        ("cap: float | torch.Tensor = 0.0", "cap: expected a default of None or not 0.0, got 0.0"),
    ],
)
def test_a_parameter_without_a_replay_is_rejected(parameter: str, message: str) -> None:
    """The generated function has variables of its own, and calls with a float of 0 no replay."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        planted(parameter)


def test_the_text_of_an_entry_point_can_be_read() -> None:
    """It is found like that of any function, and a traceback has its lines."""
    function: Any = mlagen.mla.xqa_batch_decode_with_kv_cache_mla
    text = inspect.getsource(function)

    assert text.lstrip().startswith(f"def {function.__name__}(query, kv_cache, ")
    assert "outputs = replay(settings, (" in text
    with pytest.raises(ArgumentError) as caught:
        function(*[TENSOR] * 3, 128, 512, 64, TENSOR, TENSOR, "long")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[1].line is not None
    assert frames[1].line.startswith("outputs = dispatch(")


@pytest.mark.parametrize("module", [trtllm, xqa])
def test_an_entry_point_has_the_signature_of_its_function(module: Any) -> None:
    """Parameters, defaults, annotations and the docstring; and the type of its result."""
    (function,) = [
        value for name, value in vars(module).items() if "batch_decode" in name and callable(value)
    ]
    signature = inspect.signature(function)

    assert signature.parameters["query"].annotation.startswith("torch.Tensor")
    assert signature.parameters["enable_pdl"].default is None
    assert signature.return_annotation.startswith("torch.Tensor")
    assert (function.__module__, inspect.getdoc(function)) != (None, None)
