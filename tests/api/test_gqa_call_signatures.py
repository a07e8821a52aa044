"""What a grouped-query call on a GPU is remembered by."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.decode
from mlagen.api import gqa_signature
from mlagen.api.gqa_args import GqaArgs
from mlagen.errors import ArgumentError
from tests.api.gqa_launches import args_of
from tests.api.launches import FACTS
from tests.gqa_problems import GqaCase

UNIFORM = GqaCase(name="", seq_lens=(70, 3), q_len=2, mask="random", sink=3.0, window=50)

Change = Callable[[GqaArgs], dict[str, Any]]


def call_signature(inputs: GqaArgs) -> Hashable:
    """Return what a call is remembered by, where the settings say nothing."""
    return gqa_signature.call_signature(inputs, "auto")


def changed(inputs: GqaArgs, **fields: Any) -> GqaArgs:
    """Return the inputs with some fields of whatever type."""
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

# Two values of one argument that must not be taken for each other.
PAIRS: dict[str, tuple[str, object, object]] = {
    "max_seq_len a float": ("max_seq_len", 5, 5.0),
    "max_seq_len a bool": ("max_seq_len", 1, True),
    "q_len a float": ("q_len", 2, 2.0),
    "q_len a bool": ("q_len", 1, True),
}


@pytest.mark.parametrize(("name", "one", "other"), PAIRS.values(), ids=PAIRS)
def test_what_equals_an_int_and_is_none_takes_another_form(
    name: str, one: object, other: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is rejected, however often the int has been accepted."""
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


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("name", TENSORS)
def test_every_fact_of_every_tensor_is_part_of_the_form(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls that differ in nothing else do not share a plan."""
    tensor = torch.ones(4, 4)
    inputs = args_of(UNIFORM, monkeypatch, key_scales=tensor)

    one, other = (
        call_signature(changed(inputs, **{name: given})) for given in (tensor, change(tensor))
    )

    assert one is not None
    assert other is not None
    assert one != other


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_a_check_or_plan_may_see_is_part_of_the_form(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that differs in it is checked and planned anew."""
    inputs = args_of(UNIFORM, monkeypatch)

    changed = call_signature(inputs._replace(**change(inputs)))

    assert changed is not None
    assert changed != call_signature(inputs)


@pytest.mark.parametrize("length", [70, np.int64(70)], ids=["int", "numpy"])
def test_lengths_that_are_planned_alike_share_a_form(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next number of four leading bits stands for a length, of any integer type."""
    inputs = args_of(UNIFORM, monkeypatch)

    forms = [
        call_signature(inputs._replace(max_seq_len=type(length)(n), q_len=type(length)(2)))
        for n in (length, 72)
    ]

    assert forms[0] is not None
    assert forms[0] == forms[1]


def test_a_tensor_for_a_length_is_rejected_without_reading_it() -> None:
    """A tensor on a GPU would be waited for; one without content stands for it."""
    length = torch.tensor(70).as_subclass(Unread)
    arguments = UNIFORM.build("cpu").arguments(max_seq_len=length)

    with pytest.raises(ArgumentError) as caught:
        mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)

    assert str(caught.value) == "max_seq_len: expected an int, 0 or more, got a tensor"


class Unread(torch.Tensor):
    """A tensor that nobody may read."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        """Reject whatever asks for more than a name."""
        raise AssertionError(f"read by {func}")


def test_content_is_no_part_of_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers in tensors of the same layout, and other floats, make the same form."""
    inputs = args_of(UNIFORM, monkeypatch)
    other = inputs._replace(
        query=torch.zeros_like(inputs.query),
        seq_lens=inputs.seq_lens + 1,
        bmm1_scale=0.5,
        out_16bit_factor=3.0,
    )

    assert call_signature(other) == call_signature(inputs)


def test_what_cannot_be_hashed_is_rejected_with_its_name() -> None:
    """A list for a number meets the check, not the dictionary."""
    arguments = UNIFORM.build("cpu").arguments(q_len_per_req=[2])

    with pytest.raises(ArgumentError) as caught:
        mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)

    assert str(caught.value) == "q_len_per_req: expected an int, 1 or more, got [2]"


def test_the_kernel_that_is_asked_for_is_part_of_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that took one kernel is not remembered where another is asked for."""
    inputs = args_of(UNIFORM, monkeypatch)

    forms = {gqa_signature.call_signature(inputs, kernel) for kernel in ("auto", "sm80", "sm90")}

    assert len(forms) == 3
