"""Entry points whose calls of tensors on the CPU are remembered and launched as if on a GPU."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from mlagen.api import call_cache, gqa_sm90_launcher, mla_sm90_launcher, tensor_guard
from mlagen.api.calls import rounded_up
from mlagen.errors import MlagenError
from mlagen.settings import current_settings
from tests.api.launches import GQA, HOPPER, PORTABLE, Launch, record_launches

# Stands for what is made where no output is given.
_OUT = torch.zeros(1 << 12, 16)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the only part of a nested one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a prototype
        return torch.nested.nested_tensor([tensor.to(torch.float32)])


# What may become of one tensor that was given.
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
    """A tensor of a class of its own."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """An entry point, and what its calls did."""

    module: ModuleType  # that remembers its calls
    run: Callable[..., object]
    launches: list[Launch]
    forms: list[object] = field(default_factory=list)  # that were read

    def outcome(self, arguments: dict[str, Any]) -> str:
        """Return what a call launches, or what it raises, in words."""
        self.launches.clear()
        try:
            self.run(**arguments)
        except (MlagenError, TypeError, ValueError, RuntimeError, struct.error) as error:
            return f"{type(error).__name__}: {error}"
        return "\n".join(map(repr, self.launches))

    def outcome_of_first(self, arguments: dict[str, Any]) -> str:
        """Return the same where nothing is remembered; what is remembered stays."""
        known = self.module._calls
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.module, "_calls", type(known)())
            return self.outcome(arguments)

    def require_as_at_first(self, fast_path: dict[str, Any], other: dict[str, Any]) -> None:
        """Check that neither call is taken for the other, whichever was made before."""
        first, different = map(self.outcome_of_first, (fast_path, other))
        for _ in range(3):
            assert self.outcome(fast_path) == first
        for _ in range(3):
            assert self.outcome(other) == different
            assert self.outcome(fast_path) == first

    def reads_form(self, arguments: dict[str, Any]) -> bool:
        """Whether a call reads the form of its arguments."""
        self.forms.clear()
        self.run(**arguments)
        return self.forms != []


def open_door(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, run: Callable[..., object]
) -> Door:
    """Return an entry point whose calls end in ``module``; its outputs are given, or tensors."""
    launches = record_launches(monkeypatch, paths=PORTABLE + HOPPER + GQA)
    door = Door(module=module, run=run, launches=launches)
    check_problem, call_signature = module.check_problem, module.call_signature

    def on_gpu(inputs: Any) -> Any:
        return replace(check_problem(inputs), device=torch.device("cuda", 0))

    def read(*arguments: Any) -> Any:
        door.forms.append(call_signature(*arguments))
        return door.forms[-1]

    def new_out(call: Any) -> torch.Tensor:
        return _OUT[: call.problem.tokens]

    monkeypatch.setattr(module, "check_problem", on_gpu)
    monkeypatch.setattr(module, "call_signature", read)
    monkeypatch.setattr(module, "_new_out", new_out)
    monkeypatch.setattr(module, "_calls", type(module._calls)())
    for hopper in (gqa_sm90_launcher, mla_sm90_launcher):
        monkeypatch.setattr(hopper, "scratch_offset", lambda *_: 0)
    current_settings.cache_clear()
    rounded_up.cache_clear()
    return door


def count_guards(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows by what is tried to be guarded."""
    made: list[object] = []
    make_guard = tensor_guard.make_guard

    def count(tensors: tuple[torch.Tensor, ...]) -> Any:
        made.append(len(tensors))
        return make_guard(tensors)

    monkeypatch.setattr(call_cache, "make_guard", count)
    return made
