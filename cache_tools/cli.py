"""The `mlagen` command group, and the one place that turns exceptions into exit codes."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import IO, Any

import click

from mlagen import __version__
from mlagen.errors import MlagenError

from .commands.bench import bench
from .commands.cache import cache
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.prewarm import prewarm
from .commands.resources import resources
from .exit_codes import FAILED, INTERRUPTED, PIPE_CLOSED, exit_code_of
from .interrupts import interruptible, take_over

# What a group raises that is called alone, and is answered with its help; not before click 8.2.
_ALONE = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _CatchingGroup(click.Group):
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _usage_in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> None:
        try:
            with interruptible(), _usage_in_one_line():
                super().invoke(ctx)
        except MlagenError as error:
            click.echo(f"mlagen: {error}", err=True)
            ctx.exit(exit_code_of(error))
        except (KeyboardInterrupt, click.Abort) as interrupt:
            words = filter(None, ("mlagen: interrupted", str(interrupt)))
            click.echo(", ".join(words), err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            # Whoever reads has enough, as `head` has; what is left must not be flushed into it.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            ctx.exit(PIPE_CLOSED)
        except OSError as error:
            # Of a file that went or a disk that filled up meanwhile: what is expected to fail is
            # a MlagenError.
            where = f": {error.filename}" if error.filename else ""
            click.echo(f"mlagen: {error.strerror or error}{where}", err=True)
            ctx.exit(FAILED)


class _OneLineError(click.UsageError):
    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"mlagen: {self.message}", file=file, err=True)


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """Say what is wrong with a command line as all else is said, and where to read what is not."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, (_OneLineError, _ALONE)):
            raise
        told = error.format_message().rstrip(".")
        if isinstance(error, click.BadParameter) and error.param and "expected" in error.message:
            told = f"{max(error.param.opts, key=len).lstrip('-')}: {error.message}"
        command = error.ctx.command_path if error.ctx else "mlagen"
        raise _OneLineError(f"{told}; see: {command} --help") from error


@click.group(cls=_CatchingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlagen", message="%(prog)s %(version)s")
def cli() -> None:
    """Compile attention kernels ahead of time, and look after their cache.

    Each command takes --json: one JSON document on stdout, and text for people on stderr.
    """


for command in (prewarm, cache, resources, doctor, demo, bench):
    cli.add_command(command)


def main() -> None:
    """Run the command of this process."""
    take_over()
    gc.set_threshold(100_000)  # a list of thousands of kernels is no garbage
    # Of torch, in the middle of the output; no command uses NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # The path of a cache may hold what the locale cannot print.
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="mlagen")
