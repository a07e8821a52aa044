"""Supported kernels, for every architecture that the installed NVRTC knows.

fp16 kernels are their bf16 twins with another instruction, and page sizes differ in a constant: one
of each is compiled, and of the sm90 kernels that copy small pages in another way, two.
A kernel with sparse indices, separate values, a bias or DCP, without RoPE, or with a smaller latent
takes few registers more than its plain twin (at most 16 of 255): the largest tile of each is
compiled, and of the sparse sm90 kernels the smallest one, too; none with two of these is.

- sm_80: the sm80 kernels. Its ISA does not convert e4m3, so its kernels need the most registers.
- sm_120f, which has the least shared memory: the same, with the largest accumulators.
- sm_90a: the sm90 kernels, with e4m3 output for one head dim.
- sm_86, sm_89, sm_90a and sm_100f: the sm80 kernels that most calls take, over each cache dtype.
- The others, which have the limits and the instructions of one of these: the same, over bf16.

``MLAGEN_TEST_KERNELS=all`` compiles every kernel of every architecture, in about an hour of one
core.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlagen.compiler.ptxas import parse_warnings
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.families import specs_of
from mlagen.spec.gqa.sm80 import GqaTile
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm80 import MlaTile
from tests.built_once import cubin_of
from tests.kernels import require_known

# The register file of an SM, in 32-bit registers; CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability". A warp's share is allocated in steps of 256.
REGISTERS_PER_SM = 65536
REGISTERS_STEP = 256
# Of one block the driver keeps 1 KiB, and an SM has 1 KiB more than a block may have.
RESERVED_BYTES = 1024


def problems_of(spec: KernelSpec) -> list[str]:
    """Compile a kernel and return what is wrong with it."""
    cubin = cubin_of(spec)
    problems = [f"ptxas warns: {number}" for number in parse_warnings(cubin.log)]
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
        f"has a stack of {found.stack_bytes} bytes": found.stack_bytes > 0,
        f"takes {registers} registers of an SM": registers > REGISTERS_PER_SM,
        f"takes {shared} bytes of an SM": shared > spec.arch.shared_bytes + RESERVED_BYTES,
    }
    return problems + [problem for problem, is_so in facts.items() if is_so]


HOPPER = ("mla_sm90", "mla_sm90_fp8", "mla_sm90_fp8kv", "gqa_sm90")
SAMPLE = {"page_size": ("64",), "query_dtype": ("bf16", "e4m3", "fp8_per_token")}
BF16_OR_E4M3 = {"query_dtype": ("bf16", "e4m3")}
USUAL = {
    **SAMPLE,
    "lookup": ("paged",),
    "values": ("shared",),
    "mask": ("causal",),
    "qk_rope_head_dim": ("64",),
    "kv_lora_rank": ("512",),
    "head_dim": ("128",),
    "out_dtype": ("bf16",),
    "head_dim_vo": ("128", "512"),
}
FEW = {**USUAL, "kv_dtype": ("bf16",), "head_dim_vo": ("512",)}
FILTERS = {
    "sm_80": SAMPLE,
    "sm_120f": {**SAMPLE, "kv_lora_rank": ("512",), "out_dtype": ("bf16",)},
    **dict.fromkeys(("sm_87", "sm_103f", "sm_110f", "sm_121f"), FEW),
}
# The choices that hardly change the registers of a kernel, as a plain kernel has them.
PLAIN = {
    "kv_lora_rank": "512",
    "qk_rope_head_dim": "64",
    "lookup": "paged",
    "values": "shared",
    "mask": "causal",
}
KIND = ("query_dtype", "kv_dtype", *PLAIN)


def sample_of(arch: Arch) -> list[KernelSpec]:
    """Return the kernels to compile."""
    if os.environ.get("MLAGEN_TEST_KERNELS") == "all":
        return specs_of(arch)
    sample = specs_of(arch, **FILTERS.get(str(arch), USUAL))
    if arch.has_wgmma:
        sample = [spec for spec in sample if spec.family not in HOPPER]
        sample += specs_of(arch, HOPPER[:3], **SAMPLE)
        gqa = {"page_size": ("64",), "query_dtype": ("bf16",)}
        sample += specs_of(arch, HOPPER[3:], out_dtype=("bf16",), **gqa)
        sample += specs_of(arch, HOPPER[3:], out_dtype=("e4m3",), head_dim=("128",), **gqa)
        sample += specs_of(arch, HOPPER[:2], block_m=("16",), page_size=("16",), **BF16_OR_E4M3)
    largest: dict[tuple[str | None, ...], KernelSpec] = {}
    for spec in sample:
        kind = (spec.family, *map(spec.key_fields().get, KIND))
        if kind not in largest or size_of(spec) > size_of(largest[kind]):
            largest[kind] = spec
    few = set(largest.values())
    return [s for s in sample if is_needed(s) or (s in few and changes_of(s) == 1)]


def size_of(spec: KernelSpec) -> tuple[int, int]:
    """Return what orders the tiles of a kernel."""
    return int(spec.key_fields().get("block_m", 0)), spec.shared_bytes


def is_needed(spec: KernelSpec) -> bool:
    """Return whether a kernel is compiled beside the largest tile of its kind."""
    if changes_of(spec) == 0:
        return True
    # Of the sm90 kernels the register budget of the smallest tile is as tight.
    fields = spec.key_fields()
    choices = [fields.get(name) for name in ("block_m", "mask", "qk_rope_head_dim")]
    return spec.family in HOPPER and choices == ["16", "causal", "64"]


def changes_of(spec: KernelSpec) -> int:
    """Return in how many choices a kernel differs from the plain one."""
    fields = spec.key_fields()
    return sum(fields.get(name, value) != value for name, value in PLAIN.items())


# About 40 s on two idle cores for the architectures with most kernels.
@pytest.mark.timeout(5000 if os.environ.get("MLAGEN_TEST_KERNELS") == "all" else 300)
@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_kernels_compile_into_the_limits_of_their_architecture(arch: Arch) -> None:
    """No spill, no stack, no performance warning; registers and shared memory fit the SM."""
    require_known(arch)
    specs = sample_of(arch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC lets go of the interpreter lock
        problems = dict(zip(map(str, specs), pool.map(problems_of, specs), strict=True))
    assert {spec: found for spec, found in problems.items() if found} == {}
