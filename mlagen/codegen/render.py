"""Spec to source."""

from __future__ import annotations

from mlagen.artifacts import Source
from mlagen.codegen.environment import environment
from mlagen.codegen.includes import Text, flatten
from mlagen.codegen.linemap import plain_text, split_marks, with_line_directives
from mlagen.codegen.sources import template_root
from mlagen.spec.kernel import KernelSpec


def render(spec: KernelSpec, *, line_info: bool = False) -> Source:
    """Return the CUDA source of ``spec``: one translation unit that includes nothing.

    With ``line_info``, ``#line`` directives name the lines of the templates.

    Raises
    ------
    CompileError
        If an ``#include`` of a template cannot be resolved.
    jinja2.UndefinedError
        If a template asks for a fact that the spec does not have.
    """
    text = flatten(template_root(), spec.folder, lambda name: rendered_file(name, spec))
    if line_info:
        text = with_line_directives(text, template_root())
    return Source(
        text="\n".join(text.lines) + "\n", origins=tuple(text.origins), line_info=line_info
    )


def rendered_file(name: str, spec: KernelSpec) -> Text:
    """Return one template as ``spec`` has it, with its ``#include`` lines."""
    if name.endswith(".j2"):
        return split_marks(environment().get_template(name).render(spec=spec))
    return plain_text((template_root() / name).read_text(encoding="utf-8"), name)
