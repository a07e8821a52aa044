"""`mlagen cache`: the subcommands of the group."""

from __future__ import annotations

from cache_tools.commands.cache import cache


def test_the_subcommands_are_these() -> None:
    """The group has exactly the documented subcommands."""
    assert " ".join(cache.commands) == (
        "dir ls stats show why explain verify prune gc rm clear export import push pull"
    )
