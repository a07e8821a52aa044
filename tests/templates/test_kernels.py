"""Supported kernels, for every architecture that the installed NVRTC knows.

Compiled is what may spill. `LIKE_ANOTHER` lists kernels that take no more registers than another
one, or far fewer than they may. fp16 kernels are their bf16 twins with another instruction, and
page sizes differ in a constant: one of each is compiled, and of mla_sm90_fp8, which has the fewest
registers of the sm90 kernels that copy small pages in another way, two.
A kernel with sparse indices, separate values, a bias or DCP, without RoPE or with a smaller latent
takes few registers more than its plain twin (at most 16 of 255), whatever its dtypes: the largest
tile of each is compiled where query and cache have one dtype, and of mla_sm80, which takes 188 with
FP8 values, over bf16 alone; none with two of these is, and none with e4m3 output, which takes no
more. Sparse indices, and kernels without RoPE, are compiled over every dtype of sm90 that is not
like another: conversions depend on what is loaded.
Kernels over two pools are compiled on sm_80 and sm_90a: over one format of both, and over two.

- sm_80: the sm80 kernels. Its ISA does not convert e4m3, so its kernels need the most registers.
- sm_90a: the sm90 kernels, and the largest sm80 kernel of each dtype.
- sm_86, which has the instructions of sm_80 and the memory of sm_120f, and sm_120f, which has the
  least shared memory: the largest sm80 kernels of bf16 queries.
- The others, which have the limits and the instructions of one of these: the largest of mla_sm80.

``MLAGEN_TEST_KERNELS=all`` compiles every kernel of every architecture, in about an hour of one
core.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

import pytest

from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import FAMILIES, batch_invariant, specs_of
from mlagen.spec.gqa.sm80 import GqaTile
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm80 import MlaTile
from tests.built_once import cubin_of
from tests.kernels import (
    gqa_sm90,
    mla_sm90_fp8,
    mla_sm90_fp8kv,
    mla_sm90_two_pools,
    require_known,
)

# The register file of an SM, in 32-bit registers; CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability". A warp's share is allocated in steps of 256.
REGISTERS_PER_SM = 65536
REGISTERS_STEP = 256
# Of one block the driver keeps 1 KiB, and an SM has 1 KiB more than a block may have.
RESERVED_BYTES = 1024


def stack_bytes_of(spec: KernelSpec) -> int:
    """Return the bytes that a thread indexes at run time: nodes of a tree of fixed splits."""
    if not isinstance(spec, GqaSm90Spec) or not spec.split_tokens:
        return 0
    return -(-spec.tree_levels * 24 // 16) * 16


def problems_of(spec: KernelSpec) -> list[str]:
    """Compile a kernel and return what is wrong with it."""
    cubin = cubin_of(spec)
    # Performance warnings: wgmma serialized, setmaxnreg ignored.
    warnings = dict.fromkeys(re.findall(r"\bC7\d{3}\b", cubin.log))
    problems = [f"ptxas warns: {number}" for number in warnings]
    if [found.symbol for found in cubin.resources] != [spec.symbol]:
        return [*problems, f"expected one kernel, got {cubin.resources}"]
    (found,) = cubin.resources
    tile = getattr(spec, "tile", None)
    blocks = tile.ctas_per_sm if isinstance(tile, (MlaTile, GqaTile)) else 1
    warp = -(-found.registers * 32 // REGISTERS_STEP) * REGISTERS_STEP
    registers = warp * (spec.threads // 32) * blocks
    shared = (spec.shared_bytes + found.static_shared_bytes + RESERVED_BYTES) * blocks
    facts = {
        f"spills {found.spill_store_bytes} + {found.spill_load_bytes} bytes": found.has_spills,
        f"has a stack of {found.stack_bytes} bytes": found.stack_bytes > stack_bytes_of(spec),
        f"takes {registers} registers of an SM": registers > REGISTERS_PER_SM,
        f"takes {shared} bytes of an SM": shared > spec.arch.shared_bytes + RESERVED_BYTES,
    }
    return problems + [problem for problem, is_so in facts.items() if is_so]


HOPPER = ("mla_sm90", "mla_sm90_fp8", "mla_sm90_fp8kv", "gqa_sm90")
DECODE_SM80 = ("mla_sm80", "gqa_sm80")
SAMPLE = {"page_size": ("64", "0"), "query_dtype": ("bf16", "e4m3", "fp8_per_token")}
USUAL = {
    **SAMPLE,
    "lookup": ("paged",),
    "values": ("shared",),
    "mask": ("causal",),
    "qk_rope_head_dim": ("64",),
    "kv_lora_rank": ("512",),
    "head_dim": ("128",),
    "out_dtype": ("bf16",),
    "head_dim_vo": ("0", "128", "512"),
}
FEW = {**USUAL, "query_dtype": ("bf16",), "kv_dtype": ("bf16",), "head_dim_vo": ("0", "512")}
FILTERS = {
    "sm_80": SAMPLE,
    "sm_86": {**FEW, "kv_dtype": ("bf16", "e4m3")},
    "sm_90a": USUAL,
    "sm_120f": {**FEW, "kv_dtype": ("bf16", "e4m3", "nvfp4"), "head_dim": ("256",)},
}
FAMILIES_ON = {"sm_80": FAMILIES, "sm_90a": FAMILIES, "sm_86": DECODE_SM80, "sm_120f": DECODE_SM80}
FP8 = ("e4m3", "fp8_per_token")
NOT_FP4 = ("bf16", "e4m3")  # NVFP4 takes the most registers
# Kernels that are not compiled, by their fields: each takes no more registers than the one that
# the comment names, or as many of those that it may have.
LIKE_ANOTHER: tuple[dict[str, Collection[str]], ...] = (
    {"family": ["write_rows"], "prologue": ["none"], "arch": ["sm_80"]},  # with a prologue
    {"family": ["mla_sm80"], "query_dtype": ["e4m3"], "kv_dtype": ["fp8_ds_mla"]},  # bf16
    {"family": ["mla_sm80"], "query_dtype": ["fp8_per_token"]},  # 192/255
    {"family": ["mla_sm80"], "arch": ["sm_80"], "block_m": ["16"]},  # 210/255
    {"family": ["gqa_sm80", "gqa_sm90"], "kv_dtype": ["int8", "e5m2"]},  # e4m3
    {"family": ["gqa_sm80"], "head_dim": ["64"], "kv_dtype": ["e4m3", "nvfp4"]},  # 206/255
    {"family": ["gqa_sm80"], "head_dim": ["128"], "block_m": ["16"], "kv_dtype": NOT_FP4},
    {"family": ["gqa_sm90"], "head_dim": ["64", "128"], "block_m": ["16"]},  # 32 rows
    {"family": ["gqa_sm90"], "head_dim": ["64", "256"], "block_m": ["8"]},  # 16 and 32 rows
    {"family": ["gqa_sm90"], "head_dim": ["128"], "block_m": ["8"], "kv_heads_per_cta": ["1", "2"]},
    {"family": HOPPER[:3], "mask": ["dcp"]},  # causal
    {"family": ["mla_sm90_fp8kv"], "query_dtype": FP8, "block_m": ["16", "32"]},  # 117/128
    {"family": ["mla_sm90_fp8kv"], "lookup": ["paged"], "block_m": ["16"]},  # 108/128
    {"family": ["mla_sm90_fp8kv"], "kv_dtype": ["e4m3"]},  # fp8_ds_mla
    {"family": ["mla_sm90_fp8kv"], "kv_dtype": ["fp8_dsv41"], "block_m": ["16", "32"]},  # fp8_dsv4
)
# Of two pools: the others differ in offsets, or read each of the formats in one of these.
# The sm90 kernel has none of two formats.
POOLS = {"lookup": ("two_pools",), "kv_dtype": ("fp8_dsv4", "fp8_dsv41_fp4_ca")}
HOPPER_POOLS = {"lookup": ("two_pools",), "kv_dtype": ("fp8_dsv4", "fp8_dsv41")}
WHOLE = {"sm_80", "sm_86"}  # of which every tile of the sm80 kernels is compiled
# The choices that hardly change the registers of a kernel, as a plain kernel has them.
PLAIN = {
    "kv_lora_rank": "512",
    "qk_rope_head_dim": "64",
    "lookup": "paged",
    "values": "shared",
    "mask": "causal",
    "out_dtype": "bf16",
}
PLAIN_OF_POOLS = {**PLAIN, "lookup": "two_pools", "qk_rope_head_dim": "0"}
KIND = ("query_dtype", "kv_dtype", *PLAIN)


def sample_of(arch: Arch) -> list[KernelSpec]:
    """Return the kernels to compile."""
    if os.environ.get("MLAGEN_TEST_KERNELS") == "all":
        return specs_of(arch)
    wanted = {"dtype": ("bf16", "e4m3"), **FILTERS.get(str(arch), FEW)}
    sample = [
        spec
        for spec in specs_of(arch, FAMILIES_ON.get(str(arch), ["mla_sm80"]))
        if all(spec.key_fields().get(name) in {None, *values} for name, values in wanted.items())
    ]
    if arch.has_wgmma:
        sample = [spec for spec in sample if spec.family not in HOPPER]
        sample += specs_of(arch, HOPPER[:3], **SAMPLE)
        sample += specs_of(arch, HOPPER[3:], page_size=("64",), query_dtype=("bf16",))
        small_pages = {"page_size": ("16",), "lookup": ("paged",), "block_m": ("16",)}
        sample += specs_of(arch, ["mla_sm90_fp8"], **small_pages)
        sample += specs_of(arch, ["mla_sm80"], **POOLS)
    sample = [spec for spec in sample if not is_like_another(spec)]
    largest: dict[tuple[str | None, ...], KernelSpec] = {}
    for spec in sample:
        kind = (spec.family, *map(spec.key_fields().get, KIND))
        if kind not in largest or size_of(spec) > size_of(largest[kind]):
            largest[kind] = spec
    few = set(largest.values())
    return [
        spec
        for spec in sample
        if (spec in few and stands_for_a_choice(spec))
        or (changes_of(spec) == 0 and (spec in few or str(arch) in WHOLE or spec.family in HOPPER))
    ]


def is_like_another(spec: KernelSpec) -> bool:
    """Return whether another kernel that is compiled stands for this one."""
    if is_over_pools(spec):
        pools = HOPPER_POOLS if spec.family in HOPPER else POOLS
        if not has_values(spec, pools):
            return True
    return any(has_values(spec, row) for row in LIKE_ANOTHER)


def size_of(spec: KernelSpec) -> tuple[int, ...]:
    """Return what orders the tiles of a kernel."""
    fields = spec.key_fields()
    return (*(int(fields.get(name, 0)) for name in ("block_m", "head_dim")), spec.shared_bytes)


def stands_for_a_choice(spec: KernelSpec) -> bool:
    """Return whether the kernel differs in one choice, and is compiled for all with it."""
    fields = spec.key_fields()
    dtypes = fields.get("query_dtype"), fields.get("kv_dtype")
    if spec.family == "mla_sm80":
        is_compiled = dtypes == ("bf16", "bf16")
    else:
        is_of_loads = fields.get("lookup") == "sparse" or fields.get("qk_rope_head_dim") == "0"
        is_compiled = dtypes[0] == dtypes[1] or is_of_loads
    return changes_of(spec) == 1 and is_compiled


def changes_of(spec: KernelSpec) -> int:
    """Return in how many choices a kernel differs from the plain one."""
    fields = spec.key_fields()
    plain = PLAIN_OF_POOLS if is_over_pools(spec) else PLAIN
    return sum(fields.get(name, value) != value for name, value in plain.items())


def is_over_pools(spec: KernelSpec) -> bool:
    """Return whether a kernel reads two pools."""
    return spec.key_fields().get("lookup") == "two_pools"


def has_values(spec: KernelSpec, wanted: Mapping[str, Collection[str]]) -> bool:
    """Return whether each key field, or the family, has one of its values."""
    fields = {"family": spec.family, **spec.key_fields()}
    return all(fields.get(name) in values for name, values in wanted.items())


# Dims of gqa_sm90 that prewarming compiles for models alone: the tiles that take most registers.
OTHER_DIMS = [
    gqa_sm90(head_dim=512, rows=16, kv_dtype=DType.E4M3),
    *(
        gqa_sm90(head_dim=192, head_dim_vo=128, rows=32, kv_dtype=kv)
        for kv in (DType.BF16, DType.E4M3)
    ),
    gqa_sm90(head_dim=32, rows=32, kv_dtype=DType.E4M3),
    gqa_sm90(head_dim=240, rows=32),
]

# Kernels that gather tokens, whose producer warps have more to keep than those with TMA.
GATHERING = [
    gqa_sm90(rows=rows, head_dim=head_dim, kv_dtype=kv_dtype, sparse_block=1, has_output_gate=True)
    for head_dim, rows, kv_dtype in (
        (64, 32, DType.BF16),
        (256, 16, DType.BF16),
        (256, 16, DType.NVFP4),
    )
] + [gqa_sm90(kv_dtype=DType.E4M3, sparse_block=1, separate_page_ids=True)]

# Batch-invariant kernels: the smallest and the largest tiles.
INVARIANT = [
    gqa_sm90(batch_invariant=True),
    gqa_sm90(batch_invariant=True, kv_dtype=DType.NVFP4, rows=32),
    gqa_sm90(batch_invariant=True, kv_dtype=DType.E4M3, head_dim=512, rows=16),
    mla_sm90_fp8(batch_invariant=True, rows=64),
    mla_sm90_fp8kv(batch_invariant=True, query_dtype=DType.E4M3, kv_dtype=DType.E4M3),
    mla_sm90_fp8kv(batch_invariant=True, lookup="paged"),
    *batch_invariant([mla_sm90_two_pools()]),
]


@pytest.mark.parametrize(
    "spec",
    [*(spec for arch in ARCHS for spec in sample_of(arch)), *OTHER_DIMS, *GATHERING, *INVARIANT],
    ids=str,
)
def test_a_kernel_compiles_into_the_limits_of_its_architecture(spec: KernelSpec) -> None:
    """No spill, no stack, no performance warning; registers and shared memory fit the SM."""
    require_known(spec.arch)
    assert problems_of(spec) == []
