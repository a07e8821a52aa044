"""Which template line a rendered line came from."""

from __future__ import annotations

from pathlib import Path

from mlagen.codegen.environment import environment
from mlagen.codegen.linemap import split_marks


def origins_of(text: str, templates: Path) -> dict[str, str]:
    """Render a template and return where each of its lines that is not blank came from."""
    (templates / "probe.cuh.j2").write_text(text)
    rendered, origins = split_marks(environment().get_template("probe.cuh.j2").render(spec=(1, 2)))
    lines = rendered.split("\n")
    assert len(lines) == len(origins)
    assert "\x01" not in rendered
    assert "\x02" not in rendered
    return {line: origin for line, origin in zip(lines, origins, strict=True) if line.strip()}


def test_lines_of_a_template(templates: Path) -> None:
    """Tags and comments take up template lines and none of the result."""
    text = (
        "{#- Two lines\n    of comment. -#}\nint a;\n\n{% if true %}\nint b;\n{% endif %}\nint c;\n"
    )

    origins = origins_of(text, templates)

    assert origins == {
        "int a;": "probe.cuh.j2:3",
        "int b;": "probe.cuh.j2:6",
        "int c;": "probe.cuh.j2:8",
    }


def test_lines_of_a_loop(templates: Path) -> None:
    """Every round of a loop came from the same line."""
    text = "{% for value in spec %}\n  int a{{ value }};\n{% endfor %}\n"

    origins = origins_of(text, templates)

    assert origins == {"  int a1;": "probe.cuh.j2:2", "  int a2;": "probe.cuh.j2:2"}


def test_lines_of_an_included_file(templates: Path) -> None:
    """A line of an include is the include's, and what follows is the template's again."""
    (templates / "plain.cuh").write_text("// {%0, %1}\n\nint plain;\n")
    (templates / "inner.cuh.j2").write_text('int before;\n{% include "plain.cuh" %}\nint after;\n')
    text = 'int first;\n{% include "inner.cuh.j2" %}\n\nint last;\n'

    origins = origins_of(text, templates)

    assert origins == {
        "int first;": "probe.cuh.j2:1",
        "int before;": "inner.cuh.j2:1",
        "// {%0, %1}": "plain.cuh:1",
        "int plain;": "plain.cuh:3",
        "int after;": "inner.cuh.j2:3",
        "int last;": "probe.cuh.j2:4",
    }


def test_lines_of_an_imported_macro(templates: Path) -> None:
    """A line that a macro wrote is the macro's."""
    (templates / "macros.cuh.j2").write_text(
        "{% macro f(n) %}\nint f{{ n }};\nint g{{ n }};\n{% endmacro %}\n"
    )
    text = '{% from "macros.cuh.j2" import f %}\nint a;\n{{ f(7) }}int z;\n'

    origins = origins_of(text, templates)

    assert origins["int f7;"] == "macros.cuh.j2:2"
    assert origins["int g7;"] == "macros.cuh.j2:3"
    assert origins["int a;"] == "probe.cuh.j2:2"


def test_a_blank_line_belongs_to_the_line_before() -> None:
    """Blank lines carry no mark, and none is needed to find an error."""
    text, origins = split_marks("\x014:a.cuh\x02int a;\n\n\x016:a.cuh\x02int b;")

    assert text == "int a;\n\nint b;"
    assert origins == ("a.cuh:4", "a.cuh:4", "a.cuh:6")


def test_the_last_mark_of_a_line_counts() -> None:
    """Where one line was put together from two, the inner place is the one to edit."""
    text, origins = split_marks("\x011:outer.cuh.j2\x02  \x019:inner.cuh\x02int a;")

    assert text == "  int a;"
    assert origins == ("inner.cuh:9",)
