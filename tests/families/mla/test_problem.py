"""Invalid combinations of arguments, and invalid whole numbers, of MLA decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mlagen
from mlagen.errors import UnsupportedError
from mlagen.families.mla.dispatch import run_mla
from tests.families.rejections import SINGLE, UNIFORM, Rejection, check, check_inputs, rejections
from tests.problems.mla import MlaCase


@rejections(
    Rejection(
        "a negative length",
        lambda _: {"max_seq_len": -1},
        "max_seq_len: expected an int, 0 or more, got -1",
    ),
    Rejection(
        "a fraction",
        lambda _: {"max_seq_len": 70.0},
        "max_seq_len: expected an int, 0 or more, got 70.0",
    ),
    Rejection(
        "a bool",
        lambda _: {"max_seq_len": True},
        "max_seq_len: expected an int, 0 or more, got True",
    ),
    Rejection(
        "a tensor, which would be waited for",
        lambda p: {"max_seq_len": p.seq_lens.max()},
        "max_seq_len: expected an int, 0 or more, got a tensor",
    ),
    Rejection(
        "a float for a dimension",
        lambda _: {"kv_lora_rank": 512.0},
        "kv_lora_rank: expected an int, 0 or more, got 512.0",
    ),
    Rejection(
        "text for a dimension",
        lambda _: {"kv_lora_rank": "512"},
        "kv_lora_rank: expected an int, 0 or more, got '512'",
    ),
    Rejection(
        "a negative dimension",
        lambda _: {"qk_rope_head_dim": -64},
        "qk_rope_head_dim: expected an int, 0 or more, got -64",
    ),
)
def test_whole_numbers(rejection: Rejection) -> None:
    """Lengths and dimensions are non-negative ints."""
    check(rejection)


def test_numpy_integers_are_whole_numbers() -> None:
    """Lengths and dimensions may be of any integer type."""
    problem = SINGLE.build("cpu")

    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        **problem.arguments(
            max_seq_len=np.int64(70), kv_lora_rank=np.int32(512), qk_rope_head_dim=np.int64(64)
        )
    )

    assert isinstance(out, torch.Tensor)
    problem.check(out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_lora_rank": 384, "dtype": torch.float16},
            (
                "no MLA decode kernel for query fp16, cache fp16, (kv_lora_rank, qk_rope_head_dim) "
                "(384, 64), "
            ),
        ),
        (
            {"dtype": torch.float8_e4m3fn, "qk_rope_head_dim": 0},
            (
                "no MLA decode kernel for query e4m3, cache e4m3, (kv_lora_rank, qk_rope_head_dim) "
                "(512, 0), "
            ),
        ),
        (
            {"dtype": torch.float8_e4m3fn, "kv_format": "fp8_per_token", "top_k": 70},
            (
                "no MLA decode kernel for query fp8_per_token, cache fp8_per_token, (kv_lora_rank, "
                "qk_rope_head_dim) (512, 64), (lookup, values, mask) (sparse, shared, causal); "
            ),
        ),
    ],
    ids=["latent dimension", "rope dimension", "a sparse call over 640-byte rows"],
)
def test_unsupported_calls_are_rejected_on_the_cpu_too(
    changes: dict[str, Any], message: str
) -> None:
    """The CPU backend rejects what no kernel supports; the message lists supported values."""
    problem = MlaCase(name="", seq_lens=(70, 3), **changes).build("cpu")

    with pytest.raises(UnsupportedError) as caught:
        run_mla(problem.inputs(), enable_pdl=True)

    assert str(caught.value).startswith(message)
    assert "supported there: (512, 64)" in str(caught.value)


def test_a_device_without_a_backend_is_rejected() -> None:
    """Tensors are on a GPU or on the CPU."""
    problem = UNIFORM.build("cpu")
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens")
    arguments = problem.arguments()
    arguments |= {name: arguments[name].to("meta") for name in names}

    with pytest.raises(UnsupportedError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    assert str(caught.value) == "query.device: expected cuda or cpu, got meta"


@rejections(
    Rejection("a list", lambda _: {"bias": []}, "bias: expected a torch.Tensor, got list"),
    Rejection(
        "another device",
        lambda _: {"bias": torch.zeros(4, 1, 70, device="meta")},
        "bias.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "bf16",
        lambda _: {"bias": torch.zeros(4, 1, 70).bfloat16()},
        "bias.dtype: expected torch.float32, got torch.bfloat16",
    ),
    Rejection(
        "two dimensions",
        lambda _: {"bias": torch.zeros(4, 70)},
        "bias.ndim: expected 3, got 2",
    ),
    Rejection(
        "some heads",
        lambda _: {"bias": torch.zeros(4, 8, 70)},
        "bias.shape: expected [4, 16, 70] or [4, 1, 70] (query tokens, heads or 1, positions), "
        "got [4, 8, 70]",
    ),
    Rejection(
        "positions that the longest request goes beyond",
        lambda _: {"bias": torch.zeros(4, 16, 69)},
        "bias.shape[2]: expected 70 or more (max_seq_len), got 69",
    ),
    Rejection(
        "gaps",
        lambda _: {"bias": torch.zeros(4, 16, 140)[..., ::2]},
        "bias.stride(-1): expected 1, got 2",
    ),
)
def test_bias(rejection: Rejection) -> None:
    """A bias is fp32, for every query token and head, and covers the maximum length."""
    check_inputs(rejection)


def test_messages_have_the_names_of_the_entry_point() -> None:
    """A message names an argument by the entry point's parameter."""
    problem = UNIFORM.build("cpu")
    names = problem.inputs().names._replace(seq_lens="kv_len_arr")

    with pytest.raises(mlagen.ArgumentError) as caught:
        run_mla(problem.inputs(names=names, seq_lens=None), enable_pdl=True)

    assert str(caught.value) == "kv_len_arr: expected a torch.Tensor, got NoneType"
