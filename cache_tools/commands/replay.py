"""`mlagen replay`: run the call of a dump again, and compare it with the CPU backend."""

from __future__ import annotations

from pathlib import Path

import click

from ..options.exit_codes import DONE, FAILED, UNSUPPORTED
from ..output.report import json_option, print_facts, print_json


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def replay(ctx: click.Context, /, *, file: Path, as_json: bool) -> None:
    """Run the call of a dump again.

    FILE is a .json file of MLAGEN_DUMP with MLAGEN_DUMP_TENSORS=1, whose contents are in the
    .safetensors file beside it. The result is compared with the CPU backend. Without a GPU the call
    runs on CPU tensors, and nothing is compared.

    Exits with 1 if the call raises, or if its result is wrong, and with 3 if a call of a GPU
    returns without one.
    """
    from ..replay.dump import read_dump
    from ..replay.run import NOTHING_COMPARED, document_of, summary_of
    from ..replay.run import replay as replay_call

    dump = read_dump(file)
    outcome = replay_call(dump)
    if as_json:
        print_json(document_of(dump, outcome))
    else:
        print_facts(summary_of(dump, outcome))
    if outcome.is_right is None:
        click.echo(NOTHING_COMPARED, err=as_json)
        ctx.exit(UNSUPPORTED)
    ctx.exit(DONE if outcome.is_right else FAILED)
