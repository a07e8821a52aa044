"""The process of the `mlagen` command, and of `python3 -m cache_tools`."""

from __future__ import annotations

from .interrupts import take_over


def main() -> None:
    """Run the command; Ctrl-C is taken over before the imports that take time."""
    take_over()
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
