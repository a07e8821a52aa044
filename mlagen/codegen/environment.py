"""The one Jinja environment: strict, without globals, reading the template folder."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mlagen.codegen.linemap import LineMarks
from mlagen.codegen.sources import template_root


@cache
def environment() -> Environment:
    """Return the environment; a name that the context lacks is an error at render time."""
    jinja = Environment(
        loader=FileSystemLoader(template_root()),
        undefined=StrictUndefined,
        extensions=[LineMarks],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,  # a blank line after an include stays one
        autoescape=False,  # noqa: S701 - the output is CUDA, not a page
    )
    jinja.globals.clear()
    jinja.filters["c_bool"] = c_bool
    return jinja


def c_bool(value: bool) -> str:
    """Return a truth value as CUDA writes it."""
    return "true" if value else "false"
