"""Call signatures of grouped-query decode."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.decode
from mlagen.errors import ArgumentError
from mlagen.families.gqa import signature as gqa_signature
from mlagen.families.gqa.args import GqaArgs
from tests.families.gqa_launches import args_of
from tests.families.launches import PROPERTIES_AND_DEVICE
from tests.problems.gqa import GqaCase

UNIFORM = GqaCase(name="", seq_lens=(70, 3), q_len=2, mask="random", sink=3.0, window=50)

Change = Callable[[GqaArgs], dict[str, Any]]


def call_signature(inputs: GqaArgs) -> Hashable:
    """Return the call signature with default settings."""
    return gqa_signature.call_signature(inputs, "auto")


def changed(inputs: GqaArgs, **fields: Any) -> GqaArgs:
    """Return the arguments with fields of any type changed."""
    return inputs._replace(**fields)


CHANGES: dict[str, Change] = {
    "no values": lambda _: {"value_cache": None},
    "max_seq_len": lambda _: {"max_seq_len": 1000},
    "q_len": lambda _: {"q_len": 4},
    "layout": lambda _: {"kv_layout": "HND"},
    "window": lambda _: {"window": 60},
    "out given": lambda i: {"out": torch.zeros_like(i.query)},
    "factor of 16 bits an int": lambda _: {"out_16bit_factor": 1},
    "factor of e4m3 an int": lambda _: {"out_e4m3_factor": 1},
    "bmm1_scale a tensor": lambda _: {"bmm1_scale": torch.tensor(1.0)},
    "bmm2_scale an int": lambda _: {"bmm2_scale": 1},
    "bmm2_scale a tensor": lambda _: {"bmm2_scale": torch.tensor(1.0)},
    "no sinks": lambda _: {"sinks": None},
    "no mask": lambda _: {"mask": None},
    "ragged": lambda _: {"cum_seq_lens_q": torch.zeros(3, dtype=torch.int32)},
    "scales of both": lambda i: {"key_scales": i.key_cache},
    "an axis of beams": lambda _: {"with_beam_axis": True},
    "scales like xqa": lambda _: {"scales_like_xqa": True},
}

# Two values of one argument that compare equal and must have different signatures.
PAIRS: dict[str, tuple[str, object, object]] = {
    "max_seq_len a float": ("max_seq_len", 5, 5.0),
    "max_seq_len a bool": ("max_seq_len", 1, True),
    "q_len a float": ("q_len", 2, 2.0),
    "q_len a bool": ("q_len", 1, True),
}


@pytest.mark.parametrize(("name", "one", "other"), PAIRS.values(), ids=PAIRS)
def test_a_value_that_equals_an_int_has_another_signature(
    name: str, one: object, other: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of another type is rejected, even after a call with the equal int."""
    inputs = args_of(UNIFORM, monkeypatch)

    signature, another = (call_signature(changed(inputs, **{name: n})) for n in (one, other))

    assert signature is not None
    assert signature != another


TENSORS = (
    "query",
    "key_cache",
    "value_cache",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "out",
    "bmm1_scale",
    "bmm2_scale",
    "sinks",
    "mask",
    "cum_seq_lens_q",
    "key_scales",
    "value_scales",
)


@pytest.mark.parametrize("change", PROPERTIES_AND_DEVICE.values(), ids=PROPERTIES_AND_DEVICE)
@pytest.mark.parametrize("name", TENSORS)
def test_the_signature_contains_every_property_of_every_tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that differ in one tensor property have different signatures."""
    tensor = torch.ones(4, 4)
    inputs = args_of(UNIFORM, monkeypatch, key_scales=tensor)

    one, other = (
        call_signature(changed(inputs, **{name: given})) for given in (tensor, change(tensor))
    )

    assert one is not None
    assert other is not None
    assert one != other


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_signature_contains_all_inputs_of_checks_and_plans(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that differ in an argument of a check or plan have different signatures."""
    inputs = args_of(UNIFORM, monkeypatch)

    changed = call_signature(inputs._replace(**change(inputs)))

    assert changed is not None
    assert changed != call_signature(inputs)


@pytest.mark.parametrize("length", [70, np.int64(70)], ids=["int", "numpy"])
def test_lengths_with_equal_rounding_share_a_signature(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signature contains the rounded length, of any integer type."""
    inputs = args_of(UNIFORM, monkeypatch)

    signatures = [
        call_signature(inputs._replace(max_seq_len=type(length)(n), q_len=type(length)(2)))
        for n in (length, 72)
    ]

    assert signatures[0] is not None
    assert signatures[0] == signatures[1]


def test_a_tensor_for_a_length_is_rejected_without_reading_it() -> None:
    """A tensor as length is rejected without reading its value."""
    length = torch.tensor(70).as_subclass(Unread)
    arguments = UNIFORM.build("cpu").arguments(max_seq_len=length)

    with pytest.raises(ArgumentError) as caught:
        mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)

    assert str(caught.value) == "max_seq_len: expected an int, 0 or more, got a tensor"


class Unread(torch.Tensor):
    """A tensor whose contents must not be read."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        """Reject any use of the tensor except its type name."""
        raise AssertionError(f"read by {func}")


def test_the_signature_does_not_contain_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents of tensors and values of floats do not change the signature."""
    inputs = args_of(UNIFORM, monkeypatch)
    other = inputs._replace(
        query=torch.zeros_like(inputs.query),
        seq_lens=inputs.seq_lens + 1,
        bmm1_scale=0.5,
        out_16bit_factor=3.0,
    )

    assert call_signature(other) == call_signature(inputs)


def test_an_unhashable_value_is_rejected_by_name() -> None:
    """A list in place of a number is rejected by a check, without a TypeError of the cache."""
    arguments = UNIFORM.build("cpu").arguments(q_len_per_req=[2])

    with pytest.raises(ArgumentError) as caught:
        mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)

    assert str(caught.value) == "q_len_per_req: expected an int, 1 or more, got [2]"


def test_the_signature_contains_the_requested_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached call of one kernel is not reused when the settings request another."""
    inputs = args_of(UNIFORM, monkeypatch)

    signatures = {
        gqa_signature.call_signature(inputs, kernel) for kernel in ("auto", "sm80", "sm90")
    }

    assert len(signatures) == 3
