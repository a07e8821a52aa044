"""Exit codes and their page."""

from __future__ import annotations

from cache_tools.options import exit_codes

from .conftest import ROOT


def test_every_exit_code_is_documented() -> None:
    """The page on the environment has a row for each code."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    codes = [value for name, value in vars(exit_codes).items() if name.isupper() and name[0] != "_"]

    missing = [code for code in codes if f"\n| {code} |" not in page]

    assert len(codes) == 8
    assert missing == []
