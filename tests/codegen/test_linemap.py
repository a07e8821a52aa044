"""Which template line a rendered line came from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlagen.codegen.environment import environment
from mlagen.codegen.includes import Text
from mlagen.codegen.linemap import split_marks, with_line_directives


def origins_of(text: str, templates: Path) -> dict[str, str]:
    """Render a template and return where each of its lines that is not blank came from."""
    (templates / "probe.cuh.j2").write_text(text)
    lines, origins = split_marks(environment().get_template("probe.cuh.j2").render(spec=(1, 2)))
    assert "\x01" not in "".join(lines)
    assert "\x02" not in "".join(lines)
    return {line: origin for line, origin in zip(lines, origins, strict=True) if line.strip()}


TEMPLATES: dict[str, tuple[str, dict[str, int]]] = {
    "tags and comments take up lines": (
        "{#- Two\n lines. -#}\nint a;\n\n{% if true %}\nint b;\n{% endif %}\nint c;\n",
        {"int a;": 3, "int b;": 6, "int c;": 8},
    ),
    "every round of a loop is of one line": (
        "{% for value in spec %}\n  int a{{ value }};\n{% endfor %}\n",
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
    expected = {line: f"probe.cuh.j2:{number}" for line, number in numbers.items()}
    assert origins_of(text, templates).items() >= expected.items()


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
