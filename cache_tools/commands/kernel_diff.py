"""`mlagen kernel diff`: differences of two kernels in spec, resources and code."""

from __future__ import annotations

import re
from difflib import unified_diff
from typing import Any

import click

from mlagen.errors import ArgumentError

from ..options.exit_codes import DONE, FAILED
from ..options.options import names
from ..output.report import count_text, json_option, print_json
from ..tools.completion import arch_names, complete_spec, completer
from ..tools.kernel_specs import arch_named, spec_named
from ..tools.kernel_view import KernelView, source_of

# Differs wherever an instruction before it does.
_OFFSET = re.compile(r"^(\s*)/\*[0-9a-f]{4,}\*/\s*", re.MULTILINE)
# Of the cache, not of the kernel.
_NO_FACTS = {"kernel", "spec", "key", "is_cached", "template", "includes"}
_ORDER = ("first", "second")


@click.command()
@click.argument("first", metavar="SPEC", shell_complete=complete_spec)
@click.argument("second", metavar="[SPEC]", required=False, shell_complete=complete_spec)
@click.option(
    "--arch",
    "archs",
    callback=names,
    metavar="ARCH[,ARCH]",
    shell_complete=completer(arch_names),
    help="Target of both kernels, or of the first and of the second.",
)
@click.option("--sass", is_flag=True, help="Compare the SASS, without offsets, not the source.")
@click.option(
    "--resources",
    is_flag=True,
    help="Compare counts of instructions by opcode, not the source.",
)
@json_option
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    *,
    first: str,
    second: str | None,
    archs: list[str] | None,
    sass: bool,
    resources: bool,
    as_json: bool,
) -> None:
    """Compare two kernels, or one SPEC on two targets.

    Prints a unified diff of spec, resources and source, and a summary. The exit code is 0 if there
    is no difference, else 1.
    """
    if sass and resources:
        raise click.UsageError("part: expected one, got --sass and --resources")
    pair = _views(first, second, archs or [])
    labels = [str(view.spec) for view in pair]
    facts = [_facts(view) for view in pair]
    texts = [
        {"family": view.spec.family} | view.spec.key_fields() | view.resource_texts()
        for view in pair
    ]
    part = "sass" if sass else "instructions" if resources else "source"
    of_facts = _diff([_lines(named) for named in texts], labels, "spec and resources")
    of_code = _diff([_code(view, part) for view in pair], labels, part)
    lines = [*of_facts, *of_code]
    removed, added = (sum(line.startswith(sign) for line in of_code[2:]) for sign in "-+")
    differing = [
        {"fact": name, "first": facts[0].get(name), "second": facts[1].get(name)}
        for name in {**facts[0], **facts[1]}
        if facts[0].get(name) != facts[1].get(name)
    ]
    if as_json:
        document = {name: view.document() for name, view in zip(_ORDER, pair, strict=True)}
        code = {"part": part, "removed": removed, "added": added}
        print_json({**document, "facts": differing, **code, "diff": lines})
    elif lines:
        click.echo("\n".join([*lines, ""]))
    changes = f"{part} {count_text(removed, 'line')} removed, {added} added"
    count = sum(texts[0].get(name) != texts[1].get(name) for name in {**texts[0], **texts[1]})
    summary = f"{count} in spec and resources, {changes}" if lines else "none"
    click.echo(f"differences: {summary}", err=as_json)
    ctx.exit(FAILED if lines else DONE)


def _views(first: str, second: str | None, archs: list[str]) -> list[KernelView]:
    """Return both kernels; the second SPEC is by default the first one, on the second target."""
    if len(archs) > 2:
        raise ArgumentError(f"arch: expected one or two, got {', '.join(archs)}")
    if second is None and len(archs) < 2:
        raise ArgumentError("spec: expected two, or --arch with two targets, got one")
    targets = [arch_named(arch) for arch in archs] or [None]
    specs = [spec_named(first, targets[0]), spec_named(second or first, targets[-1])]
    return [KernelView.of(spec) for spec in specs]


def _facts(view: KernelView) -> dict[str, Any]:
    document = view.document()
    facts = {name: value for name, value in document.items() if name not in _NO_FACTS}
    return {"family": facts.pop("family"), **document["spec"], **facts}


def _lines(facts: dict[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in facts.items()]


def _code(view: KernelView, part: str) -> list[str]:
    if part == "sass":
        return _OFFSET.sub(r"\1", view.sass()).splitlines()
    if part == "instructions":
        return sorted(_lines(view.opcodes() or {}))
    return source_of(view.spec).text.splitlines()


def _diff(texts: list[list[str]], labels: list[str], what: str) -> list[str]:
    """Return a unified diff; nothing if the texts are equal."""
    first, second = (f"{label} {what}" for label in labels)
    return list(unified_diff(texts[0], texts[1], first, second, lineterm=""))
