"""Calls that are rejected: rows of a broken argument, and the check of its error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from mlagen.errors import ArgumentError, UnsupportedError

# An argument that is wrong, its value or several changes, and the message after its name.
Row = tuple[str, Any, str]

_UNSUPPORTED = re.compile("not implemented|no (sparse )?[A-Z]+ decode kernel|Profiler|'bmm-tensor'")


@contextmanager
def rejects(message: str) -> Iterator[None]:
    """Fail unless the block raises an error with this message, where "..." is any text."""
    error = UnsupportedError if _UNSUPPORTED.search(message) else ArgumentError
    text = ".*".join(map(re.escape, message.split("...")))
    with pytest.raises(error, match=rf"^{text}\Z"):
        yield


def rejections(rows: list[Row]) -> pytest.MarkDecorator:
    """Return the parametrisation of a test by changes of arguments, and their messages."""
    return pytest.mark.parametrize(("changes", "message"), [_param(row) for row in rows])


def rejections_of(rows: Mapping[str, list[Row]]) -> pytest.MarkDecorator:
    """Return the parametrisation of a test by calls, changes of their arguments, and messages."""
    params = [_param(row, call) for call, of_call in rows.items() for row in of_call]
    return pytest.mark.parametrize(("call", "changes", "message"), params)


def _param(row: Row, *call: str) -> Any:
    argument, changes, rest = row
    given = changes if isinstance(changes, dict) else {argument: changes}
    rule = re.split("[:,]? expected|[.]{3}", argument + rest)[0]
    return pytest.param(*call, given, argument + rest, id=": ".join((*call, rule)))
