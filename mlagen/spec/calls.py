"""Every kernel that a call may take, whichever of them it turns out to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mlagen.spec import gqa, gqa_hopper, mla, mla_hopper
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.gqa import GqaDecodeSpec, GqaVariant, gqa_decode_spec
from mlagen.spec.gqa_hopper import GqaHopperSpec, gqa_hopper_spec, with_all_heads
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla import MlaDecodeSpec, mla_decode_spec
from mlagen.spec.mla_hopper import MlaHopperSpec
from mlagen.spec.mla_hopper_calls import mla_hopper_kernels
from mlagen.spec.mla_support import MlaVariant, output_dtype

# Numbers of rows such that calls with as many between them take all tiles that there are.
_ROWS = sorted(
    {tile.tile_rows for tile in (*mla.TILES, *gqa.TILES)}
    | {*mla_hopper.TILE_ROWS, *gqa_hopper.TILE_ROWS},
)


def mla_call_specs(arch: Arch, variant: MlaVariant, rows: int) -> list[KernelSpec]:
    """Return the kernels of MLA calls with ``rows`` rows for each request.

    The Hopper kernels where there are some, one for each tile that calls may take, whatever they
    ask for of probabilities; the portable one, which small calls take there too; and the one that
    combines its splits.

    Raises
    ------
    UnsupportedError
        If there is none for such a call.
    """
    combining = CombineSplitsSpec(
        arch=arch, dtype=output_dtype(variant.query_dtype), head_dim_vo=variant.kv_lora_rank
    )
    portable = mla_decode_spec(arch, variant, rows)
    hopper = [
        replace(spec, tile_rows=tile)
        for spec in mla_hopper_kernels(arch, variant, rows)
        for tile in reversed(spec.tiles_of(rows))
    ]
    return [*hopper, portable, combining]


def gqa_call_specs(arch: Arch, variant: GqaVariant, rows: int) -> list[KernelSpec]:
    """Return the kernels of GQA calls with ``rows`` rows for each kv head of a request.

    The Hopper kernel where there is one, for every number of kv heads that a block may take; the
    portable one; and the one that combines its splits.

    Raises
    ------
    UnsupportedError
        If there is none for such a call.
    """
    combining = CombineSplitsSpec(arch=arch, dtype=variant.out_dtype, head_dim_vo=variant.head_dim)
    portable = gqa_decode_spec(arch, variant, rows)
    hopper = gqa_hopper_spec(arch, variant, rows)
    kernels = [] if hopper is None else with_all_heads(hopper)
    return [*kernels, portable, combining]


def specs_beside(spec: KernelSpec) -> list[KernelSpec]:
    """Return the kernels of the family that differ from ``spec`` in the tile only, and in heads.

    Raises
    ------
    UnsupportedError
        If the family has none for what the calls are.
    """
    made = [other for rows in _ROWS for other in _call_specs_of(spec)(spec.arch, rows)]
    return [other for other in dict.fromkeys(made) if other.family == spec.family]


def specs_elsewhere(spec: KernelSpec, arch: Arch) -> list[KernelSpec]:
    """Return the kernels that the calls which take ``spec`` may take on another architecture.

    Others than it alone: what one tile serves here, several may serve there, and calls may be split
    there that are not split here.
    """
    if isinstance(spec, CombineSplitsSpec):
        return [replace(spec, arch=arch)]
    made = _call_specs_of(spec)
    found = [made(arch, rows) for rows in _ROWS if spec in made(spec.arch, rows)]
    return list(dict.fromkeys(other for others in found for other in others))


def _call_specs_of(spec: KernelSpec) -> Callable[[Arch, int], list[KernelSpec]]:
    """Return what gives the kernels of the calls that ``spec`` is for, by their rows."""
    if isinstance(spec, (MlaDecodeSpec, MlaHopperSpec)):
        mla_variant = spec.variant
        return lambda arch, rows: mla_call_specs(arch, mla_variant, rows)
    assert isinstance(spec, (GqaDecodeSpec, GqaHopperSpec)), spec
    gqa_variant = spec.variant
    return lambda arch, rows: gqa_call_specs(arch, gqa_variant, rows)
