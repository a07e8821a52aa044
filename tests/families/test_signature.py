"""Call signatures: everything that a check or a plan may depend on, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from mlagen.families.gqa import args as gqa_args
from mlagen.families.mla import args as mla_args
from tests.families.launches import PROPERTIES_AND_DEVICE, args_of
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase

MLA_CASE = MlaCase(seq_lens=(70, 3), heads=16, with_sinks=True)
GQA_CASE = GqaCase(seq_lens=(70, 3), q_len=2, mask="random", sink=3.0, window=50)


@dataclass(frozen=True)
class Family:
    """The arguments of a family's call, and other values of its fields."""

    args: Any
    signature_of: Callable[[Any], Any]
    canonical: Callable[[Any], Any]
    scalars: dict[str, tuple[Any, ...]]

    def tensors(self) -> list[str]:
        """Return the fields that may hold a tensor."""
        return [name for name in self.args._fields if name not in {*self.scalars, "names"}]

    def differs(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether two calls with some fields changed have different signatures."""
        signatures = [self.signature_of(self.args._replace(**changes)) for changes in (one, other)]
        return bool(signatures[0] != signatures[1])


FAMILIES = {
    "mla": Family(
        args_of(MLA_CASE),
        mla_args.signature_of,
        mla_args.canonical_numbers,
        {
            "kv_lora_rank": (256, 512.0),
            "qk_rope_head_dim": (32, 64.0),
            "max_seq_len": (1000,),
            "return_lse": (True,),
            "return_lse_base": ("basee",),
            "max_q_len": (2, 3),
            "top_k": (64, 0.0, False),
            "is_causal": (False, 1),
            "bmm2_scales_scores": (True, 0),
            "latent_scale": (0.5, torch.ones(2)),
            "rope_scale": (0.5, torch.ones(2)),
            "is_fp8_per_token": (True, 0),
            "out_shape": ((2, 16, 512),),
        },
    ),
    "gqa": Family(
        args_of(GQA_CASE),
        gqa_args.signature_of,
        gqa_args.canonical_numbers,
        {
            "max_seq_len": (1000,),
            "q_len": (4, 2.0, True),
            "kv_layout": ("HND",),
            "window": (60, 50.0),
            "out_16bit_factor": (1,),
            "out_e4m3_factor": (1,),
            "with_beam_axis": (True, 0),
            "scales_like_xqa": (True, 0),
        },
    ),
}


def fields(of: str) -> list[tuple[str, str]]:
    """Return each family with each of its tensors, or of its scalars."""
    return [
        (name, field)
        for name, family in FAMILIES.items()
        for field in (family.tensors() if of == "tensors" else family.scalars)
    ]


@pytest.mark.parametrize("change", PROPERTIES_AND_DEVICE.values(), ids=PROPERTIES_AND_DEVICE)
@pytest.mark.parametrize(("family", "name"), fields("tensors"))
def test_the_signature_contains_every_property_of_every_tensor(
    family: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Calls that differ in one tensor property, or in its presence, have different signatures."""
    tensor = torch.ones(4, 4)

    assert FAMILIES[family].differs({name: tensor}, {name: change(tensor)})
    assert FAMILIES[family].differs({name: tensor}, {name: None})


@pytest.mark.parametrize(("family", "name"), fields("scalars"))
def test_the_signature_contains_every_scalar(family: str, name: str) -> None:
    """Calls that differ in a number, a word or its type have different signatures."""
    for value in FAMILIES[family].scalars[name]:
        assert FAMILIES[family].differs({}, {name: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_signature_contains_the_type_of_a_scale(family: str) -> None:
    """Floats other than 1 share a signature; a tensor, or a number of another type, has its own."""
    differs, scales = FAMILIES[family].differs, ("bmm1_scale", "bmm2_scale")
    of_cache = ("latent_scale", "rope_scale") if family == "mla" else ()

    assert not any(differs({name: 0.5}, {name: 0.25}) for name in (*scales, *of_cache))
    for name, value in product(scales, (torch.tensor(0.5), 1)):
        assert differs({name: 0.5}, {name: value})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("type_", [int, np.int64])
def test_lengths_with_equal_rounding_share_a_signature(family: str, type_: type) -> None:
    """The signature contains the rounded length, of any integer type."""
    of = FAMILIES[family]
    one, other = (
        of.signature_of(of.canonical(of.args._replace(max_seq_len=type_(length))))
        for length in (70, 72)
    )

    assert one == other


def test_a_bias_must_cover_the_length_exactly() -> None:
    """With a bias, lengths with equal rounding have different signatures."""
    bias = {"bias": torch.zeros(2, 16, 70)}

    assert FAMILIES["mla"].differs({"max_seq_len": 70, **bias}, {"max_seq_len": 71, **bias})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_signature_does_not_contain_contents_and_names(family: str) -> None:
    """Contents of tensors and names of parameters do not change the signature."""
    args = FAMILIES[family].args
    names = args.names._replace(query="q")

    assert not FAMILIES[family].differs(
        {}, {"query": torch.zeros_like(args.query), "seq_lens": args.seq_lens + 1, "names": names}
    )
