"""Entry point of the `mlagen` command and of `python3 -m cache_tools`."""

from __future__ import annotations

from .tools.interrupts import install_handlers


def main() -> None:
    """Run the command; the Ctrl-C handler is installed before the slow imports."""
    install_handlers()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
