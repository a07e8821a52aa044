"""Which template line a rendered line came from."""

from __future__ import annotations

from pathlib import Path

from mlagen.codegen.environment import environment
from mlagen.codegen.linemap import plain_text, split_marks


def origins_of(text: str, templates: Path) -> dict[str, str]:
    """Render a template and return where each of its lines that is not blank came from."""
    (templates / "probe.cuh.j2").write_text(text)
    lines, origins = split_marks(environment().get_template("probe.cuh.j2").render(spec=(1, 2)))
    assert "\x01" not in "".join(lines)
    assert "\x02" not in "".join(lines)
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


def test_lines_of_a_macro(templates: Path) -> None:
    """A line that a macro wrote is the macro's."""
    text = "{% macro f(n) %}\nint f{{ n }};\nint g;\n{% endmacro %}\nint a;\n{{ f(7) }}int z;\n"

    origins = origins_of(text, templates)

    assert origins["int f7;"] == "probe.cuh.j2:2"
    assert origins["int g;"] == "probe.cuh.j2:3"
    assert origins["int a;"] == "probe.cuh.j2:5"


def test_plain_lines_come_from_themselves() -> None:
    """A file without Jinja is not parsed: the {%0, %1} of inline assembly is no tag."""
    text = plain_text("// {%0, %1}\n\nint plain;\n", "plain.cuh")

    assert text.lines == ["// {%0, %1}", "", "int plain;", ""]
    assert text.origins == [f"plain.cuh:{number}" for number in (1, 2, 3, 4)]


def test_a_blank_line_belongs_to_the_line_before() -> None:
    """Blank lines carry no mark, and none is needed to find an error."""
    lines, origins = split_marks("\x014:a.cuh\x02int a;\n\n\x016:a.cuh\x02int b;")

    assert lines == ["int a;", "", "int b;"]
    assert origins == ["a.cuh:4", "a.cuh:4", "a.cuh:6"]


def test_the_last_mark_of_a_line_counts() -> None:
    """Where one line was put together from two, the inner place is the one to edit."""
    lines, origins = split_marks("\x011:outer.cuh.j2\x02  \x019:inner.cuh\x02int a;")

    assert lines == ["  int a;"]
    assert origins == ["inner.cuh:9"]
