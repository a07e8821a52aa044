"""Valid calls of the decode entry points, each with one argument broken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from mlagen.mla.flare import run_mla
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase
from tests.problems.problem import E4M3

MLA = MlaCase(seq_lens=(70, 3), q_len=2, with_sinks=True)
GQA = GqaCase(seq_lens=(70, 3), sink=3.0)
XQA_MLA = MlaCase(dtype=E4M3, seq_lens=(70, 3), cache_layout="[P,ps,1,d]")
MLA_CASES: dict[str, MlaCase] = {
    "": MLA,
    "single": replace(MLA, q_len=1),
    "ragged": replace(MLA, q_lens=(1, 4)),
    "e4m3": replace(MLA, dtype=E4M3),
    "packed": replace(MLA, kv_format="fp8_ds_mla"),
    "packed no rope": replace(MLA, kv_format="fp8_ds_mla", qk_rope_head_dim=0),
    "sparse": replace(MLA, top_k=70, with_top_k_lens=True),
    "sparse ragged": replace(MLA, q_lens=(1, 4), top_k=70),
    "other pages": replace(MLA, values="other pages"),
    "rope": replace(MLA, separate_rope=True),
    "flat": replace(MLA, flat_tables=True),
    "other cache": replace(MLA, values="other cache"),
    "scaled": replace(MLA, kv_format="e4m3", scales="for 128 elements"),
    "per token": replace(MLA, dtype=E4M3, kv_format="fp8_per_token"),
    "biased": replace(MLA, bias="for each head"),
    "bidirectional": replace(MLA, q_len=4, is_causal=False),
}
XQA_MLA_CASES: dict[str, MlaCase] = {
    "": XQA_MLA,
    "separate": replace(XQA_MLA, values="other cache"),
}
GQA_CASES: dict[str, GqaCase] = {
    "": GQA,
    "drafts": replace(GQA, q_len=2, mask="random"),
    "ragged": replace(GQA, q_lens=(1, 4), mask="random"),
    "lse": replace(GQA, q_len=2, mask="causal"),
    "stacked": replace(GQA, cache_layout="stacked"),
    "HND": replace(GQA, layout="HND"),
    "e4m3": replace(GQA, kv="e4m3"),
    "nvfp4": replace(GQA, kv="nvfp4"),
    "token scales": replace(GQA, kv="int8", has_token_scales=True),
    "token scales stacked": replace(GQA, kv="int8", has_token_scales=True, cache_layout="stacked"),
    "nvfp4 stacked": replace(GQA, kv="nvfp4", cache_layout="stacked"),
    "nvfp4 24 bytes": replace(GQA, kv="nvfp4", head_dim=48),
    "nvfp4 32 bytes": replace(GQA, kv="nvfp4", head_dim=64),
}
SERVER_GQA_CASES: dict[str, GqaCase] = {
    "rank": replace(GQA, q_len=2, cp_world=2, cp_rank=1, committed=(98, 150)),
    "two tables": replace(GQA, has_value_tables=True),
}
CASES: dict[str, Any] = {
    "trtllm": MLA_CASES,
    "run_mla": MLA_CASES,
    "xqa_mla": XQA_MLA_CASES,
    "xqa_batch": GQA_CASES,
    "xqa": GQA_CASES,
    "trtllm_gqa": SERVER_GQA_CASES,
}
OUTPUTS = ("out", "lse", "output", "workspace_buffer")
FORMAT = re.compile(r"\w[^\n]*: expected [^\n]+, got [^\n]+")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "run_mla": lambda **args: run_mla(*MlaArgs(**args)),
    **{name: entry.function for name, entry in ENTRY_POINTS.items()},
}


class Row(NamedTuple):
    """A broken argument: its entry point and case, its name, its value, and the message.

    A name such as ``kv_cache[1]`` is an item of an argument. The value is a function of the valid
    one, or a dictionary of several changes. The message is what follows the name.
    """

    call: str
    argument: str
    broken: Any
    message: str


Rows = dict[str, list[tuple[str, Any, str]]]


def broken(rows: Rows) -> pytest.MarkDecorator:
    """Return the parametrisation of a test by rows, by entry point and case."""
    return parametrised(Row(call, *row) for call, of_call in rows.items() for row in of_call)


def parametrised(rows: Iterable[Row]) -> pytest.MarkDecorator:
    """Return the parametrisation of a test by rows, named by call and what the message is on."""

    def name_of(row: Row) -> str:
        return f"{row.call}: {row.argument}{row.message.partition(': expected')[0]}"

    return pytest.mark.parametrize("row", list(rows), ids=name_of)


@cache
def valid_call(call: str) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """Return the function, the problem and the valid arguments of a call, with outputs."""
    name, _, case = call.partition(" ")
    problem = CASES[name][case].build("cpu")
    outputs = {"workspace_buffer": torch.empty(64)}
    if name.startswith("xqa") and name != "xqa_batch":
        outputs["output"] = ENTRY_POINTS[name].new_out(problem)
    else:
        outputs["out"] = problem.new_out()
    if CASES[name] is MLA_CASES:
        outputs["lse"] = torch.empty(problem.query.shape[:-1])
    if name == "run_mla":
        return FUNCTIONS[name], problem, problem.inputs(**outputs, return_lse=True)._asdict()
    arguments = ENTRY_POINTS[name].arguments(problem) | outputs
    if name == "trtllm":
        arguments["return_lse"] = True
    return FUNCTIONS[name], problem, arguments


def changed(arguments: dict[str, Any], argument: str, change: Any) -> dict[str, Any]:
    """Return the arguments with one changed; ``change`` is its value, or a function of it."""
    name, _, item = argument.partition("[")
    if not item:
        value = change(arguments[name]) if callable(change) else change
        return arguments | {name: value}
    items, index = list(arguments[name]), int(item.rstrip("]"))
    items[index] = change(items[index]) if callable(change) else change
    return arguments | {name: type(arguments[name])(items)}


def check(row: Row, error: type[Exception] = ArgumentError) -> None:
    """Check that a broken call is rejected with its message, and that it writes no output."""
    function, _, valid = valid_call(row.call)
    outputs = {
        name: torch.full_like(valid[name].float(), 7.0).to(valid[name].dtype)
        for name in OUTPUTS
        if name in valid
    }
    arguments = valid | outputs
    changes = row.broken if isinstance(row.broken, dict) else {row.argument: row.broken}
    for argument, change in changes.items():
        arguments = changed(arguments, argument, change)
    names = MlaArgNames() if row.call.startswith("run_mla") else None

    with pytest.raises(error) as caught:
        function(**arguments)

    text = str(caught.value)
    assert text.startswith(getattr(names, row.argument, row.argument) + row.message)
    assert FORMAT.fullmatch(text)
    assert [name for name, output in outputs.items() if (output != 7.0).any()] == []


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with stride 2 in the last dimension."""
    spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]


def padded(tensor: torch.Tensor, extra: int = 1, *, dim: int = -1) -> torch.Tensor:
    """Return a copy in memory with ``extra`` elements of padding along a dimension."""
    shape = list(tensor.shape)
    shape[dim] += extra
    return torch.zeros(shape, dtype=tensor.dtype).narrow(dim, 0, tensor.shape[dim]).copy_(tensor)


def displaced(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """Return a copy whose base address is some elements after an aligned one."""
    memory = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)
    return memory[elements:].view(tensor.shape).copy_(tensor)


def put(*at: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies a tensor with one element changed."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        copy[at] = value
        return copy

    return copied
