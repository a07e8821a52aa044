"""The `mlagen` command group, and the only place that maps exceptions to exit codes."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import IO, Any

import click

from mlagen import __version__
from mlagen.errors import MlagenError

from .commands.bench import bench
from .commands.cache import cache
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.kernel import kernel
from .commands.prewarm import prewarm
from .commands.replay import replay
from .commands.resources import resources
from .options.exit_codes import FAILED, INTERRUPTED, PIPE_CLOSED, exit_code_of
from .tools.interrupts import install_handlers, interruptible

# Raised by a group without a subcommand, and handled by printing its help; click 8.2 and later.
_NO_SUBCOMMAND = getattr(click.exceptions, "NoArgsIsHelpError", ())


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
            # The reader, such as `head`, has closed the pipe: nothing more may be flushed into it.
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            ctx.exit(PIPE_CLOSED)
        except OSError as error:
            # A file vanished or the disk filled up meanwhile; expected failures are MlagenErrors.
            where = f": {error.filename}" if error.filename else ""
            click.echo(f"mlagen: {error.strerror or error}{where}", err=True)
            ctx.exit(FAILED)


class _OneLineError(click.UsageError):
    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"mlagen: {self.message}", file=file, err=True)


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


@click.group(cls=_CatchingGroup, context_settings={"help_option_names": ["-h", "--help"]})
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


for command in (prewarm, cache, kernel, resources, doctor, demo, bench, replay):
    cli.add_command(command)


class _Stderr(FileIO):
    """Stderr that its reader may close, as `head` does: the work goes on without progress."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def main() -> None:
    """Run the command line of this process."""
    install_handlers()
    gc.set_threshold(100_000)  # thousands of listed kernels are live objects
    # torch warns of it in the middle of the output; no command uses NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if isinstance(sys.stderr, TextIOWrapper):
        stderr = BufferedWriter(_Stderr(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = TextIOWrapper(stderr, sys.stderr.encoding, line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # The path of a cache may hold characters that the locale cannot print.
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="mlagen")
