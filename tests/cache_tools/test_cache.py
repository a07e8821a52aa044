"""`mlagen cache`: the group has its verbs."""

from __future__ import annotations

from cache_tools.commands.cache import cache


def test_the_verbs_are_these() -> None:
    """Each verb has a command."""
    assert " ".join(cache.commands) == (
        "dir ls stats show why explain verify prune gc rm clear export import push pull"
    )
