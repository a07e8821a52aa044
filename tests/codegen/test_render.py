"""Spec to source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlagen.artifacts import Source
from mlagen.codegen.render import render
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import CompileError
from mlagen.spec.kernel import KernelSpec
from tests.cache.builds import ROOT
from tests.kernels import COMBINE, mla_sm80

SPECS = (mla_sm80(), COMBINE)


def template_lines(source: Source) -> list[tuple[str, str]]:
    """Return each rendered line that is not blank, with the template line it is said to be."""
    pairs = []
    for line, origin in zip(source.text.splitlines(), source.origins, strict=True):
        name, _, number = origin.rpartition(":")
        template = (ROOT / "templates" / name).read_text().splitlines()
        if line.strip():
            pairs.append((line, template[int(number) - 1]))
    return pairs


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_every_line_is_where_the_map_says(spec: KernelSpec) -> None:
    """A line without a substitution stands, letter by letter, at its place in the template."""
    pairs = template_lines(render(spec))
    changed = [(line, template) for line, template in pairs if line != template]
    assert len(pairs) > 100
    assert [template for _, template in changed if "{{" not in template] == []


def without_includes(name: str) -> str:
    """Return a template without `#pragma once`, its `#include` lines and the blank lines there."""
    text = (ROOT / "templates" / name).read_text()
    return re.sub(r'(^#(pragma once|include "[^"]+")\n\n?)+', "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_plain_files_are_taken_verbatim(spec: KernelSpec) -> None:
    """Every plain file that a kernel includes stands in it as one piece, less its directives."""
    source = render(spec)
    included = {origin.rpartition(":")[0] for origin in source.origins}
    plain = [name for name in included if name.endswith(".cuh")]
    assert len(plain) > 2
    assert [name for name in plain if without_includes(name) not in source.text] == []


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_a_source_is_one_translation_unit(spec: KernelSpec) -> None:
    """It ends in one newline, has a place for each line, and shows no trace of Jinja."""
    source = render(spec)
    assert source.text.endswith("}\n")
    assert len(source.origins) == source.text.count("\n")
    assert all(source.origins)
    assert not any(trace in source.text for trace in ("{%-", "{#", "{{ ", "\x01", "\x02"))
    assert 'extern "C" __global__ void' in source.text


@pytest.mark.parametrize(
    "name",
    [
        "common/types.cuh",
        "kernels/combine/config.cuh.j2",
        "kernels/combine/combine.cuh",
        "kernels/combine/kernel.cu.j2",
    ],
)
def test_an_error_is_reported_where_it_was_made(name: str, templates: Path) -> None:
    """A mistake in any file of a kernel is reported at that file and line, through includes."""
    file = templates / name
    lines = file.read_text().splitlines()
    line = next(
        number for number in range(len(lines), 0, -1) if not lines[number - 1].startswith(" ")
    )
    lines[line - 1] += " undefined_name broken;"
    file.write_text("\n".join(lines) + "\n")
    source = render(COMBINE)

    with pytest.raises(CompileError) as caught:
        compile_source(source, COMBINE.arch, find_nvrtc())

    assert f"{name}:{line} (kernel.cu:" in str(caught.value)
    assert caught.value.source == source.text
