"""Rules that hold for the tensor arguments of every entry point, by argument."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import mlagen
from mlagen.errors import UnsupportedError
from tests.families.rejections import (
    OUTPUTS,
    Row,
    changed,
    check,
    displaced,
    padded,
    parametrised,
    strided,
    valid_call,
)
from tests.odd_values import nested

INTS = "device dtype contiguous"
# The rules of each argument: device, dtype, no gaps at all or in a row, 16-byte rows and address.
CACHE = "device dtype dense rows pointer"
BATCH = {
    "query": "dtype dense rows pointer",
    "seq_lens": INTS,
    "block_tables": "device dtype dense",
    "sinks": "device dtype contiguous",
    "workspace_buffer": "device contiguous pointer",
    "out": "device dtype contiguous pointer",
    "bmm1_scale": "device dtype",
    "bmm2_scale": "device dtype",
}
XQA = {
    "q": "dtype dense rows pointer",
    "k_cache": CACHE,
    "v_cache": CACHE,
    "page_table": "device dtype dense",
    "seq_lens": "device dtype",
    "output": "device dtype contiguous pointer",
    "semaphores": "device dtype",
    "workspace_buffer": "device contiguous pointer",
    "q_scale": "device dtype",
    "kv_scale": "device dtype",
}
RULES: dict[str, dict[str, str]] = {
    "trtllm": BATCH | {"kv_cache": CACHE, "lse": "device dtype contiguous"},
    "trtllm ragged": {"cum_seq_lens_q": INTS},
    "trtllm packed": {"kv_cache": "dtype rows"},
    "trtllm sparse": {"block_tables": "device dtype dense", "sparse_mla_top_k_lens": INTS},
    "trtllm other pages": {"block_tables": "device dtype"},
    "run_mla rope": {
        "query_rope": "device dtype dense rows",
        "rope_cache": "device dtype dense rows",
    },
    "run_mla flat": {"block_tables": INTS, "kv_indptr": INTS},
    "run_mla other cache": {"value_cache": "device dtype pointer"},
    "run_mla scaled": {"kv_scales": "device dtype dense"},
    "run_mla per token": {
        "query": "dtype",
        "query_scales": "device dtype contiguous",
        "kv_scales": "device dtype",
    },
    "run_mla biased": {"bias": "device dtype dense"},
    "xqa_batch": BATCH | {"kv_cache[0]": CACHE, "kv_cache[1]": CACHE},
    "xqa_batch drafts": {"mask": "device dtype contiguous pointer"},
    "xqa_batch ragged": {"q_cu_seq_lens": INTS},
    "xqa_batch stacked": {"kv_cache": "device dtype dense rows pointer"},
    "xqa_batch nvfp4": {
        "kv_cache_sf[0]": "device dtype dense",
        "kv_cache_sf[1]": "device dtype dense",
    },
    "xqa_batch nvfp4 stacked": {"kv_cache_sf": "device dtype dense"},
    "xqa": XQA,
    "xqa_mla": XQA | {"v_cache": "device dtype"},
}


def of_another_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that no argument accepts: int64 for int32, else float64."""
    return tensor.long() if tensor.dtype is torch.int32 else tensor.double()


BREAKS = {
    "device": (
        lambda tensor: tensor.to("meta"),
        ".device: expected cpu (of the first tensor), got meta",
    ),
    "dtype": (of_another_dtype, ".dtype: expected torch."),
    "contiguous": (strided, " must be contiguous: expected no gaps in shape ["),
    "dense": (strided, ".stride(-1): expected 1, got 2"),
    "rows": (padded, ".stride("),
    "pointer": (displaced, ".data_ptr(): expected a multiple of "),
}


def rows() -> Iterator[Row]:
    """Return a row for each rule of each argument, a nested tensor, and one that is none."""
    for call, arguments in RULES.items():
        for argument, rules in arguments.items():
            if argument != "semaphores":  # of any size and content
                yield Row(call, argument, nested, ": expected a dense tensor in memory, got a")
            if not argument.endswith("_scale"):  # which may be a number
                yield Row(call, argument, 1.0, ": expected a torch.Tensor, got float")
            for rule in rules.split():
                yield Row(call, argument, *BREAKS[rule])


@parametrised(rows())
def test_a_tensor_that_breaks_a_rule_is_rejected(row: Row) -> None:
    """A tensor of another kind, device, dtype or layout is rejected by name, on the CPU too."""
    is_scale = row.argument.endswith("_scale")
    check(row._replace(broken=row.broken(torch.ones(1))) if is_scale else row)


SCALES = {"trtllm": "bmm1_scale bmm2_scale", "xqa_batch": "bmm1_scale bmm2_scale"}
SCALES |= {"xqa": "q_scale kv_scale", "xqa_mla": "q_scale kv_scale"}
A_SCALE = ": expected a float or a torch.float32 tensor of one element, got "


@parametrised(
    Row(call, argument, value, message)
    for call, arguments in SCALES.items()
    for argument in arguments.split()
    for value, message in (
        (torch.tensor(1), ".dtype: expected torch.float32, got torch.int64"),
        (torch.ones(2), ".numel(): expected 1, got 2"),
        (True, A_SCALE + "True"),
        (None, A_SCALE + "None"),
        ("1", A_SCALE + "'1'"),
        (1j, A_SCALE + "1j"),
        (1e300, ": expected a number that float32 can hold, got 1e+300"),
        (10**400, ": expected a number that float32 can hold, got an int of 1329 bits"),
    )
)
def test_a_scale_is_a_number_or_one_fp32_element(row: Row) -> None:
    """A scale is a number of float32, or one fp32 element on the query's device."""
    check(row)


class Two:
    """An integer of another type."""

    def __index__(self) -> int:
        return 2


ACCEPTED: dict[str, list[tuple[str, object]]] = {
    "trtllm": [
        ("max_seq_len", np.int64(70)),
        ("kv_lora_rank", np.int32(512)),
        ("qk_rope_head_dim", np.uint64(64)),
        ("bmm2_scale", 1),
        ("bmm2_scale", torch.ones(1, 1)),
        ("query", lambda query: padded(query, 8)),
        ("block_tables", padded),
    ],
    "xqa_batch": [
        ("max_seq_len", np.int64(70)),
        ("q_len_per_req", np.uint8(1)),
        ("seq_lens", lambda seq_lens: seq_lens[:, None]),
        ("seq_lens", lambda seq_lens: seq_lens.view(torch.uint32)),
        ("block_tables", lambda tables: tables.view(torch.uint32)),
        ("bmm2_scale", 1),
        ("o_scale", 1),
        ("window_left", -(2**40)),
        ("window_left", 2**40),
    ],
    "xqa_batch stacked": [("kv_cache", lambda both: (both[:, 0], both[:, 1]))],
    "xqa_batch nvfp4 24 bytes": [("kv_cache[0]", lambda cache: displaced(cache, 8))],
    "xqa": [("num_kv_heads", Two()), ("sliding_win_size", 2**40)],
}


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [(call, *row) for call, of_call in ACCEPTED.items() for row in of_call],
)
def test_an_equal_value_of_another_form_is_accepted(
    call: str, argument: str, value: object
) -> None:
    """Integers of any type, numbers for scales, views, paddings and whole rows give the result."""
    function, problem, valid = valid_call(call)
    arguments = changed(valid, argument, value)

    function(**arguments)

    problem.check(next(arguments[name] for name in OUTPUTS if name in arguments))


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 3.4028234e38])
@pytest.mark.parametrize(
    ("call", "argument"), [("trtllm", "bmm1_scale"), ("xqa_batch", "bmm2_scale")]
)
def test_a_scale_may_be_any_float32(call: str, argument: str, scale: float) -> None:
    """Infinities and NaNs propagate by IEEE arithmetic."""
    function, _, valid = valid_call(call)

    function(**valid | {argument: scale})

    assert not valid["out"].isfinite().all()


@pytest.mark.parametrize("call", ["trtllm", "xqa_batch"])
def test_a_device_without_a_backend_is_rejected(call: str) -> None:
    """Tensors are on a GPU or on the CPU."""
    function, _, valid = valid_call(call)
    on_meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in valid.items()
    }
    if call == "xqa_batch":
        on_meta["kv_cache"] = [cache.to("meta") for cache in valid["kv_cache"]]

    with pytest.raises(UnsupportedError) as caught:
        function(**on_meta)

    assert str(caught.value) == "query.device: expected cuda or cpu, got meta"


def test_an_argument_error_is_a_value_error() -> None:
    """An ArgumentError is a ValueError, which callers of FlashInfer catch."""
    assert issubclass(mlagen.ArgumentError, ValueError)
