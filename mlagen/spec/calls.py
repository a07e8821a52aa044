"""Every kernel that a call may take, whichever of them it turns out to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mlagen.spec import gqa, gqa_sm90, mla, mla_sm90
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.gqa import GqaSm80Spec, GqaVariant, gqa_sm80_spec
from mlagen.spec.gqa_sm90 import GqaSm90Spec, gqa_sm90_spec, with_all_heads
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla import MlaSm80Spec, mla_sm80_spec
from mlagen.spec.mla_sm90 import MlaSm90Spec
from mlagen.spec.mla_sm90_calls import mla_sm90_kernels
from mlagen.spec.mla_support import MlaVariant, output_dtype

# Numbers of rows such that calls with as many between them take all tiles that there are.
_ROWS = sorted(
    {tile.block_m for tile in (*mla.TILES, *gqa.TILES)} | {*mla_sm90.BLOCK_MS, *gqa_sm90.BLOCK_MS},
)


def mla_call_specs(arch: Arch, variant: MlaVariant, rows: int) -> list[KernelSpec]:
    """Return the kernels of MLA calls with ``rows`` rows for each request.

    The sm90 kernels where there are some, one for each tile that calls may take, whatever they
    ask for of p_dtype_choice; the portable one, which small calls take there too; and the one that
    combines its splits.

    Raises
    ------
    UnsupportedError
        If there is none for such a call.
    """
    combining = CombineSpec(
        arch=arch, dtype=output_dtype(variant.query_dtype), head_dim_vo=variant.kv_lora_rank
    )
    portable = mla_sm80_spec(arch, variant, rows)
    hopper = [
        replace(spec, block_m=tile)
        for spec in mla_sm90_kernels(arch, variant, rows)
        for tile in reversed(spec.tiles_of(rows))
    ]
    return [*hopper, portable, combining]


def gqa_call_specs(arch: Arch, variant: GqaVariant, rows: int) -> list[KernelSpec]:
    """Return the kernels of GQA calls with ``rows`` rows for each kv head of a request.

    The sm90 kernel where there is one, for every number of kv heads that a block may take; the
    portable one; and the one that combines its splits.

    Raises
    ------
    UnsupportedError
        If there is none for such a call.
    """
    combining = CombineSpec(arch=arch, dtype=variant.out_dtype, head_dim_vo=variant.head_dim)
    portable = gqa_sm80_spec(arch, variant, rows)
    hopper = gqa_sm90_spec(arch, variant, rows)
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
    if isinstance(spec, CombineSpec):
        return [replace(spec, arch=arch)]
    made = _call_specs_of(spec)
    found = [made(arch, rows) for rows in _ROWS if spec in made(spec.arch, rows)]
    return list(dict.fromkeys(other for others in found for other in others))


def _call_specs_of(spec: KernelSpec) -> Callable[[Arch, int], list[KernelSpec]]:
    """Return what gives the kernels of the calls that ``spec`` is for, by their rows."""
    if isinstance(spec, (MlaSm80Spec, MlaSm90Spec)):
        mla_variant = spec.variant
        return lambda arch, rows: mla_call_specs(arch, mla_variant, rows)
    assert isinstance(spec, (GqaSm80Spec, GqaSm90Spec)), spec
    gqa_variant = spec.variant
    return lambda arch, rows: gqa_call_specs(arch, gqa_variant, rows)
