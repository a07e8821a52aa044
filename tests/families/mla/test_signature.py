"""Call signatures of MLA decode."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch

from mlagen.families.mla import signature as mla_signature
from mlagen.families.mla.args import MlaArgNames, MlaArgs
from tests.families.launches import PROPERTIES_AND_DEVICE
from tests.problems.mla import MlaCase

UNIFORM = MlaCase(name="", seq_lens=(70, 3), heads=16, with_sinks=True)
INT32 = torch.int32


def call_signature(inputs: MlaArgs, kernel: str = "auto", p_dtype_choice: str = "auto") -> Hashable:
    """Return the call signature with default settings."""
    return mla_signature.call_signature(inputs, kernel, p_dtype_choice)


def changed(inputs: MlaArgs, **fields: Any) -> MlaArgs:
    """Return the arguments with fields of any type changed."""
    return inputs._replace(**fields)


CHANGES: dict[str, Callable[[MlaArgs], MlaArgs]] = {
    "query shape": lambda i: i._replace(query=i.query[:, :, :8]),
    "query dtype": lambda i: i._replace(query=i.query.half()),
    "cache shape": lambda i: i._replace(kv_cache=i.kv_cache[:, :32]),
    "cache strides": lambda i: i._replace(kv_cache=i.kv_cache.repeat(1, 2, 1)[:, :64]),
    "cache dtype": lambda i: i._replace(kv_cache=i.kv_cache.view(torch.float16)),
    "workspace size": lambda i: i._replace(workspace_buffer=i.workspace_buffer[1:]),
    "kv_lora_rank": lambda i: i._replace(kv_lora_rank=256),
    "kv_lora_rank a float": lambda i: changed(i, kv_lora_rank=512.0),
    "qk_rope_head_dim": lambda i: i._replace(qk_rope_head_dim=32),
    "qk_rope_head_dim a float": lambda i: changed(i, qk_rope_head_dim=64.0),
    "block table width": lambda i: i._replace(block_tables=i.block_tables[:, :2]),
    "lengths dtype": lambda i: i._replace(seq_lens=i.seq_lens.long()),
    "max_seq_len": lambda i: i._replace(max_seq_len=1000),
    "max_seq_len a float": lambda i: changed(i, max_seq_len=70.0),
    "max_seq_len a bool": lambda i: i._replace(max_seq_len=True),
    "max_seq_len a tensor": lambda i: changed(i, max_seq_len=torch.tensor(70)),
    "out given": lambda i: i._replace(out=torch.zeros(2, 1, 16, 512)),
    "bmm1_scale a tensor": lambda i: i._replace(bmm1_scale=torch.tensor(1.0)),
    "bmm2_scale an int": lambda i: i._replace(bmm2_scale=1),
    "no sinks": lambda i: i._replace(sinks=None),
    "return_lse": lambda i: i._replace(return_lse=True),
    "lse given": lambda i: i._replace(lse=torch.zeros(2, 16)),
    "return_lse_base": lambda i: i._replace(return_lse_base="basee"),
    "cum_seq_lens_q": lambda i: i._replace(cum_seq_lens_q=torch.zeros(3, dtype=INT32)),
    "max_q_len": lambda i: i._replace(max_q_len=2),
    "top_k": lambda i: i._replace(top_k=64),
    "top_k a float": lambda i: changed(i, top_k=0.0),
    "top_k_lens": lambda i: i._replace(top_k_lens=torch.zeros(2, dtype=INT32)),
    "not causal": lambda i: i._replace(is_causal=False),
    "scores_take_bmm2": lambda i: i._replace(scores_take_bmm2=True),
    "query_rope": lambda i: i._replace(query_rope=i.query[..., :64]),
    "query_scales": lambda i: i._replace(query_scales=torch.ones(2)),
    "rope_cache": lambda i: i._replace(rope_cache=i.kv_cache[..., :64]),
    "value_cache": lambda i: i._replace(value_cache=i.kv_cache),
    "kv_scales": lambda i: i._replace(kv_scales=torch.ones(7, 64, 4)),
    "latent_scale": lambda i: i._replace(latent_scale=0.5),
    "latent_scale a tensor": lambda i: changed(i, latent_scale=torch.ones(2)),
    "rope_scale": lambda i: i._replace(rope_scale=0.5),
    "kv_indptr": lambda i: i._replace(kv_indptr=torch.zeros(3, dtype=INT32)),
    "bias": lambda i: i._replace(bias=torch.zeros(2, 16, 70)),
    "is_fp8_per_token": lambda i: i._replace(is_fp8_per_token=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_signature_contains_all_inputs_of_checks_and_plans(
    change: Callable[[MlaArgs], MlaArgs],
) -> None:
    """Calls that differ in an argument of a check or plan have different signatures."""
    inputs = UNIFORM.build("cpu").inputs()

    other = call_signature(change(inputs))

    assert other != call_signature(inputs)


TENSORS = (
    "query",
    "kv_cache",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "out",
    "bmm1_scale",
    "bmm2_scale",
    "sinks",
    "lse",
    "cum_seq_lens_q",
    "top_k_lens",
    "query_rope",
    "query_scales",
    "rope_cache",
    "value_cache",
    "kv_scales",
    "kv_indptr",
    "bias",
)


@pytest.mark.parametrize("change", PROPERTIES_AND_DEVICE.values(), ids=PROPERTIES_AND_DEVICE)
@pytest.mark.parametrize("name", TENSORS)
def test_the_signature_contains_every_property_of_every_tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Calls that differ in one tensor property have different signatures."""
    inputs, tensor = UNIFORM.build("cpu").inputs(), torch.ones(4, 4)

    one, other = (call_signature(changed(inputs, **{name: t})) for t in (tensor, change(tensor)))

    assert one is not None
    assert other is not None
    assert one != other


def test_the_signature_contains_the_requested_kernel() -> None:
    """A cached call of one kernel is not reused when the settings request another."""
    inputs = UNIFORM.build("cpu").inputs()

    signatures = {call_signature(inputs, kernel) for kernel in ("auto", "sm80", "sm90")}

    assert len(signatures) == 3


def test_the_signature_contains_the_dtype_of_p() -> None:
    """Another dtype of P has another signature."""
    inputs = UNIFORM.build("cpu").inputs()

    assert call_signature(inputs, "auto", "auto") != call_signature(inputs, "auto", "fp16")


def test_the_signature_contains_max_q_len() -> None:
    """Another max_q_len, and an equal float, have different signatures."""
    ragged = MlaCase(name="", seq_lens=(70, 3), q_lens=(1, 4)).build("cpu").inputs()

    signatures = {call_signature(changed(ragged, max_q_len=hint)) for hint in (None, 4, 4.0, 5)}

    assert len(signatures) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 16),
        ("is_causal", False),
        ("scores_take_bmm2", True),
        ("is_fp8_per_token", True),
        ("latent_scale", 0.5),
        ("rope_scale", 0.5),
    ],
)
def test_the_signature_of_a_rare_call_contains_the_other_rare_arguments(
    name: str, value: object
) -> None:
    """Two calls with a bias have different signatures if they differ in another rare argument."""
    rare = changed(UNIFORM.build("cpu").inputs(), bias=torch.zeros(2, 1, 70))

    one, other = call_signature(rare), call_signature(changed(rare, **{name: value}))

    assert one is not None
    assert other is not None
    assert one != other


def test_a_bias_must_cover_the_length_exactly() -> None:
    """With a bias, lengths with equal rounding have different signatures."""
    inputs = UNIFORM.build("cpu").inputs(bias=torch.zeros(2, 16, 70))

    assert call_signature(inputs._replace(max_seq_len=71)) != call_signature(inputs)


def test_the_signature_does_not_contain_contents_and_names() -> None:
    """Contents of tensors, values of floats and names do not change the signature."""
    case = MlaCase(name="", seq_lens=(70, 3), kv_format="e4m3", scales="two")
    inputs = case.build("cpu").inputs()
    other = inputs._replace(
        query=inputs.query.clone().zero_(),
        seq_lens=inputs.seq_lens + 1,
        bmm1_scale=0.5,
        latent_scale=0.25,
        names=MlaArgNames(query="q"),
    )

    assert call_signature(other) == call_signature(inputs)
    assert hash(call_signature(other)) == hash(call_signature(inputs))


@pytest.mark.parametrize("length", [70, np.int64(70)], ids=["int", "numpy"])
def test_lengths_with_equal_rounding_share_a_signature(length: int) -> None:
    """The signature contains the rounded length."""
    inputs = UNIFORM.build("cpu").inputs()

    one, other = (
        call_signature(inputs._replace(max_seq_len=type(length)(n))) for n in (length, 72)
    )

    assert one is not None
    assert one == other
