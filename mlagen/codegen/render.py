"""Spec to source."""

from __future__ import annotations

from mlagen.artifacts import Source
from mlagen.codegen.environment import environment
from mlagen.codegen.linemap import split_marks
from mlagen.spec.kernel import KernelSpec


def render(spec: KernelSpec) -> Source:
    """Return the CUDA source of ``spec``: one translation unit that includes nothing.

    Raises
    ------
    jinja2.UndefinedError
        If a template asks for a fact that the spec does not have.
    """
    rendered = environment().get_template(spec.template).render(spec=spec)
    text, origins = split_marks(rendered.rstrip("\n") + "\n")
    return Source(text=text, origins=origins[:-1])
