"""The rules of templates/: what keeps them readable as CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mlagen.codegen.render import render
from mlagen.codegen.sources import kernel_folders, template_root
from mlagen.spec.dtype import DType
from mlagen.spec.families import specs_of
from mlagen.spec.kernel import KernelSpec
from tests.cache.builds import ROOT
from tests.kernels import (
    COMBINE,
    SM_80,
    SM_90A,
    WIDE_DECODE,
    gqa_sm80,
    gqa_sm90,
    mla_sm80,
    mla_sm90,
    mla_sm90_fp8,
    mla_sm90_fp8kv,
    mla_sm90_two_pools,
)

from .headers import variants

FILES = {
    str(path.relative_to(template_root())): path
    for path in sorted(template_root().rglob("*"))
    if path.suffix in {".cuh", ".j2"}
}
PLAIN = [name for name in FILES if name.endswith(".cuh")]
JINJA = [name for name in FILES if name.endswith(".j2")]

# A tag by its keyword, since {% and {{ are CUDA too: in the operands of PTX, in initializers.
_TAG = re.compile(r"\{%[-+]?\s*([a-z]+)")
_OUTPUT = re.compile(r"\{\{[-+]?\s*([a-z_][\w.]*)[^{}]*\}\}")
_KEYWORDS = {"if", "elif", "else", "endif", "for", "endfor"}
_OPENING, _CLOSING = {"if", "for"}, {"endif", "endfor"}

# What a shared file may ask of a spec: the architecture, the element that it stores, and which rows
# are packed.
_SHARED_CHOICES = {
    *("arch.has_cvt_e4m3", "arch.has_griddepcontrol"),
    *("stores_e4m3", "has_packed_rows", "has_mixed_rows"),
}

# Where the numbers of a spec become constants.
_CONFIGS = ("config.cuh.j2", "packed_row.cuh.j2")
# What other files may write of a spec: names and choices, no sizes.
_OUTPUTS = {"spec.symbol", "declaration"}


def test_only_a_template_has_jinja() -> None:
    """What is called .cuh is CUDA that any tool can read; what is called .j2 has Jinja."""
    keywords = _KEYWORDS | {"include", "from", "import", "extends", "block", "set", "macro"}
    for name, path in FILES.items():
        text = path.read_text()
        tags = keywords.intersection(_TAG.findall(text))
        outputs = {output for output in _OUTPUT.findall(text) if output.startswith("spec")}
        assert bool(tags | outputs) == (name in JINJA), name
        assert name in JINJA or "{#" not in text, name
        assert name.endswith((".cuh", ".cuh.j2", ".cu.j2")), name


@pytest.mark.parametrize("name", JINJA)
def test_tags_are_few_and_stand_at_the_left(name: str) -> None:
    """Control tags begin their line, alone, at most two deep; only a first comment eats space."""
    depth = 0
    lines = FILES[name].read_text().splitlines()
    for line in lines:
        if "{%" not in line:
            continue
        assert re.fullmatch(r"\{% [^%]+ %\}", line), line
        (keyword,) = _TAG.findall(line)
        assert keyword in _KEYWORDS, line
        depth += (keyword in _OPENING) - (keyword in _CLOSING)
        assert 0 <= depth <= 2, line
    assert depth == 0
    golfed = [line for line in lines if re.search(r"\{[{%#][-+]|[-+][}%#]\}", line)]
    assert golfed in ([], lines[:1])


def test_sizes_enter_once() -> None:
    """Numbers of a spec become constants in a configuration; the others use the constants."""
    others = [name for name in JINJA if not name.endswith(_CONFIGS)]
    written = {output for name in others for output in _OUTPUT.findall(FILES[name].read_text())}
    assert written <= _OUTPUTS


def test_shared_files_know_no_family() -> None:
    """A shared file includes what differs by a name that each family has in its folder."""
    for name, path in FILES.items():
        if not name.startswith("kernels/"):
            text = path.read_text()
            assert '#include "kernels/' not in text, name
            assert set(re.findall(r"\{% if spec\.([\w.]+)", text)) <= _SHARED_CHOICES, name


def test_the_first_line_says_what_a_file_is() -> None:
    """It is a comment: of the CUDA, or of the template where that would not end up in a kernel."""
    for name, path in FILES.items():
        first = path.read_text().splitlines()[0]
        assert re.match(r"// \S|\{#- \S", first), name
        assert name.endswith(".cu.j2") == first.startswith("{#-"), name


def test_no_kernel_includes_a_file() -> None:
    """Source, options and compiler are the whole input of a build: a rendered text is complete."""
    including = [
        str(spec)
        for spec, _ in variants()
        if re.search(r"^\s*#\s*include", render(spec).text, re.MULTILINE)
    ]
    assert including == []


def test_every_file_is_part_of_some_kernel() -> None:
    """A template that no supported kernel includes can be deleted."""
    used = {name for _, files in variants() for name in files}
    assert set(FILES) - used == set()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("kernel.cu.j2")])
def test_a_kernel_is_parameters_includes_and_a_main_function(name: str) -> None:
    """It has 100 lines at most; what is longer is a step in a file of its own."""
    assert len(FILES[name].read_text().splitlines()) <= 100


@cache
def clang_format() -> str:
    """Return the formatter's path; skip where the version that the project pins is missing."""
    path = shutil.which("clang-format", path=str(Path(sys.executable).parent))
    path = path or shutil.which("clang-format")
    pinned = re.search(r'"clang-format==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    if path is None:
        pytest.skip(f"needs clang-format {pinned[1]}")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    if f" {pinned[1].split('.')[0]}." not in version.stdout:
        pytest.skip(f"needs clang-format {pinned[1]}, found {version.stdout.strip()}")
    return path


def formatted(text: str) -> str:
    """Return the text as clang-format under the project's rules would have it."""
    command = [clang_format(), f"--style=file:{ROOT / '.clang-format'}", "--assume-filename=k.cu"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_header_is_included_once() -> None:
    """Behind the comment that it begins with, `#pragma once` says so to other tools."""
    headers = [path for name, path in FILES.items() if not name.endswith(".cu.j2")]
    once = re.compile(r"(// .*\n)+\n#pragma once\n\n")
    assert [path for path in headers if not once.match(path.read_text())] == []


def test_plain_files_are_formatted() -> None:
    """Clang-format would leave them as they are."""
    style = f"--style=file:{ROOT / '.clang-format'}"
    command = [
        clang_format(),
        style,
        "--dry-run",
        "--Werror",
        *(str(FILES[name]) for name in PLAIN),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "spec",
    [
        WIDE_DECODE,
        mla_sm80(arch=SM_80),
        mla_sm80(arch=SM_80, kv_dtype=DType.FP8_DS_MLA, lookup="sparse"),
        mla_sm80(query_dtype=DType.E4M3, kv_dtype=DType.E4M3, values="separate"),
        mla_sm90(rows=64),
        mla_sm90(rows=16, page_size=16),
        *(mla_sm90(rows=rows, lookup="sparse") for rows in (16, 64)),
        mla_sm90_fp8(rows=64),
        mla_sm90_fp8(rows=16, page_size=16),
        mla_sm90_fp8kv(rows=64),
        mla_sm90_fp8kv(rows=16, lookup="paged", kv_dtype=DType.E4M3),
        mla_sm90_fp8kv(query_dtype=DType.E4M3, kv_dtype=DType.E4M3),
        mla_sm90_fp8kv(query_dtype=DType.E4M3, qk_rope_head_dim=0),
        *(mla_sm90_two_pools(rows=rows) for rows in (16, 64)),
        gqa_sm80(),
        gqa_sm80(arch=SM_80, kv_dtype=DType.E4M3, out_dtype=DType.E4M3),
        gqa_sm80(kv_dtype=DType.NVFP4),
        gqa_sm80(kv_dtype=DType.FP8_PER_TOKEN_HEAD),
        gqa_sm80(kv_dtype=DType.NVFP4, sparse_block=1, has_output_gate=True),
        gqa_sm90(rows=32),
        gqa_sm90(kv_dtype=DType.E4M3, out_dtype=DType.E4M3),
        gqa_sm90(has_soft_cap=True),
        gqa_sm90(kv_dtype=DType.INT8_PER_TOKEN_HEAD),
        gqa_sm90(kv_dtype=DType.INT8_PER_TOKEN_HEAD, has_unaligned_rows=True),
        gqa_sm90(page_size=128, sparse_block=128),
        gqa_sm90(kv_dtype=DType.NVFP4, sparse_block=1, has_output_gate=True),
        gqa_sm90(has_dcp=True, separate_page_ids=True),
        COMBINE,
    ],
    ids=str,
)
def test_a_rendered_kernel_is_formatted(spec: KernelSpec) -> None:
    """What substitution made of the templates, clang-format would leave as it is."""
    text = render(spec).text
    assert formatted(text) == text


def test_every_family_has_its_template() -> None:
    """The folders that specs name are those of the kernels that there are."""
    named = {spec.folder for spec in specs_of(SM_90A)}
    assert named == set(kernel_folders(template_root()))
