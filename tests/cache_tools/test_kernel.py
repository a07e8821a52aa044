"""`mlagen kernel`: kernels without a call and without a cached entry, as users name them."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from cache_tools.options.exit_codes import CACHE_UNUSABLE
from cache_tools.tools import disassembly
from cache_tools.tools.kernel_specs import spec_named
from cache_tools.tools.kernel_view import KernelView, code_bytes, ctas_per_sm, tile_of
from mlagen.cache.file import decode_all
from mlagen.cache.store import kernel_store
from mlagen.codegen.render import render
from mlagen.engine import find_or_build, key_of
from mlagen.errors import ToolchainError
from mlagen.prewarming import machine
from mlagen.spec.arch import Arch, parse_arch
from mlagen.spec.families import FAMILIES
from tests.cache.builds import make_build
from tests.fixture_types import Patch
from tests.kernels import COMBINE, SM_80, gqa_sm80
from tests.sass import nvdisasm_is_missing

from .conftest import Setting, raising, run

TEMPLATE = "kernels/combine/kernel.cu.j2"

needs_nvdisasm = pytest.mark.skipif(
    nvdisasm_is_missing(), reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)


def test_a_cached_kernel_is_not_compiled_again(cache_dir: Path) -> None:
    """Its numbers and included templates are those of one that is compiled without the cache."""
    fresh = run.json("kernel show combine --arch A100")
    is_created = cache_dir.exists()
    entry = find_or_build(COMBINE).entry
    found = run.json("kernel show", str(COMBINE))
    assert (fresh["kernel"], fresh["is_cached"], is_created) == (str(COMBINE), False, False)
    assert found == fresh | {"is_cached": True}
    assert (found["key"], found["template"]) == (entry.manifest.key, TEMPLATE)
    assert run("kernel show", str(COMBINE)).stderr == ""
    includes = run("kernel show --includes", str(COMBINE))
    lines = includes.stdout.splitlines()
    assert (includes.exit_code, includes.stderr, lines) == (0, "", found["includes"])
    assert "kernels/combine/combine.cuh" in lines
    assert TEMPLATE not in lines


def test_tile_and_registers_are_those_of_the_source() -> None:
    """Computed sizes are left out; warpgroups with setmaxnreg have other registers later."""
    tiles = {
        "mla_sm90": {"BLOCK_M": 64, "BLOCK_N": 64, "stages": 2},
        "mla_sm90_fp8": {"BLOCK_M": 64, "BLOCK_N": 64, "stages": 5},
        "gqa_sm80(stages=6)": {"BLOCK_M": 16, "BLOCK_N": 16, "stages": 6},
        "combine": {},
    }
    view, end = KernelView.of(COMBINE), " per thread at launch"

    assert {text: tile_of(spec_named(text)) for text in tiles} == tiles
    for spec in (COMBINE, spec_named("mla_sm90")):
        registers = replace(view, spec=spec).resource_texts()["registers"]
        assert registers.endswith(end) == (spec.family == "mla_sm90")


def test_a_part_is_printed_and_named_in_the_document(setting: Setting, cache_dir: Path) -> None:
    """The PTX is for the target; the source is that of a cached kernel, with line info too."""
    show = ("kernel show", str(COMBINE))
    ptx = run(*show, "--ptx").stdout
    assert "\n.target sm_80\n" in ptx
    assert ".visible .entry combine(" in ptx
    assert "\0" not in ptx
    assert json.loads(run(*show, "--ptx", "--json").stdout)["ptx"] == ptx
    assert not cache_dir.exists()
    for wants_lines in (0, 1):
        setting("MLAGEN_LINEINFO", wants_lines)
        path = find_or_build(COMBINE).entry.path
        assert path is not None
        source = run(*show, "--source").stdout
        assert source == decode_all(path.read_bytes())[1]["kernel.cu"].decode()
        assert source == json.loads(run(*show, "--source", "--json").stdout)["source"]
        assert (source == render(COMBINE).text) == (not wants_lines)


def test_without_nvdisasm_the_other_resources_are_printed(monkeypatch: Patch) -> None:
    """A line on stderr has the package to install, and the counts are null in JSON."""
    error = ToolchainError("nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm")
    monkeypatch.setattr(disassembly, "find_nvdisasm", raising(error))
    result = run("kernel show", str(COMBINE), "--resources", "--json")
    assert (result.exit_code, '"instructions": null' in result.stdout) == (0, True)
    assert "no counts of instructions: nvdisasm: not found; run: pip install" in result.stderr


@needs_nvdisasm
def test_sass_and_the_counts_of_its_instructions_are_printed() -> None:
    """`cache show` disassembles in the same way; --resources counts each opcode."""
    shown = run("kernel show", str(COMBINE), "--sass")
    counted = run("kernel show", str(COMBINE), "--resources")
    key = find_or_build(COMBINE).entry.manifest.key

    facts = dict(line.split(maxsplit=1) for line in counted.stdout.splitlines())
    assert shown.exit_code == 0
    assert shown.stdout == run("cache show", key, "--sass").stdout
    assert int(facts["instructions"]) == int(facts["code"].removesuffix(" bytes")) / 16
    assert int(facts["EXIT"]) == shown.stdout.count("EXIT ;")
    assert int(facts["BAR"]) == shown.stdout.count(" BAR.")


def altered_elf(place: int, word: bytes) -> bytes:
    """Return an ELF file of one section ``.text.k``, with other bytes at a place of its headers."""
    header = bytearray(64)
    header[:4], header[40:48] = b"\x7fELF", (64).to_bytes(8, "little")
    header[58:64] = struct.pack("<HHH", 64, 1, 0)
    section = struct.pack("<IIQQQQ", 0, 1, 0, 0, 128, 8).ljust(64, b"\0")
    content = bytearray(header + section + b".text.k\0")
    content[place : place + len(word)] = word
    return bytes(content)


WILD = b"\xff" * 8
NO_CUBINS = {
    "four bytes": b"\x7fELF",
    "half a header": b"\x7fELF" + bytes(50),
    "a wild table": altered_elf(40, WILD),
    "wild counts": altered_elf(58, WILD[:6]),
    "wild names": altered_elf(62, WILD[:2]),
    "a wild section": altered_elf(64 + 24, WILD),
    "a wild size": altered_elf(64 + 32, WILD),
}


@pytest.mark.parametrize("cubin", NO_CUBINS.values(), ids=NO_CUBINS)
def test_a_cubin_of_a_bundle_that_is_no_elf_file_is_one_line(cubin: bytes) -> None:
    """A bundle may hold any bytes; the command ends with the code of a damaged entry."""
    assert code_bytes(altered_elf(0, b"")) == 8
    key = key_of(COMBINE)
    build = make_build(cubin, toolchain=key.toolchain)
    entry = kernel_store().build(key, lambda: build, created_by="", because="")
    message = "cache: kernel.cubin: expected an ELF file with its sections inside, got another"
    for part in ("", "--resources"):
        result = run(f"kernel show {part}", str(COMBINE))
        assert (result.exit_code, result.stdout) == (CACHE_UNUSABLE, "")
        assert result.stderr.endswith(f"mlagen: {message}: {entry.path}\n")


WITHOUT_A_GPU = [(family, None, {"arch": "sm_90a"}) for family in FAMILIES]
NAMED = [
    ("mla_sm90", None, {"query_dtype": "bf16", "page_size": "64"}),
    ("mla_sm90_fp8", None, {"query_dtype": "e4m3", "page_size": "64"}),
    ("gqa_sm80", None, {"query_dtype": "bf16", "page_size": "64"}),
    ("combine", None, {"dtype": "bf16"}),
    ("mla_sm90(block_m=16)", None, {"block_m": "16", "page_size": "64"}),
    ("mla_sm90( page_size=48, block_m = 16 )", None, {"page_size": "48", "block_m": "16"}),
    ("combine(arch=H100, dtype=fp16)", None, {"arch": "sm_90a", "dtype": "fp16"}),
    ("mla_sm90_fp8kv(lookup=sparse)", None, {"lookup": "sparse", "query_dtype": "bf16"}),
    ("combine", SM_80, {"arch": "sm_80"}),
    ("mla_sm90", SM_80, {"arch": "sm_90a"}),
    (str(gqa_sm80()), SM_80, gqa_sm80().key_fields()),
]


@pytest.mark.parametrize(("text", "gpu", "expected"), [*WITHOUT_A_GPU, *NAMED])
def test_names_that_are_left_out_have_defaults(
    text: str, gpu: Arch | None, expected: dict[str, str], monkeypatch: Patch
) -> None:
    """Given values are kept; the target is the visible GPU, or the next one with the family."""
    monkeypatch.setattr(machine, "visible_archs", lambda: {} if gpu is None else {0: gpu})
    assert expected.items() <= spec_named(text).key_fields().items()


def test_a_target_replaces_that_of_the_text() -> None:
    """A whole spec becomes the kernel that the same calls use on the other target."""
    other = gqa_sm80(arch=SM_80)
    assert spec_named(str(gqa_sm80()), SM_80) == other
    assert other.tile != gqa_sm80().tile
    assert spec_named("combine(arch=sm_90a)", SM_80).arch == SM_80


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "expected"),
    [
        ("sm_90a", 384, 168, 232448, 1),  # shared memory
        ("sm_90a", 128, 182, 113488, 2),
        ("sm_90a", 128, 80, 2064, 6),  # registers
        ("sm_90a", 256, 255, 0, 1),
        ("sm_90a", 1024, 32, 0, 2),  # warps
        ("sm_89", 1024, 32, 0, 1),
        ("sm_80", 32, 16, 0, 32),  # CTAs
        ("sm_86", 32, 16, 0, 16),
        ("sm_80", 32, 0, 0, 32),  # none reported
        ("sm_80", 1024, 128, 0, 0),  # too large for any SM
    ],
)
def test_the_scarcest_resource_limits_the_ctas_of_an_sm(
    arch: str, threads: int, registers: int, shared_bytes: int, expected: int
) -> None:
    """The count is that of the CUDA occupancy calculator."""
    counts = {"threads": threads, "registers": registers, "shared_bytes": shared_bytes}
    assert ctas_per_sm(parse_arch(arch), **counts) == expected
