"""`mlagen kernel`: source, PTX, SASS and resources of a kernel, without a call."""

from __future__ import annotations

from typing import Any

import click

from ..output.report import count_text, json_option, print_facts, print_json
from ..tools.completion import arch_names, complete_spec, completer
from ..tools.kernel_specs import arch_named, spec_named
from ..tools.kernel_view import KernelView, includes_of, ptx_of, source_of

_PARTS = ("source", "ptx", "sass", "resources", "includes")


@click.command()
@click.argument("spec", shell_complete=complete_spec)
@click.option("--source", is_flag=True, help="Print the CUDA source; compiles nothing.")
@click.option("--ptx", is_flag=True, help="Print the PTX.")
@click.option("--sass", is_flag=True, help="Print the SASS, by nvdisasm.")
@click.option(
    "--resources", is_flag=True, help="Print resources, and counts of instructions by opcode."
)
@click.option("--includes", is_flag=True, help="Print the included templates; compiles nothing.")
@click.option(
    "--arch",
    metavar="ARCH",
    shell_complete=completer(arch_names),
    help="Target; default: that of SPEC, of the GPU, or sm_90a.",
)
@json_option
def show(*, spec: str, arch: str | None, as_json: bool, **parts: bool) -> None:
    """Show the kernel SPEC.

    A cached kernel is read, another one is compiled; the cache is not changed. Without an option,
    prints a summary. `mlagen cache show KEY` has the log and provenance of a cached kernel.
    """
    chosen = [name for name in _PARTS if parts[name]]
    if len(chosen) > 1:
        raise click.UsageError(f"part: expected one, got --{' and --'.join(chosen)}")
    part = chosen[0] if chosen else None
    kernel = spec_named(spec, arch_named(arch))
    if part == "includes" and not as_json:
        click.echo("\n".join(includes_of(kernel)))
        return
    if part in {"source", "ptx"} and not as_json:
        click.echo(source_of(kernel).text if part == "source" else ptx_of(kernel), nl=False)
        return
    view = KernelView.of(kernel)
    if part == "sass" and not as_json:
        click.echo(view.sass(), nl=False)
    elif as_json:
        print_json(view.document() | _part(view, part))
    elif part == "resources":
        print_facts(_resources(view))
    else:
        print_facts(_summary(view))


def _part(view: KernelView, part: str | None) -> dict[str, Any]:
    if part == "source":
        return {"source": source_of(view.spec).text}
    if part == "ptx":
        return {"ptx": ptx_of(view.spec)}
    if part == "sass":
        return {"sass": view.sass()}
    return {"instructions": view.opcodes()} if part == "resources" else {}


def _summary(view: KernelView) -> dict[str, Any]:
    document = view.document()
    return {
        "kernel": document["kernel"],
        "key": f"{document['key']}, {'cached' if document['is_cached'] else 'not cached'}",
        **view.resource_texts(),
        "template": document["template"],
        "includes": f"{count_text(len(document['includes']), 'template')}, see --includes",
    }


def _resources(view: KernelView) -> dict[str, Any]:
    facts: dict[str, Any] = view.resource_texts()
    if opcodes := view.opcodes():
        facts |= {"instructions": sum(opcodes.values())}
        facts |= {f"  {name}": count for name, count in opcodes.items()}
    return facts


@click.group()
def kernel() -> None:
    """Show a kernel, without a call and without a GPU.

    SPEC is a kernel as in messages, logs and the output of other commands, such as
    'combine_states(arch=sm_90a, dtype=bf16, head_dim_vo=512)'. Names may be left out: `mla_sm90`
    and 'mla_sm90(block_m=16)' are kernels with default values otherwise.
    """


kernel.add_command(show)
