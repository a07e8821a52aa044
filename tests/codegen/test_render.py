"""Spec to source: the Jinja environment, the map of lines, and the text of kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import TemplateRuntimeError, UndefinedError

from mlagen.codegen.includes import Text
from mlagen.codegen.render import render, rendered, split_marks, with_line_directives
from mlagen.codegen.sources import Fact
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.errors import CompileError
from mlagen.spec.kernel import KernelSpec
from tests.cache.builds import ROOT
from tests.kernels import COMBINE, mla_sm80


def probe(text: str, templates: Path, **facts: Fact) -> Text:
    """Return a template's text, rendered as a kernel's would be."""
    (templates / "probe.cuh.j2").write_text(text)
    return rendered("probe.cuh.j2", facts)


@pytest.mark.parametrize(
    "text",
    ["{{ spec.page_sise }}", "{{ page_size }}", "{% if spec.hopper %}x{% endif %}"],
    ids=["a field the spec lacks", "a name the context lacks", "a field in a condition"],
)
def test_an_unknown_name_is_an_error(text: str, templates: Path) -> None:
    """Nothing renders as a silent blank."""
    with pytest.raises(UndefinedError):
        probe(text, templates)


@pytest.mark.parametrize(
    "tag",
    [
        '{% include "a.cuh" %}',
        '{% from "a.cuh" import f %}',
        '{% import "a.cuh" as a %}',
        '{% extends "a.cuh" %}',
    ],
)
def test_jinja_takes_nothing_from_other_files(tag: str, templates: Path) -> None:
    """A key is of the files that `#include` names: what Jinja included would not change it."""
    (templates / "a.cuh").write_text("{% macro f() %}{% endmacro %}\n")
    with pytest.raises(TemplateRuntimeError, match=r'probe\.cuh\.j2: expected #include "a\.cuh"'):
        probe(tag, templates)


TEMPLATES: dict[str, tuple[str, dict[str, int]]] = {
    "tags and comments take up lines": (
        "{#- Two\n lines. -#}\nint a;\n\n{% if true %}\nint b;\n{% endif %}\nint c;\n",
        {"int a;": 3, "int b;": 6, "int c;": 8},
    ),
    "every round of a loop is of one line": (
        "{% for value in spec.words %}\n  int a{{ value }};\n{% endfor %}\n",
        {"  int a1;": 2, "  int a2;": 2},
    ),
    "a line that a macro wrote is the macro's": (
        "{% macro f(n) %}\nint f{{ n }};\nint g;\n{% endmacro %}\nint a;\n{{ f(7) }}int z;\n",
        {"int f7;": 2, "int g;": 3, "int a;": 5},
    ),
}


@pytest.mark.parametrize(("text", "numbers"), TEMPLATES.values(), ids=TEMPLATES)
def test_lines_of_a_template(text: str, numbers: dict[str, int], templates: Path) -> None:
    """Each rendered line has the template line that it came from."""
    expected = {(line, f"probe.cuh.j2:{number}") for line, number in numbers.items()}

    lines, origins = probe(text, templates, words=("1", "2"))

    assert set(zip(lines, origins, strict=True)) >= expected
    assert not {"\x01", "\x02"} & set("".join(lines))


def test_the_last_mark_of_a_line_counts() -> None:
    """Where one line was put together from two, the inner place is the one to edit."""
    lines, origins = split_marks("\x011:outer.cuh.j2\x02  \x019:inner.cuh\x02int a;")
    assert lines == ["  int a;"]
    assert origins == ["inner.cuh:9"]


def compiled_as(text: Text, root: Path) -> list[tuple[str, str]]:
    """Return each line that is not blank, with the place that its directives give it."""
    name, number, found = "", 0, []
    for line in text.lines:
        if directive := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number, name = int(directive[1]), str(Path(directive[2]).relative_to(root))
            continue
        if line.strip():
            found.append((line, f"{name}:{number}"))
        number += 1
    return found


def test_directives_say_what_the_map_says() -> None:
    """A compiler that follows the directives finds each line at its origin."""
    lines = ["int a;", "", "int b;", "int c;", "int d;", "int e;"]
    origins = ["a.cuh:4", "a.cuh:4", "a.cuh:6", "a.cuh:9", "b.cuh:10", "b.cuh:10"]
    root = Path("/templates")
    marked = with_line_directives(Text(lines, origins), root)
    expected = [(line, place) for line, place in zip(lines, origins, strict=True) if line]
    assert compiled_as(marked, root) == expected
    assert len(marked.origins) == len(marked.lines)
    assert sum(line.startswith("#line") for line in marked.lines) == 4


def test_no_directive_splits_a_macro() -> None:
    """A line that continues the one before it stays behind it."""
    lines = ["#define A \\", "  1", "int b;"]
    marked = with_line_directives(Text(lines, ["a.cuh:1", "b.cuh:7", "b.cuh:8"]), Path("/t"))
    assert marked.lines == ['#line 1 "/t/a.cuh"', *lines[:2], '#line 8 "/t/b.cuh"', lines[2]]


def test_a_path_is_spelled_as_a_string_literal() -> None:
    """Quotes and backslashes of a folder are escaped."""
    marked = with_line_directives(Text(["int a;"], ["a.cuh:1"]), Path('/a "b\\c'))
    assert marked.lines[0] == r'#line 1 "/a \"b\\c/a.cuh"'


specs = pytest.mark.parametrize("spec", [mla_sm80(), COMBINE], ids=lambda spec: spec.family)


@specs
def test_every_line_is_where_the_map_says(spec: KernelSpec) -> None:
    """A line without a substitution stands, letter by letter, at its place in the template."""
    source, pairs = render(spec), []
    for line, origin in zip(source.text.splitlines(), source.origins, strict=True):
        name, _, number = origin.rpartition(":")
        template = (ROOT / "templates" / name).read_text().splitlines()
        if line.strip():
            pairs.append((line, template[int(number) - 1]))

    assert len(pairs) > 100
    assert [(line, was) for line, was in pairs if line != was and "{{" not in was] == []


def without_includes(name: str) -> str:
    """Return a template without `#pragma once`, its `#include` lines and the blank lines there."""
    text = (ROOT / "templates" / name).read_text()
    return re.sub(r'(^#(pragma once|include "[^"]+")\n\n?)+', "", text, flags=re.MULTILINE)


@specs
def test_plain_files_are_taken_verbatim(spec: KernelSpec) -> None:
    """Every plain file that a kernel includes stands in it as one piece, less its directives."""
    source = render(spec)
    included = {origin.rpartition(":")[0] for origin in source.origins}
    plain = [name for name in included if name.endswith(".cuh")]
    assert len(plain) > 2
    assert [name for name in plain if without_includes(name) not in source.text] == []


@specs
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
    line = max(i for i, text in enumerate(lines, start=1) if not text.startswith(" "))
    lines[line - 1] += " undefined_name broken;"
    file.write_text("\n".join(lines) + "\n")
    source = render(COMBINE)

    with pytest.raises(CompileError) as caught:
        compile_source(source, COMBINE.arch, find_nvrtc())

    assert f"{name}:{line} (kernel.cu:" in str(caught.value)
    assert caught.value.source == source.text
