"""Kernel candidates of a call: every kernel that a launch of it may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec, CombineStatesSpec, combine_spec
from mlagen.spec.gqa import sm80 as gqa
from mlagen.spec.gqa import sm90 as gqa_sm90
from mlagen.spec.gqa.sm80 import GqaSm80Spec, gqa_sm80_spec
from mlagen.spec.gqa.sm90 import GqaSm90Spec, gqa_sm90_spec, with_all_heads
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla import sm80 as mla
from mlagen.spec.mla import sm90 as mla_sm90
from mlagen.spec.mla.sm80 import MlaSm80Spec, mla_sm80_spec
from mlagen.spec.mla.sm90 import MlaSm90Spec, mla_sm90_kernels
from mlagen.spec.mla.variant import MlaVariant

# Row counts that together select every tile.
_ROW_COUNTS = sorted(
    {tile.block_m for tile in (*mla.TILES, *gqa.TILES)} | {*mla_sm90.BLOCK_MS, *gqa_sm90.BLOCK_MS},
)


def mla_call_specs(arch: Arch, variant: MlaVariant, rows: int) -> list[KernelSpec]:
    """Return the kernels of MLA calls with ``rows`` query rows per sequence.

    The sm90 kernels, if any: one per tile, for every ``p_dtype_choice``; the sm80 kernel, which
    small calls use on sm90 too; and the kernel that combines its splits.

    Raises
    ------
    UnsupportedError
        If no kernel supports the variant.
    """
    sm80 = mla_sm80_spec(arch, variant, rows)
    sm90 = [
        replace(spec, block_m=tile)
        for spec in mla_sm90_kernels(arch, variant, rows)
        for tile in reversed(spec.tiles_of(rows))
    ]
    return [*sm90, sm80, combine_spec(sm80)]


def gqa_call_specs(arch: Arch, variant: GqaVariant, rows: int) -> list[KernelSpec]:
    """Return the kernels of GQA calls with ``rows`` query rows per sequence and KV head.

    The sm90 kernel, if any, for every number of KV heads per CTA; the sm80 kernel; and the kernel
    that combines its splits.

    Raises
    ------
    UnsupportedError
        If no kernel supports the variant.
    """
    sm80 = gqa_sm80_spec(arch, variant, rows)
    sm90 = gqa_sm90_spec(arch, variant, rows)
    kernels = [] if sm90 is None else with_all_heads(sm90)
    return [*kernels, sm80, combine_spec(sm80)]


def specs_of_variant(spec: KernelSpec) -> list[KernelSpec]:
    """Return the kernels of the family with the variant of ``spec``: all tiles and head counts.

    Raises
    ------
    UnsupportedError
        If the family does not support the variant.
    """
    specs = [other for rows in _ROW_COUNTS for other in _call_specs_of(spec)(spec.arch, rows)]
    return [other for other in dict.fromkeys(specs) if other.family == spec.family]


def specs_on_arch(spec: KernelSpec, arch: Arch) -> list[KernelSpec]:
    """Return the kernels that calls of ``spec`` may use on another architecture.

    One kernel may map to several: tiles and the decision to split differ by architecture.
    """
    if isinstance(spec, (CombineSpec, CombineStatesSpec)):
        return [replace(spec, arch=arch)]
    call_specs = _call_specs_of(spec)
    found = [call_specs(arch, rows) for rows in _ROW_COUNTS if spec in call_specs(spec.arch, rows)]
    return list(dict.fromkeys(other for others in found for other in others))


def _call_specs_of(spec: KernelSpec) -> Callable[[Arch, int], list[KernelSpec]]:
    """Return the function from (arch, rows) to the kernels of calls with the variant."""
    if isinstance(spec, (MlaSm80Spec, MlaSm90Spec)):
        mla_variant = spec.variant
        return lambda arch, rows: mla_call_specs(arch, mla_variant, rows)
    assert isinstance(spec, (GqaSm80Spec, GqaSm90Spec)), spec
    gqa_variant = spec.variant
    return lambda arch, rows: gqa_call_specs(arch, gqa_variant, rows)
