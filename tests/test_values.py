"""Values of arguments: converters, how messages show them, and odd ones in public functions."""

from __future__ import annotations

import math
import random
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.mla import flare_mla_decoding, masks
from mlagen.values import (
    as_list,
    as_str_list,
    require_choice,
    require_flag,
    require_float32,
    require_number,
    require_whole_number,
    shown,
)
from tests.families.launches import simulate_h200
from tests.odd_calls import CALLS, ENTRY_CALLS, Call
from tests.odd_values import ODD, NamedInt, UnequalStr

_choice = partial(require_choice, names=("auto", "fast"))


@pytest.mark.parametrize(
    ("convert", "given", "plain"),
    [
        (require_whole_number, 5, 5),
        (require_whole_number, np.uint8(200), 200),
        (require_whole_number, NamedInt.FOUR, 4),
        (require_number, 5, 5.0),
        (require_number, np.float16(0.5), 0.5),
        (require_number, np.int8(3), 3.0),
        (require_number, 1e39, 1e39),
        (require_float32, math.inf, math.inf),
        (require_flag, True, True),
        (require_flag, 0, False),
        (require_flag, np.True_, True),
        (require_flag, np.int64(1), True),
        (_choice, "auto", "auto"),
        (_choice, np.str_("fast"), "fast"),
        (_choice, UnequalStr("auto"), "auto"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_converters_return_plain_values(
    convert: Callable[[object, str], object], given: object, plain: object
) -> None:
    """A converter returns a plain Python value for any subclass."""
    result = convert(given, "x")
    assert result == plain
    assert type(result) is type(plain)


WHOLE, FLOAT32 = "an int, 0 or more", "a number that float32 can hold"


@pytest.mark.parametrize(
    ("convert", "given", "message"),
    [
        (require_whole_number, -1, f"{WHOLE}, got -1"),
        (require_whole_number, True, f"{WHOLE}, got True"),
        (require_whole_number, 2**31, "2147483647 or less, got 2147483648"),
        (require_whole_number, 10**5000, "2147483647 or less, got an int of 16610 bits"),
        (require_whole_number, np.array(64), f"{WHOLE}, got ndarray"),
        (require_whole_number, torch.tensor(1), f"{WHOLE}, got a tensor"),
        (require_number, True, "a float, got True"),
        (require_number, "1", "a float, got '1'"),
        (require_number, 10**400, f"{FLOAT32}, got an int of 1329 bits"),
        (require_float32, 1e39, f"{FLOAT32}, got 1e+39"),
        (require_flag, 2, "a bool, got 2"),
        (require_flag, [1], "a bool, got [1]"),
        (require_flag, torch.tensor(True), "a bool, got a tensor"),
        (_choice, "AUTO", "one of auto, fast, got 'AUTO'"),
        (_choice, [torch.ones(3)], "one of auto, fast, got [a tensor]"),
        (_choice, torch.device("cpu"), "one of auto, fast, got cpu"),
        (_choice, (1,), "one of auto, fast, got (1,)"),
        (as_str_list, [1], "a str, got 1"),
        (as_list, count(), "4096 values or fewer, got more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_values_are_rejected(
    convert: Callable[[Any, str], object], given: object, message: str
) -> None:
    """The message has argument, rule and value."""
    with pytest.raises(ArgumentError) as caught:
        convert(given, "x")
    assert str(caught.value) == f"x: expected {message}"


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_a_value_is_shown_on_one_short_line(value: object) -> None:
    """Any value has a short one-line text, alone and in a list, whatever its repr."""
    for line in (shown(value), shown([value, (value,)])):
        assert line.isprintable()
        assert len(line) < 130


_COUNTS = torch.ones(2, dtype=torch.int32)


@pytest.fixture
def _h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the workspace sizes of an H200 without a GPU."""
    yield from simulate_h200(monkeypatch)
    mlagen.freeze("on")


def fault_of(call: Call, change: dict[str, Any]) -> str | None:
    """Return the fault of a changed call that ends in neither a result nor a one-line error."""
    function, arguments = call
    try:
        function(**{**arguments, **change})
    except (ArgumentError, UnsupportedError) as error:
        message = str(error)
        if message.isprintable() and len(message) <= 4000:
            return None
        return f"{list(change)}: a message of many lines: {message[:200]!r}"
    except Exception as error:  # noqa: BLE001 - which is the fault
        kinds = [type(value) for value in change.values()]
        return f"{list(change)} {kinds}: {type(error).__name__}: {str(error)[:200]}"
    return None


@pytest.mark.usefixtures("_h200")
@pytest.mark.parametrize("name", CALLS)
def test_an_odd_value_is_used_or_rejected(name: str) -> None:
    """Every argument takes every odd value, alone and with others."""
    call = CALLS[name]()
    names = list(call[1])
    call[0](**call[1])  # the other values are valid
    changes = [{argument: value} for argument in names for value in ODD]
    chosen = random.Random(name)  # noqa: S311 - the same at every run
    for _ in range(40):
        some = chosen.sample(names, k=min(len(names), chosen.randint(2, 4)))
        changes.append({argument: chosen.choice(ODD) for argument in some})
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()

    faults = [fault for change in changes if (fault := fault_of(call, change)) is not None]

    assert faults == []
    assert time.process_time() - start < 20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10  # KiB


UNSERVED = [
    dtype
    for name in ("8_e5m2", "8_e4m3fnuz", "8_e5m2fnuz", "8_e8m0fnu", "4_e2m1fn_x2")
    if (dtype := getattr(torch, f"float{name}", None)) is not None  # torch 2.8 lacks one
]
# Arguments that may have any dtype, or e5m2.
OF_ANY_DTYPE = {("constructor", "float_workspace_buffer"), ("planless", "out")}
# Caches of grouped-query attention, which may be e5m2.
OF_E5M2 = {("plan_decode", "kv_data_type"), ("workspace_of_gqa", "kv_dtype")}
OF_E5M2 |= {("trtllm_gqa", "kv_cache"), ("xqa_batch", "kv_cache")}
OF_E5M2 |= {("xqa", "k_cache"), ("xqa", "v_cache")}
# Of other arguments, what a call ignores.
UNREAD = {("plan_decode", "data_type")}
OF_FORMATS = ENTRY_CALLS.keys() - {"constructor", "masks"}  # which have none
OF_FORMATS |= {"workspace", "workspace_of_gqa", "merge_states"}


def in_dtype(value: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Yield an argument with each of its floating-point tensors, or itself, in another dtype."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        bytes_of_one = value.new_zeros(value.shape, dtype=torch.uint8)
        yield bytes_of_one.view(dtype)
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            for other in in_dtype(part, dtype):
                yield type(value)([*value[:index], other, *value[index + 1 :]])


@pytest.mark.usefixtures("_h200")
@pytest.mark.parametrize("dtype", UNSERVED, ids=str)
@pytest.mark.parametrize("name", sorted(OF_FORMATS))
def test_a_format_without_a_kernel_is_unsupported(name: str, dtype: torch.dtype) -> None:
    """Each dtype, and each tensor of floats, of a call in a format that servers have elsewhere."""
    function, given = CALLS[name]()
    tried = 0
    for argument, value in given.items():
        if dtype is torch.float8_e5m2 and (name, argument) in OF_E5M2:
            continue
        changed = list(in_dtype(value, dtype)) if (name, argument) not in OF_ANY_DTYPE else []
        if argument.endswith(("dtype", "data_type")) and (name, argument) not in UNREAD:
            changed.append(dtype)
        tried += len(changed)
        for other in changed:
            with pytest.raises(UnsupportedError, match=f"not implemented, .* got {dtype}"):
                function(**{**given, argument: other})
    assert tried


@pytest.mark.parametrize(
    "change",
    [
        {"scale": "1"},
        {"output": torch.zeros(1, 1, 2, 512)},
        {"q": torch.zeros(1, 1, 2, 576)},
        {"mask": masks.OrMask(masks.NullMask(), masks.CausalPaddingMask(_COUNTS))},
        {"mask": masks.ChunkedMask(7), "valid_length": _COUNTS},
    ],
    ids=", ".join,
)
@pytest.mark.usefixtures("_h200")
@pytest.mark.parametrize("is_paged", [True, False], ids=["paged", "dense"])
def test_a_rejected_call_allocates_little(change: dict[str, Any], *, is_paged: bool) -> None:
    """Tables and masks of many positions are allocated after the checks."""
    many, row = 2**29, torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16)
    one = torch.ones(1, dtype=torch.int32)
    k: Any = row.expand(1, many, 1, 576)
    if is_paged:
        table = torch.zeros(1, 1, dtype=torch.int32).expand(1, many)
        k = mlagen.PagedKVCache(blocks=row[0], block_table=table, cache_lengths=one)
    valid = {"q": row.expand(1, 1, 2, 576).contiguous(), "k": k, "mask": masks.ChunkedMask(7)}
    arguments = {**valid, "valid_length": one, "scale": 1.0, **change}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(ArgumentError):
        flare_mla_decoding(**arguments)

    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10  # KiB
