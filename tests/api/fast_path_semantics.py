"""What is the same of the usual calls of every entry point."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from mlagen.api import call_cache, tensor_guard
from mlagen.settings import current_settings
from tests.api.fast_path_calls import TENSOR_CHANGES, Door, count_guards


class UsualSemantics:
    """The tests; a subclass names arguments and kernels, its module has the fixture ``door``."""

    usual_arguments: ClassVar[Callable[..., dict[str, Any]]]
    variable: ClassVar[str]  # of the environment, that chooses between the kernels
    hopper: ClassVar[str]
    portable: ClassVar[str]
    fast_path: ClassVar[str]  # which of them the usual call takes

    @pytest.mark.parametrize("change", TENSOR_CHANGES.values(), ids=TENSOR_CHANGES)
    @pytest.mark.parametrize("name", ["query", "workspace_buffer", "seq_lens", "out", "bmm2_scale"])
    def test_another_tensor_of_a_rare_call(self, name: str, change: Any, door: Door) -> None:
        """A call that the entry point has no key for is found by its tensors all the same."""
        rare = self.usual_arguments() | {"bmm2_scale": torch.full((1,), 2.0)}
        door.run(**rare)
        assert not door.reads_form(rare)

        door.require_as_at_first(rare, rare | {name: change(rare[name])})

    @pytest.mark.parametrize("number", [1, 69, 71, 40_000, -1, 2**31 - 1, 2**31, 70.0, True])
    @pytest.mark.parametrize("is_rare", [False, True])
    def test_another_length(self, number: Any, is_rare: bool, door: Door) -> None:
        """Lengths that round alike share a plan; what is too long is rejected after any of them."""
        fast_path = self.usual_arguments()
        if is_rare:
            fast_path["bmm2_scale"] = torch.full((1,), 2.0)

        door.require_as_at_first(fast_path, fast_path | {"max_seq_len": number})
        door.require_as_at_first(
            fast_path | {"max_seq_len": 2**31 - 1}, fast_path | {"max_seq_len": number}
        )

    @pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
    def test_another_number_of_a_rare_call(self, name: str, door: Door) -> None:
        """Zeros of both signs, and what a float cannot be."""
        other = "bmm2_scale" if name == "bmm1_scale" else "bmm1_scale"
        rare = self.usual_arguments() | {other: torch.full((1,), 2.0), name: 0.0}

        for value in (-0.0, 0.5, 1e39, math.nan, True, 0, "0"):
            door.require_as_at_first(rare, rare | {name: value})

    def test_storage_that_is_freed(self, door: Door) -> None:
        """No guard sees it; a rare call is rejected as a first one is."""
        rare = self.usual_arguments() | {"bmm2_scale": torch.full((1,), 2.0)}
        for _ in range(3):
            door.run(**rare)
        rare["query"].untyped_storage().resize_(0)

        assert "ArgumentError: query: expected a dense tensor" in door.outcome(rare)
        assert door.launches == []

    def test_a_rare_call_whose_contents_are_checked(
        self, door: Door, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is found again, and looked at."""
        rare = self.usual_arguments() | {"bmm2_scale": torch.full((1,), 2.0)}
        for _ in range(3):
            door.run(**rare)
        monkeypatch.setenv("MLAGEN_CHECK", "1")
        current_settings.cache_clear()
        assert self.fast_path in door.outcome(rare)
        rare["seq_lens"][0] = 10_000

        assert "ArgumentError: seq_lens[0]" in door.outcome(rare)
        assert door.launches == []

    @pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
    def test_zeros_of_both_signs(self, name: str, door: Door) -> None:
        """They are equal, and what is passed is not."""
        fast_path = self.usual_arguments() | {name: 0.0}
        other = fast_path | {name: -0.0}

        assert door.outcome(fast_path) != door.outcome(other)
        door.require_as_at_first(fast_path, other)

    def test_a_tensor_that_changes_in_place(self, door: Door) -> None:
        """An object is no sign of what it was before."""
        fast_path = self.usual_arguments(seq_lens=torch.tensor([70, 3], dtype=torch.int32))
        for _ in range(3):
            door.outcome(fast_path)
        fast_path["seq_lens"].resize_(1)

        assert door.outcome(fast_path) == door.outcome_of_first(fast_path)
        assert "ArgumentError: seq_lens.shape" in door.outcome(fast_path)

    def test_tensors_of_two_kinds_in_turn_have_a_guard_each(
        self, door: Door, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inference tensors are not like others, though of the same form."""
        made = count_guards(monkeypatch)
        fast_path = self.usual_arguments()
        with torch.inference_mode():
            inferred = fast_path | {"query": fast_path["query"].clone()}
        expected = [door.outcome_of_first(arguments) for arguments in (fast_path, inferred)]
        made.clear()
        door.forms.clear()

        outcomes = [
            [door.outcome(arguments) for arguments in (fast_path, inferred)] for _ in range(9)
        ]

        assert outcomes == [expected] * 9
        assert len(made) == len(door.forms) == 2

    @pytest.mark.parametrize(("widths", "forms"), [(4, 4), (5, 45)])
    def test_forms_in_turn_have_a_guard_each(
        self, widths: int, forms: int, door: Door, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tables of some widths share a key; more than are tried read forms, and make no guards."""
        made = count_guards(monkeypatch)
        fast_path = self.usual_arguments()
        table = torch.zeros(2, 20, dtype=torch.int32)
        calls = [
            fast_path | {"block_tables": table[:, :-width].clone()}
            for width in range(1, widths + 1)
        ]

        for _ in range(9):
            for arguments in calls:
                door.run(**arguments)

        assert len(made) == widths
        assert len(door.forms) == forms

    def test_a_form_gets_few_guards(self, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
        """One for each call would cost more than reading its form."""
        made: list[object] = []

        def deny(tensors: tuple[torch.Tensor, ...]) -> Any:
            made.append(len(tensors))
            return lambda *_: False

        monkeypatch.setattr(call_cache, "make_guard", deny)
        arguments = self.usual_arguments()

        for _ in range(9):
            door.run(**arguments)

        assert len(made) == call_cache._MAX_GUARDS
        assert len(door.forms) == 9

    def test_where_torch_has_no_guards_forms_are_read(
        self, door: Door, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The results are the same."""
        monkeypatch.setattr(tensor_guard, "_valid_guards", lambda: None)
        arguments = self.usual_arguments()
        expected = door.outcome_of_first(arguments)

        outcomes = [door.outcome(arguments) for _ in range(3)]

        assert outcomes == [expected] * 3
        assert door.reads_form(arguments)

    def test_the_kernel_that_is_asked_for_is_launched(
        self, door: Door, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A usual call of one kernel is not that of another."""
        arguments, families = self.usual_arguments(), []
        for kernel in ("sm90", "sm80") * 3:
            monkeypatch.setenv(self.variable, kernel)
            current_settings.cache_clear()
            door.outcome(arguments)
            families.append(door.launches[0].family)

        assert families == [self.hopper, self.portable] * 3

    def test_contents_are_checked_at_every_call(
        self, door: Door, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A remembered launch would write before anything was looked at."""
        arguments = self.usual_arguments()
        for _ in range(3):
            door.run(**arguments)
        monkeypatch.setenv("MLAGEN_CHECK", "1")
        current_settings.cache_clear()
        for _ in range(2):
            assert self.fast_path in door.outcome(arguments)
        arguments["seq_lens"][0] = 10_000

        assert "ArgumentError: seq_lens[0]" in door.outcome(arguments)
        assert door.launches == []

    def test_a_call_of_no_requests_launches_nothing(self, door: Door) -> None:
        """However often it is made."""
        arguments = self.usual_arguments()
        for name in ("query", "out", "block_tables", "seq_lens"):
            arguments[name] = arguments[name][:0]

        assert [door.outcome(arguments) for _ in range(4)] == [""] * 4
