"""Tests of the fast path that all entry points share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from mlagen.families.common import call_cache, tensor_guard
from mlagen.settings import current_settings
from tests.families.fast_path_calls import TENSOR_CHANGES, EntryPoint, count_guards


class FastPathSemantics:
    """The tests; a subclass has arguments and kernels, its module the fixture ``entry_point``."""

    fast_path_arguments: ClassVar[Callable[..., dict[str, Any]]]
    variable: ClassVar[str]  # environment variable that chooses the kernel
    sm90_kernel: ClassVar[str]
    sm80_kernel: ClassVar[str]
    fast_path: ClassVar[str]  # the kernel of the fast-path arguments

    @pytest.mark.parametrize("change", TENSOR_CHANGES.values(), ids=TENSOR_CHANGES)
    @pytest.mark.parametrize("name", ["query", "workspace_buffer", "seq_lens", "out", "bmm2_scale"])
    def test_another_tensor_of_a_rare_call(
        self, name: str, change: Any, entry_point: EntryPoint
    ) -> None:
        """The cache also finds calls for which the entry point makes no key."""
        rare = self.fast_path_arguments() | {"bmm2_scale": torch.full((1,), 2.0)}
        entry_point.run(**rare)
        assert not entry_point.reads_signature(rare)

        entry_point.require_independent(rare, rare | {name: change(rare[name])})

    @pytest.mark.parametrize("number", [1, 69, 71, 40_000, -1, 2**31 - 1, 2**31, 70.0, True])
    @pytest.mark.parametrize("is_rare", [False, True])
    def test_another_length(self, number: Any, is_rare: bool, entry_point: EntryPoint) -> None:
        """Lengths with equal rounding share a plan, and invalid lengths are rejected after any."""
        fast_path = self.fast_path_arguments()
        if is_rare:
            fast_path["bmm2_scale"] = torch.full((1,), 2.0)

        entry_point.require_independent(fast_path, fast_path | {"max_seq_len": number})
        entry_point.require_independent(
            fast_path | {"max_seq_len": 2**31 - 1}, fast_path | {"max_seq_len": number}
        )

    @pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
    def test_another_number_of_a_rare_call(self, name: str, entry_point: EntryPoint) -> None:
        """Zeros of either sign, and values beyond float32, never hit another number's entry."""
        other = "bmm2_scale" if name == "bmm1_scale" else "bmm1_scale"
        rare = self.fast_path_arguments() | {other: torch.full((1,), 2.0), name: 0.0}

        for value in (-0.0, 0.5, 1e39, math.nan, True, 0, "0"):
            entry_point.require_independent(rare, rare | {name: value})

    def test_storage_that_is_freed(self, entry_point: EntryPoint) -> None:
        """A cached rare call with freed storage is rejected, though guards do not detect it."""
        rare = self.fast_path_arguments() | {"bmm2_scale": torch.full((1,), 2.0)}
        for _ in range(3):
            entry_point.run(**rare)
        rare["query"].untyped_storage().resize_(0)

        assert "ArgumentError: query: expected a dense tensor" in entry_point.outcome(rare)
        assert entry_point.launches == []

    def test_a_rare_call_whose_contents_are_checked(
        self, entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cached rare call is still checked with MLAGEN_CHECK=1."""
        rare = self.fast_path_arguments() | {"bmm2_scale": torch.full((1,), 2.0)}
        for _ in range(3):
            entry_point.run(**rare)
        monkeypatch.setenv("MLAGEN_CHECK", "1")
        current_settings.cache_clear()
        assert self.fast_path in entry_point.outcome(rare)
        rare["seq_lens"][0] = 10_000

        assert "ArgumentError: seq_lens[0]" in entry_point.outcome(rare)
        assert entry_point.launches == []

    @pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
    def test_zeros_of_both_signs(self, name: str, entry_point: EntryPoint) -> None:
        """Zeros compare equal, but each call passes its own sign to the kernel."""
        fast_path = self.fast_path_arguments() | {name: 0.0}
        other = fast_path | {name: -0.0}

        assert entry_point.outcome(fast_path) != entry_point.outcome(other)
        entry_point.require_independent(fast_path, other)

    def test_a_tensor_that_changes_in_place(self, entry_point: EntryPoint) -> None:
        """A tensor resized in place does not hit its previous entry."""
        fast_path = self.fast_path_arguments(seq_lens=torch.tensor([70, 3], dtype=torch.int32))
        for _ in range(3):
            entry_point.outcome(fast_path)
        fast_path["seq_lens"].resize_(1)

        assert entry_point.outcome(fast_path) == entry_point.uncached_outcome(fast_path)
        assert "ArgumentError: seq_lens.shape" in entry_point.outcome(fast_path)

    def test_alternating_kinds_of_tensors_have_a_guard_each(
        self, entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inference and normal tensors with one signature have one guard each."""
        attempts = count_guards(monkeypatch)
        fast_path = self.fast_path_arguments()
        with torch.inference_mode():
            inference = fast_path | {"query": fast_path["query"].clone()}
        expected = [entry_point.uncached_outcome(arguments) for arguments in (fast_path, inference)]
        attempts.clear()
        entry_point.signatures.clear()

        outcomes = [
            [entry_point.outcome(arguments) for arguments in (fast_path, inference)]
            for _ in range(9)
        ]

        assert outcomes == [expected] * 9
        assert len(attempts) == len(entry_point.signatures) == 2

    @pytest.mark.parametrize(("widths", "signatures"), [(4, 4), (5, 45)])
    def test_alternating_signatures_have_a_guard_each(
        self, widths: int, signatures: int, entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Signatures of one key have a guard each, even if the key has too few entries."""
        attempts = count_guards(monkeypatch)
        fast_path = self.fast_path_arguments()
        table = torch.zeros(2, 20, dtype=torch.int32)
        calls = [
            fast_path | {"block_tables": table[:, :-width].clone()}
            for width in range(1, widths + 1)
        ]

        for _ in range(9):
            for arguments in calls:
                entry_point.run(**arguments)

        assert len(attempts) == widths
        assert len(entry_point.signatures) == signatures

    def test_a_signature_has_few_guards(
        self, entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A signature whose guards reject its tensors gets no guard at every call."""
        attempts: list[object] = []

        def make_rejecting_guard(tensors: tuple[torch.Tensor, ...]) -> Any:
            attempts.append(len(tensors))
            return lambda *_: False

        monkeypatch.setattr(call_cache, "make_guard", make_rejecting_guard)
        arguments = self.fast_path_arguments()

        for _ in range(9):
            entry_point.run(**arguments)

        assert len(attempts) == call_cache._MAX_GUARDS
        assert len(entry_point.signatures) == 9

    def test_without_torch_guards_calls_read_signatures(
        self, entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A torch without guards has the same results, by signatures alone."""
        monkeypatch.setattr(tensor_guard, "_valid_guards", lambda: None)
        arguments = self.fast_path_arguments()
        expected = entry_point.uncached_outcome(arguments)

        outcomes = [entry_point.outcome(arguments) for _ in range(3)]

        assert outcomes == [expected] * 3
        assert entry_point.reads_signature(arguments)

    def test_the_requested_kernel_is_launched(
        self, entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cached call of one kernel is not replayed when the settings request another."""
        arguments, families = self.fast_path_arguments(), []
        for kernel in ("sm90", "sm80") * 3:
            monkeypatch.setenv(self.variable, kernel)
            current_settings.cache_clear()
            entry_point.outcome(arguments)
            families.append(entry_point.launches[0].family)

        assert families == [self.sm90_kernel, self.sm80_kernel] * 3

    def test_contents_are_checked_at_every_call(
        self, entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With MLAGEN_CHECK=1 no cached launch is replayed before the checks."""
        arguments = self.fast_path_arguments()
        for _ in range(3):
            entry_point.run(**arguments)
        monkeypatch.setenv("MLAGEN_CHECK", "1")
        current_settings.cache_clear()
        for _ in range(2):
            assert self.fast_path in entry_point.outcome(arguments)
        arguments["seq_lens"][0] = 10_000

        assert "ArgumentError: seq_lens[0]" in entry_point.outcome(arguments)
        assert entry_point.launches == []

    def test_a_call_of_no_requests_launches_nothing(self, entry_point: EntryPoint) -> None:
        """A call without requests launches nothing, cached or not."""
        arguments = self.fast_path_arguments()
        for name in ("query", "out", "block_tables", "seq_lens"):
            arguments[name] = arguments[name][:0]

        assert [entry_point.outcome(arguments) for _ in range(4)] == [""] * 4
