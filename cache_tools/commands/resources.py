"""`mlagen resources`: registers, spills and shared memory of the cached kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from mlagen.cache.files import DamageError

from ..options.entry_options import (
    Choice,
    arch_option,
    family_option,
    layers_option,
    toolchain_option,
)
from ..options.exit_codes import FAILED
from ..output.report import (
    SHORT_KEY,
    count_text,
    json_option,
    kernel_columns,
    natural_order,
    print_json,
    print_table,
)
from ..tools.entries import manifest_fields

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry


@click.command()
@arch_option
@family_option
@toolchain_option
@layers_option
@click.option("--fail-on-spill", is_flag=True, help="Exit with 1 if a kernel spills registers.")
@json_option
@click.pass_context
def resources(
    ctx: click.Context,
    /,
    *,
    layers: bool,
    fail_on_spill: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """List registers, spills and memory of cached kernels.

    As ptxas reported them when it compiled the kernel; sizes are in bytes.
    """
    from mlagen.cache.default_store import kernel_store

    store, choice = kernel_store(), Choice(**chosen)
    kernels: list[dict[str, Any]] = []
    damaged = 0
    for stored in store.entries(layers=layers):
        if choice.matches(stored):
            try:
                kernels += _kernels_of(stored)
            except DamageError:
                damaged += 1
    kernels.sort(key=_by_name)
    spilling = sum(kernel["spill_bytes"] > 0 for kernel in kernels)
    if as_json:
        print_json(
            {
                "cache_dir": str(store.root),
                "kernels": kernels,
                "spilling": spilling,
                "damaged": damaged,
            }
        )
    elif kernels:
        print_table([_row(kernel) for kernel in kernels])
    suffix = f", {damaged} damaged" if damaged else ""
    text = f"{count_text(len(kernels), 'kernel')}, {spilling} with spills{suffix}, in {store.root}"
    click.echo(text, err=as_json)
    if spilling and fail_on_spill:
        ctx.exit(FAILED)


def _kernels_of(stored: StoredEntry) -> Iterator[dict[str, Any]]:
    fields = manifest_fields(stored)
    for kernel in fields["resources"]:
        spills = {name: kernel[name] for name in ("spill_store_bytes", "spill_load_bytes")}
        shared = {
            "static_shared_bytes": kernel["static_shared_bytes"],
            "dynamic_shared_bytes": fields["dynamic_shared_bytes"],
        }
        yield {
            "key": stored.key,
            "toolchain": stored.toolchain,
            "symbol": kernel["symbol"],
            "family": fields["family"],
            "spec": fields["spec"],
            "registers": kernel["registers"],
            "spill_bytes": sum(spills.values()),
            **spills,
            "stack_bytes": kernel["stack_bytes"],
            "shared_bytes": sum(shared.values()),
            **shared,
        }


def _row(kernel: Mapping[str, Any]) -> dict[str, Any]:
    columns = kernel_columns(kernel["family"], kernel["spec"])
    names = ("registers", "spill_bytes", "stack_bytes", "static_shared_bytes", "shared_bytes")
    return {
        "key": kernel["key"][:SHORT_KEY],
        **columns,
        **{name: kernel[name] for name in names},
    }


def _by_name(kernel: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    columns = kernel_columns(kernel["family"], kernel["spec"])
    return natural_order([*columns.values(), kernel["toolchain"], kernel["symbol"]])
