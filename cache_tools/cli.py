"""The `mlagen` command group, and the one place that turns exceptions into exit codes."""

from __future__ import annotations

import click

from mlagen import __version__
from mlagen.errors import MlagenError

from .commands.bench import bench
from .commands.cache import cache
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.prewarm import prewarm
from .exit_codes import INTERRUPTED, exit_code_of


class _CatchingGroup(click.Group):
    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
        except MlagenError as error:
            click.echo(f"mlagen: {error}", err=True)
            ctx.exit(exit_code_of(error))
        except (KeyboardInterrupt, click.Abort):
            click.echo("mlagen: interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_CatchingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlagen", message="%(prog)s %(version)s")
def cli() -> None:
    """Compile attention kernels ahead of time, and look after their cache.

    Each command takes --json: one JSON document on stdout, and text for people on stderr.
    """


for command in (prewarm, cache, doctor, demo, bench):
    cli.add_command(command)


def main() -> None:
    """Run the command of this process."""
    cli(prog_name="mlagen")
