"""The one Jinja environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import TemplateRuntimeError, UndefinedError

from mlagen.codegen.environment import environment
from mlagen.codegen.linemap import split_marks


def render(text: str, templates: Path, **context: object) -> str:
    """Return a template's text rendered as a kernel's would be."""
    (templates / "probe.cuh.j2").write_text(text)
    lines, _ = split_marks(environment().get_template("probe.cuh.j2").render(**context))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    ["{{ spec.page_sise }}", "{{ page_size }}", "{% if spec.hopper %}x{% endif %}"],
    ids=["a field the spec lacks", "a name the context lacks", "a field in a condition"],
)
def test_an_unknown_name_is_an_error(text: str, templates: Path) -> None:
    """Nothing renders as a silent blank."""
    with pytest.raises(UndefinedError):
        render(text, templates, spec=object())


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
        render(tag, templates)
