"""Every entry point with a call on CPU tensors that is cached and launched as if on a GPU."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.mla
from mlagen.errors import MlagenError
from mlagen.families.common import launchers
from mlagen.families.common.dispatch import Dispatcher
from mlagen.families.dispatch import GQA, MLA
from mlagen.mla import flare, flare_operands
from mlagen.settings import current_settings
from tests.families.launches import Case, Launches, record_launches
from tests.families.planned_runs import planned, planned_packed, run_wrapper
from tests.fixture_types import Patch
from tests.problems import batch_decode
from tests.problems.dsv4 import DSV4, Dsv4Case
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.gqa import GqaCase
from tests.problems.mla import KINDS, MlaCase

MLA_CASE = MlaCase(seq_lens=(70, 3), heads=16)
DSV4_CASE = Dsv4Case(seq_lens=(70, 3), extra_lens=(9, 100), entries="valid", sinks="random")
GQA_CASE = GqaCase(seq_lens=(70, 3), sink=3.0, window=50, page_size=16)

# Stand for an output that a call allocates, and for lengths that it computes.
_OUT = torch.zeros(1 << 12, 16)
LENGTHS = torch.zeros(16, dtype=torch.int32)


class Named(torch.Tensor):
    """A subclass of torch.Tensor."""


def nested(tensor: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor with one component, at the same address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
        whole = tensor.as_strided((tensor.numel(),), (1,))
        facts = ([tensor.shape], [tensor.contiguous().stride()], [0])
        return torch._nested_view_from_buffer(whole, *map(torch.tensor, facts))


# Changes of one tensor argument.
TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "elsewhere": torch.clone,
    "none": lambda _: None,
    "no tensor": lambda _: "a word",
    "in a list": lambda tensor: [tensor],
    "fewer": lambda tensor: tensor[:-1],
    "no axis": lambda tensor: tensor[0],
    "strided": lambda tensor: tensor.repeat_interleave(2, dim=0)[::2],
    "strided inside": lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2],
    "another dtype": lambda tensor: tensor.view(
        {1: torch.int8, 2: torch.float16, 4: torch.uint32}[tensor.element_size()]
    ),
    "one of a wider dtype": lambda tensor: tensor.to(torch.float64),
    "not aligned": lambda tensor: torch.cat([tensor.flatten(), tensor.flatten()])[
        1 : tensor.numel() + 1
    ].view(tensor.shape),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "a subclass": lambda tensor: tensor.as_subclass(Named),
    "nested": nested,
}

_WORDS = ("auto", "xqa", "sparse", "modular", "HND", "basee", "pow2-fp32", "no", None, ["a"], 1)


def other_values(value: object) -> tuple[Any, ...]:
    """Return values that may not hit the call of a scalar argument."""
    if isinstance(value, bool):
        return (not value, int(value), np.bool_(value), None, "no", torch.tensor(value))
    if isinstance(value, int):
        equal = (float(value), np.int64(value), torch.tensor(value), [value], str(value))
        return (value + 1, 2 * value, 0, 1, True, -1, 2**31 - 1, 2**31, 10**400, None, *equal)
    if isinstance(value, float):
        others = (1, True, "1", None, 10**400, torch.tensor(2.0))
        return (0.5, 1.0, 0.0, -0.0, -1.0, math.inf, math.nan, 1e39, *others)
    if isinstance(value, str):
        return _WORDS
    return (0, 1, 2, True, False, 0.0, 1.5, "no", [1], torch.zeros(3, dtype=torch.int32))


@dataclass(frozen=True)
class Row:
    """An entry point, with a call of few launches."""

    run: Callable[..., object]
    calls: Dispatcher
    build: Callable[[], dict[str, Any]]  # the arguments
    tensors: str  # the tensor arguments, which checks and launches depend on
    max_files: int = 5  # of a replay

    @property
    def family(self) -> str:
        """``mla`` or ``gqa``."""
        return "mla" if self.calls is MLA else "gqa"

    @property
    def kernel(self) -> str:
        """The kernel of the call."""
        return "mla_sm80" if self.calls is MLA else "gqa_sm90"

    def default_of(self, name: str) -> object:
        """Return the default of an argument; None without one."""
        default = signature(self.run).parameters[name].default
        return None if default is Parameter.empty else default

    def scalars(self) -> list[str]:
        """Return the other arguments."""
        tensors = {name.partition("[")[0] for name in self.tensors.split()}
        return [name for name in signature(self.run).parameters if name not in tensors]


def given_of(name: str, case: Case) -> dict[str, Any]:
    """Return the arguments of an entry point, by name."""
    entry, problem = ENTRY_POINTS[name], case.build("cpu")
    given = entry.arguments(problem) | {"workspace_buffer": torch.zeros(1 << 20)}
    return given | {entry.names["out"]: entry.new_out(problem, 0.0)}


def _trtllm_in_parts() -> dict[str, Any]:
    given = given_of("trtllm", MLA_CASE)
    parts = given["query"].split([512, 64], dim=-1)
    return given | {"query": tuple(part.contiguous() for part in parts)}


def _planned_decode() -> dict[str, Any]:
    problem = GQA_CASE.build("cpu")
    wrapper = batch_decode.wrapper_of(problem, torch.zeros(1 << 20))
    out = torch.zeros_like(problem.query)
    return batch_decode.run_arguments(problem, out=out, wrapper=wrapper)


def run_flare(**given: Any) -> object:
    """Call ``flare_mla_decoding`` with the fields of its cache as arguments."""
    blocks, table, lengths = map(given.pop, ("blocks", "block_table", "cache_lengths"))
    keys = mlagen.mla.PagedKVCache(blocks, table, lengths, given.pop("scales", None))
    return mlagen.mla.flare_mla_decoding(k=keys, mask=mlagen.mla.CausalMask(), **given)


def _two_pools() -> dict[str, Any]:
    problem = DSV4_CASE.build("cpu")
    return problem.arguments(workspace_buffer=torch.zeros(1 << 20), out=problem.new_out(0.0))


def _flare_of(case: MlaCase) -> dict[str, Any]:
    given = case.build("cpu").arguments()
    return {
        "q": given["query"],
        "blocks": given["kv_cache"],
        "block_table": given["block_tables"],
        "cache_lengths": given["seq_lens"] - 1,
        "valid_length": torch.ones(2, dtype=torch.int32),
        "scale": 0.5,
        "output": torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16),
    }


def _flare_with_scales() -> dict[str, Any]:
    problem = replace(MLA_CASE, **KINDS["fp8_per_token"]).build("cpu")
    return _flare_of(problem.case) | {
        "scales": problem.extra_args["kv_scales"],
        "q_scale": problem.extra_args["query_scales"],
        "per_token_scale_rope_aware": True,
    }


_MLA_TENSORS = "query kv_cache workspace_buffer block_tables seq_lens out"
_MLA_PAIR_TENSORS = f"query[0] query[1] {_MLA_TENSORS.partition(' ')[2]}"
_XQA_TENSORS = "q k_cache v_cache page_table seq_lens output workspace_buffer semaphores"
_GQA_TENSORS = "query kv_cache[0] kv_cache[1] workspace_buffer block_tables seq_lens out sinks"
_DSV4_TENSORS = (
    "query swa_kv_cache workspace_buffer sparse_indices swa_topk_lens compressed_kv_cache "
    "extra_sparse_indices extra_sparse_topk_lens out sinks"
)
_FLARE_TENSORS = "q blocks block_table cache_lengths valid_length output"


def _row(name: str, calls: Dispatcher, tensors: str) -> Row:
    case = MLA_CASE if calls is MLA else GQA_CASE
    return Row(ENTRY_POINTS[name].function, calls, lambda: given_of(name, case), tensors)


ROWS = {
    "trtllm": _row("trtllm", MLA, _MLA_TENSORS),
    "trtllm in parts": Row(
        ENTRY_POINTS["trtllm"].function, MLA, _trtllm_in_parts, _MLA_PAIR_TENSORS
    ),
    "dsv4": Row(DSV4.function, MLA, _two_pools, _DSV4_TENSORS),
    "xqa_batch_mla": _row("xqa_batch_mla", MLA, _MLA_TENSORS),
    "xqa_mla": _row("xqa_mla", MLA, _XQA_TENSORS),
    "xqa": _row("xqa", GQA, f"{_XQA_TENSORS} sinks"),
    "xqa_batch": _row("xqa_batch", GQA, _GQA_TENSORS),
    "trtllm_gqa": _row("trtllm_gqa", GQA, _GQA_TENSORS),
    "wrapper": Row(run_wrapper, MLA, planned, "q_nope q_pe ckv_cache kpe_cache out"),
    # One tensor stands for two parts, which its guard compares.
    "wrapper packed": Row(run_wrapper, MLA, planned_packed, "query kv_cache sinks out", 6),
    "batch_decode": Row(
        run_wrapper, GQA, _planned_decode, "q paged_kv_cache[0] paged_kv_cache[1] out sinks"
    ),
    # It computes lengths from its arguments.
    "flare": Row(run_flare, MLA, lambda: _flare_of(MLA_CASE), _FLARE_TENSORS, max_files=7),
    "flare with scales": Row(
        run_flare, MLA, _flare_with_scales, f"{_FLARE_TENSORS} scales q_scale", max_files=7
    ),
}


@dataclass(frozen=True, kw_only=True)
class EntryPoint:
    """An entry point with an empty cache, and the launches and signatures of its calls."""

    row: Row
    launches: Launches
    plans: list[object] = field(default_factory=list)  # made by calls
    dispatches: list[object] = field(default_factory=list)  # calls without a replay

    def call(self, arguments: dict[str, Any]) -> object:
        """Compute a call."""
        return self.row.run(**arguments)

    def outcome(self, arguments: dict[str, Any]) -> str:
        """Return the launches of a call, or its exception, as text."""
        self.launches.clear()
        try:
            self.row.run(**arguments)
        except (MlagenError, TypeError, ValueError, RuntimeError, struct.error) as error:
            return f"{type(error).__name__}: {error}"
        return "\n".join(map(repr, self.launches))

    def uncached_outcome(self, arguments: dict[str, Any]) -> str:
        """Return the same with an empty call cache; the present cache is unchanged."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.row.calls, "_replays", {})
            patch.setattr(self.row.calls, "_guarded", {})
            return self.outcome(arguments)

    def require_independent(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        """Check that neither call hits the other's cache entry, in either order."""
        first, different = map(self.uncached_outcome, (one, other))
        for _ in range(2):
            assert self.outcome(one) == first
        for _ in range(2):
            assert self.outcome(other) == different
            assert self.outcome(one) == first

    def is_planned(self, arguments: dict[str, Any]) -> bool:
        """Whether a call is validated and planned."""
        self.plans.clear()
        self.row.run(**arguments)
        return self.plans != []

    def is_replayed(self, arguments: dict[str, Any]) -> bool:
        """Whether a call is replayed."""
        self.dispatches.clear()
        self.row.run(**arguments)
        return self.dispatches == []


def make_entry_point(monkeypatch: Patch, row: Row) -> EntryPoint:
    """Return an entry point whose calls are planned for a GPU, with outputs on the CPU."""
    launches = record_launches(monkeypatch)
    calls = row.calls
    entry_point = EntryPoint(row=row, launches=launches)
    validate, plan, run = calls.family.validate, calls.plan, calls.run

    def on_gpu(args: Any) -> Any:
        args, problem = validate(args)
        return args, replace(problem, device=torch.device("cuda", 0))

    def count_plan(*given: Any) -> Any:
        entry_point.plans.append(None)
        return plan(*given)

    def count_run(*given: Any) -> Any:
        entry_point.dispatches.append(None)  # tensors of the call may be freed
        return run(*given)

    def new_output(shape: tuple[int, ...], dtype: torch.dtype, _: object) -> torch.Tensor:
        return _OUT.flatten().view(dtype)[: math.prod(shape)].view(shape)

    compute: Any = flare_operands.compute_padded

    def compute_padded(*given: Any, **needs: bool) -> Any:
        queries = compute(*given, **needs)
        lengths = LENGTHS[: queries.seq_lens.numel()].copy_(queries.seq_lens)
        return queries._replace(seq_lens=lengths)

    for module in (flare, flare_operands):
        monkeypatch.setattr(module, "compute_padded", compute_padded)
    monkeypatch.setattr(calls.family, "validate", on_gpu)
    monkeypatch.setattr(calls, "plan", count_plan)
    monkeypatch.setattr(calls, "run", count_run)
    monkeypatch.setattr(calls, "_replays", {})
    monkeypatch.setattr(calls, "_guarded", {})
    monkeypatch.setattr(launchers, "new_output", new_output)
    monkeypatch.setattr(launchers, "scratch_offset", lambda *_: 0)
    current_settings.cache_clear()
    return entry_point
