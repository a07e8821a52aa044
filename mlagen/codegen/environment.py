"""The one Jinja environment: strict, without globals, reading the template folder."""

from __future__ import annotations

from functools import cache
from typing import NoReturn

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateRuntimeError

from mlagen.codegen.linemap import LineMarks
from mlagen.codegen.sources import template_root


class _OneFile(Environment):
    """Renders one file at a time: the key of a kernel would miss what Jinja takes from others."""

    def join_path(self, template: str, parent: str) -> NoReturn:
        """Reject the name of another template: every include, import and extends comes by here."""
        raise TemplateRuntimeError(
            f'{parent}: expected #include "{template}", got a Jinja tag for another file'
        )


@cache
def environment() -> Environment:
    """Return the environment; a name that the context lacks is an error at render time."""
    jinja = _OneFile(
        loader=FileSystemLoader(template_root()),
        undefined=StrictUndefined,
        extensions=[LineMarks],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is CUDA, not a page
    )
    jinja.globals.clear()
    jinja.filters["c_bool"] = c_bool
    return jinja


def c_bool(value: bool) -> str:
    """Return a truth value as CUDA writes it."""
    return "true" if value else "false"
