"""The `mlagen` command group, and the only place that maps exceptions to exit codes."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click
from click.exceptions import Exit

from mlagen import __version__
from mlagen.errors import MlagenError
from mlagen.logs import visible

from .commands.bench import bench
from .commands.cache import cache
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.kernel import kernel
from .commands.models import models
from .commands.prewarm import prewarm
from .commands.replay import replay
from .options.exit_codes import FAILED, INTERRUPTED, PIPE_CLOSED, exit_code_of
from .tools.interrupts import install_handlers, interruptible
from .tools.streams import visible_streams

# Raised by a group without a subcommand, and handled by printing its help; click 8.2 and later.
_NO_SUBCOMMAND = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _CatchingGroup(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        with visible_streams():
            return super().main(*args, **kwargs)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _exit_codes(), _usage_in_one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> None:
        with _exit_codes(), interruptible(), _usage_in_one_line():
            super().invoke(ctx)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Exit with the code of an exception, after one line."""
    try:
        yield
    except MlagenError as error:
        click.echo(f"mlagen: {error}", err=True)
        raise Exit(exit_code_of(error)) from error
    except (KeyboardInterrupt, click.Abort) as interrupt:
        words = filter(None, ("mlagen: interrupted", str(interrupt)))
        click.echo(", ".join(words), err=True)
        raise Exit(INTERRUPTED) from interrupt
    except BrokenPipeError as error:
        # The reader, such as `head`, has closed the pipe: nothing more may be flushed into it.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        raise Exit(PIPE_CLOSED) from error
    except OSError as error:
        # A file vanished or the disk filled up meanwhile; expected failures are MlagenErrors.
        where = f": {error.filename}" if error.filename else ""
        _print_error(f"{error.strerror or error}{where}")
        raise Exit(FAILED) from error


def _print_error(message: str, file: IO[Any] | None = None) -> None:
    click.echo(f"mlagen: {visible(message, kept='')}", file=file, err=True)


class _OneLineError(click.UsageError):
    def show(self, file: IO[Any] | None = None) -> None:
        _print_error(self.message, file)


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """Report a usage error on one line, as any other error, with a pointer to --help."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, (_OneLineError, _NO_SUBCOMMAND)):
            raise
        message = error.format_message().rstrip(".")
        if isinstance(error, click.BadParameter) and error.param and "expected" in error.message:
            message = f"{max(error.param.opts, key=len).lstrip('-')}: {error.message}"
        command = error.ctx.command_path if error.ctx else "mlagen"
        raise _OneLineError(f"{message}; see: {command} --help") from error


def _set_cache_dir(_ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value == "":
        raise click.BadParameter("expected a folder, got ''")
    _set_variable("MLAGEN_CACHE_DIR", value)


def _set_log_level(_ctx: click.Context, _param: click.Parameter, count: int) -> None:
    _set_variable("MLAGEN_LOG", ("", "info", "debug")[min(count, 2)])


def _set_variable(name: str, value: str | None) -> None:
    """Set a variable of this process and its children, before the settings are read."""
    if value:
        from mlagen.settings import current_settings

        os.environ[name] = value
        current_settings.cache_clear()


# Of colors, or click deletes their escape sequences from a text, instead of showing them.
_CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "color": True}


@click.group(cls=_CatchingGroup, context_settings=_CONTEXT)
@click.option(
    "--cache-dir",
    metavar="DIR",
    type=click.Path(file_okay=False),
    expose_value=False,
    callback=_set_cache_dir,
    help="Cache folder, in place of MLAGEN_CACHE_DIR.",
)
@click.option(
    "-v",
    "--verbose",
    count=True,
    expose_value=False,
    callback=_set_log_level,
    help="Log to stderr, as with MLAGEN_LOG=info; -vv: debug.",
)
@click.version_option(__version__, prog_name="mlagen", message="%(prog)s %(version)s")
def cli() -> None:
    """Compile, inspect, benchmark and cache attention kernels.

    Each command accepts --json: one JSON document on stdout, human-readable text on stderr.
    """


for command in (prewarm, models, cache, kernel, doctor, demo, bench, replay):
    cli.add_command(command)


def main() -> None:
    """Run the command line of this process."""
    install_handlers()
    gc.set_threshold(100_000)  # thousands of listed kernels are live objects
    # torch warns of it in the middle of the output; no command uses NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    cli(prog_name="mlagen")
