"""Entry point of the `mlagen` command and of `python3 -m cache_tools`."""

from __future__ import annotations

from .tools.interrupts import install_handlers
from .tools.streams import open_streams


def main() -> None:
    """Run the command; streams and Ctrl-C handler are in place before the slow imports."""
    open_streams()
    install_handlers()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
