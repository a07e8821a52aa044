"""`mlagen kernel`: kernels without a call and without a cached entry."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from cache_tools.tools import disassembly
from cache_tools.tools.kernel_specs import spec_named
from cache_tools.tools.kernel_view import KernelView, tile_of
from mlagen.codegen.render import render
from mlagen.engine import find_or_build
from mlagen.errors import ToolchainError
from mlagen.settings import current_settings
from mlagen.spec.families import FAMILIES
from tests.kernels import COMBINE
from tests.sass import nvdisasm_is_missing

from .conftest import Run

needs_nvdisasm = pytest.mark.skipif(
    nvdisasm_is_missing(), reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)
FP16 = "combine(arch=sm_80, dtype=fp16)"
FAMILY = f"kernel: expected a family out of {', '.join(FAMILIES)}"


def test_the_summary_is_short(run: Run, cache_dir: Path) -> None:
    """A kernel is compiled for it, its spec is named once, and the cache is not changed."""
    result = run("kernel", "show", "combine", "--arch", "A100")

    lines = [line.strip() for line in result.stdout.splitlines()]
    facts = dict(line.split("  ", 1) for line in lines if "  " in line)
    facts = {name: value.strip() for name, value in facts.items()}
    assert result.exit_code == 0
    assert facts["kernel"] == str(COMBINE)
    assert (result.stdout + result.stderr).count(str(COMBINE)) == 1
    assert facts["threads"] == "128 per CTA"
    assert facts["registers"].endswith(" per thread")
    assert facts["spills"].startswith("0 bytes, ")
    assert facts["template"] == COMBINE.template
    assert facts["key"].endswith(", not cached")
    assert facts["includes"].endswith(" templates, see --includes")
    assert len(lines) < 12
    assert result.stderr.startswith("compiling combine for sm_80 with nvrtc-")
    assert not cache_dir.exists()


def test_the_included_templates_are_printed(run: Run) -> None:
    """There is one on each line, without the template itself, and nothing is compiled."""
    result = run("kernel", "show", str(COMBINE), "--includes")

    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "kernels/combine/combine.cuh" in lines
    assert COMBINE.template not in lines
    assert lines == json.loads(run("kernel", "show", str(COMBINE), "--json").stdout)["includes"]


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("mla_sm90", {"BLOCK_M": 64, "BLOCK_N": 64, "stages": 2}),
        ("mla_sm90_fp8", {"BLOCK_M": 64, "BLOCK_N": 64, "stages": 5}),
        ("gqa_sm80(stages=6)", {"BLOCK_M": 16, "stages": 6}),
        ("combine", {}),
    ],
)
def test_the_tile_is_that_of_the_source(text: str, tile: dict[str, int]) -> None:
    """Sizes that the source computes from others are left out."""
    assert tile_of(spec_named(text)) == tile


def test_registers_that_change_after_the_launch_are_marked() -> None:
    """Warpgroups of a kernel with setmaxnreg have other numbers of registers later."""
    view, other = KernelView.of(COMBINE), spec_named("mla_sm90")

    views = [replace(view, spec=spec) for spec in (COMBINE, other)]
    registers = [view.resource_texts()["registers"] for view in views]

    assert [text.endswith(" per thread at launch") for text in registers] == [False, True]


def test_a_cached_kernel_is_not_compiled_again(run: Run) -> None:
    """The cubin of the cache is shown, with the same numbers."""
    fresh = json.loads(run("kernel", "show", str(COMBINE), "--json").stdout)
    entry = find_or_build(COMBINE).entry

    result = run("kernel", "show", str(COMBINE), "--json")

    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["is_cached"]
    assert document["key"] == entry.manifest.key
    assert document == fresh | {"is_cached": True}


@pytest.mark.parametrize("wants_lines", ["0", "1"])
def test_the_source_is_that_which_is_compiled(
    wants_lines: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is byte for byte that of a cached kernel, with line info too."""
    monkeypatch.setenv("MLAGEN_LINEINFO", wants_lines)
    current_settings.cache_clear()
    path = find_or_build(COMBINE).entry.path
    assert path is not None

    result = run("kernel", "show", str(COMBINE), "--source")

    assert result.stdout == (path / "kernel.cu").read_text()
    assert (result.stdout == render(COMBINE).text) == (wants_lines == "0")


def test_the_ptx_is_printed(run: Run, cache_dir: Path) -> None:
    """The PTX is for the target, and has the kernel."""
    result = run("kernel", "show", str(COMBINE), "--ptx")

    assert result.exit_code == 0
    assert "\n.target sm_80\n" in result.stdout
    assert ".visible .entry combine(" in result.stdout
    assert "\0" not in result.stdout
    assert not cache_dir.exists()


@needs_nvdisasm
def test_the_sass_is_that_of_cache_show(run: Run) -> None:
    """Both commands disassemble in the same way."""
    shown = run("kernel", "show", str(COMBINE), "--sass")
    key = find_or_build(COMBINE).entry.manifest.key

    assert shown.exit_code == 0
    assert shown.stdout == run("cache", "show", key, "--sass").stdout


@needs_nvdisasm
def test_resources_count_instructions(run: Run) -> None:
    """The count of each opcode, and their sum, are those of the SASS."""
    sass = run("kernel", "show", str(COMBINE), "--sass").stdout

    result = run("kernel", "show", str(COMBINE), "--resources")

    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert int(facts["instructions"]) == int(facts["code"].removesuffix(" bytes")) / 16
    assert int(facts["EXIT"]) == sass.count("EXIT ;")
    assert int(facts["BAR"]) == sass.count(" BAR.")


def test_without_nvdisasm_the_other_resources_are_printed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line on stderr has the package to install, and the counts are null in JSON."""

    def missing() -> Path:
        raise ToolchainError("nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm")

    monkeypatch.setattr(disassembly, "find_nvdisasm", missing)

    result = run("kernel", "show", str(COMBINE), "--resources", "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["instructions"] is None
    assert "no counts of instructions: nvdisasm: not found; run: pip install" in result.stderr


@pytest.mark.parametrize("part", ["source", "ptx"])
def test_json_has_the_part(part: str, run: Run) -> None:
    """A part has its own name in the document."""
    document = json.loads(run("kernel", "show", str(COMBINE), f"--{part}", "--json").stdout)

    assert document[part] == run("kernel", "show", str(COMBINE), f"--{part}").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "foo"), "kernel: expected a family out of mla_sm80, "),
        (("show", "mla_sm91"), f"{FAMILY}, got 'mla_sm91', did you mean mla_sm90?"),
        (("show", "combine", "--arch", "H9"), "arch: expected one of sm_80, "),
        (("show", "combine", "--ptx", "--sass"), "part: expected one, got --ptx and --sass; see: "),
        (("diff", "combine", "--sass", "--resources"), "part: expected one, got --sass and --res"),
        (("diff", "combine"), "spec: expected two, or --arch with two targets, got one"),
        (("diff", "combine", "--arch", "H100,A100,L4"), "arch: expected one or two, got H100, "),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...], message: str, run: Run) -> None:
    """The message has the argument and the rule, and nothing is compiled."""
    result = run("kernel", *arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"mlagen: {message}")


def test_another_compiler_than_the_settings_want_is_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of MLAGEN_TOOLCHAIN is shown from the cache alone, if another NVRTC is installed."""
    monkeypatch.setenv("MLAGEN_TOOLCHAIN", "nvrtc-12.8.1")
    current_settings.cache_clear()

    result = run("kernel", "show", "combine")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("mlagen: MLAGEN_TOOLCHAIN: expected nvrtc-")
    assert result.stderr.endswith(", got nvrtc-12.8.1\n")


def test_a_diff_has_spec_and_source(run: Run) -> None:
    """The exit code is 1, and the summary counts what the unified diff has."""
    result = run("kernel", "diff", str(COMBINE), FP16)

    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert {"-dtype bf16", "+dtype fp16"} <= set(lines)
    assert {"-using OutElement = Bf16;", "+using OutElement = Fp16;"} <= set(lines)
    assert {f"--- {COMBINE} spec and resources", f"--- {COMBINE} source"} <= set(lines)
    assert lines[-1] == "differences: 1 in spec and resources, source 1 line removed, 1 added"


def test_a_diff_names_resources_as_show_does(run: Run) -> None:
    """Lines of the summary of `kernel show` are lines of the diff."""
    shown = run("kernel", "show", str(COMBINE)).stdout.splitlines()

    result = run("kernel", "diff", "combine", "--arch", "sm_80,sm_90a")

    facts = {" ".join(line.split()) for line in shown}
    of_facts = takewhile(lambda line: not line.endswith(" source"), result.stdout.splitlines())
    removed = {line[1:] for line in of_facts if line.startswith("-")}
    removed -= {"arch sm_80", f"-- {COMBINE} spec and resources"}
    assert removed
    assert removed <= facts


@needs_nvdisasm
def test_a_diff_of_resources_counts_instructions(run: Run) -> None:
    """With --resources, the lines of code are the counts of `kernel show --resources`."""
    shown = run("kernel", "show", str(COMBINE), "--resources").stdout.splitlines()

    result = run("kernel", "diff", "combine", "--arch", "sm_80,sm_90a", "--resources")

    counts = {" ".join(line.split()) for line in shown if line.startswith("  ")}
    removed = {line[1:] for line in result.stdout.splitlines() if line.startswith("-")}
    assert result.exit_code == 1
    assert f"-- {COMBINE} instructions" in removed
    assert removed & counts
    assert ", instructions " in result.stdout.splitlines()[-1]


def test_equal_kernels_have_no_diff(run: Run) -> None:
    """The exit code is 0, and there is a summary alone."""
    result = run("kernel", "diff", "combine(arch=sm_80)", str(COMBINE))

    assert (result.exit_code, result.stdout) == (0, "differences: none\n")


@needs_nvdisasm
def test_one_spec_is_compared_on_two_targets(run: Run) -> None:
    """With --sass, the code is SASS without the offsets of its instructions."""
    result = run("kernel", "diff", "combine", "--arch", "sm_80,sm_86", "--sass", "--json")

    document = json.loads(result.stdout)
    facts = {fact["fact"]: (fact["first"], fact["second"]) for fact in document["facts"]}
    assert result.exit_code == 1
    assert facts["arch"] == ("sm_80", "sm_86")
    assert (document["part"], document["first"]["kernel"]) == ("sass", str(COMBINE))
    code = document["diff"][[line.endswith(" sass") for line in document["diff"]].index(True) :]
    assert sum(line.startswith("+") for line in code[2:]) == document["added"] > 0
    assert not any("/*00" in line for line in code)
