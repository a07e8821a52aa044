"""Entry points whose calls on CPU tensors are cached and launched as if on a GPU."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from mlagen.errors import MlagenError
from mlagen.families.common import call_cache, tensor_guard
from mlagen.families.common.launchers import rounded_up
from mlagen.families.gqa import launch_sm90 as gqa_sm90_launcher
from mlagen.families.mla import launch_sm90 as mla_sm90_launcher
from mlagen.settings import current_settings
from tests.families.launches import GQA_PATHS, SM80_PATH, SM90_PATH, Launch, record_launches

# Stands for an output that a call allocates.
_OUT = torch.zeros(1 << 12, 16)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor with one component."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
        return torch.nested.nested_tensor([tensor.to(torch.float32)])


# Changes of one tensor argument.
TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "elsewhere": torch.clone,
    "none": lambda _: None,
    "no tensor": lambda _: "a word",
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


class Named(torch.Tensor):
    """A subclass of torch.Tensor."""


@dataclass(frozen=True, kw_only=True)
class EntryPoint:
    """An entry point, with the launches and signatures of its calls."""

    module: ModuleType  # with the call cache
    run: Callable[..., object]
    launches: list[Launch]
    signatures: list[object] = field(default_factory=list)  # read by calls

    def outcome(self, arguments: dict[str, Any]) -> str:
        """Return the launches of a call, or its exception, as text."""
        self.launches.clear()
        try:
            self.run(**arguments)
        except (MlagenError, TypeError, ValueError, RuntimeError, struct.error) as error:
            return f"{type(error).__name__}: {error}"
        return "\n".join(map(repr, self.launches))

    def uncached_outcome(self, arguments: dict[str, Any]) -> str:
        """Return the same with an empty call cache; the present cache is unchanged."""
        cache = self.module._calls
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.module, "_calls", type(cache)())
            return self.outcome(arguments)

    def require_independent(self, fast_path: dict[str, Any], other: dict[str, Any]) -> None:
        """Check that neither call hits the other's cache entry, in either order."""
        first, different = map(self.uncached_outcome, (fast_path, other))
        for _ in range(3):
            assert self.outcome(fast_path) == first
        for _ in range(3):
            assert self.outcome(other) == different
            assert self.outcome(fast_path) == first

    def reads_signature(self, arguments: dict[str, Any]) -> bool:
        """Whether a call reads the signature of its arguments."""
        self.signatures.clear()
        self.run(**arguments)
        return self.signatures != []


def make_entry_point(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, run: Callable[..., object]
) -> EntryPoint:
    """Return an entry point whose calls end in ``module``, and whose outputs are on the CPU."""
    launches = record_launches(monkeypatch, paths=SM80_PATH + SM90_PATH + GQA_PATHS)
    entry_point = EntryPoint(module=module, run=run, launches=launches)
    check_problem, call_signature = module.check_problem, module.call_signature

    def on_gpu(inputs: Any) -> Any:
        return replace(check_problem(inputs), device=torch.device("cuda", 0))

    def read_signature(*arguments: Any) -> Any:
        entry_point.signatures.append(call_signature(*arguments))
        return entry_point.signatures[-1]

    def new_out(call: Any) -> torch.Tensor:
        return _OUT[: call.problem.tokens]

    monkeypatch.setattr(module, "check_problem", on_gpu)
    monkeypatch.setattr(module, "call_signature", read_signature)
    monkeypatch.setattr(module, "_new_out", new_out)
    monkeypatch.setattr(module, "_calls", type(module._calls)())
    for launcher in (gqa_sm90_launcher, mla_sm90_launcher):
        monkeypatch.setattr(launcher, "scratch_offset", lambda *_: 0)
    current_settings.cache_clear()
    rounded_up.cache_clear()
    return entry_point


def count_guards(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows with each attempt to make a guard."""
    attempts: list[object] = []
    make_guard = tensor_guard.make_guard

    def count(tensors: tuple[torch.Tensor, ...]) -> Any:
        attempts.append(len(tensors))
        return make_guard(tensors)

    monkeypatch.setattr(call_cache, "make_guard", count)
    return attempts
