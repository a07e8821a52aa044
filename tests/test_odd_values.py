"""Public functions with odd values: a result, or a one-line error."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.mla import flare_mla_decoding, masks
from tests.families.launches import simulate_h200
from tests.odd_calls import CALLS, Call
from tests.odd_values import ODD

_COUNTS = torch.ones(2, dtype=torch.int32)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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


@pytest.mark.parametrize("name", CALLS)
def test_an_odd_value_is_used_or_rejected(name: str) -> None:
    """Every argument takes every odd value, alone and with others."""
    call = CALLS[name]()
    names = list(call[1])
    call[0](**call[1])  # the other values are valid
    changes = [{argument: value} for argument in names for value in ODD]
    chosen = random.Random(name)  # noqa: S311 - the same at every run
    for _ in range(100):
        some = chosen.sample(names, k=min(len(names), chosen.randint(2, 4)))
        changes.append({argument: chosen.choice(ODD) for argument in some})
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()

    faults = [fault for change in changes if (fault := fault_of(call, change)) is not None]

    assert faults == []
    assert time.process_time() - start < 20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10  # KiB


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
