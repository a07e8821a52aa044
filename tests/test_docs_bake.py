"""The page about images shows the error that a server gets where a kernel is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.doc_shell import Session, Shells, of_any_cuda
from tests.doc_text import PAGES, blocks_of

PAGE = "docs/how-to/bake-an-image.md"

# What a call does before it needs a GPU.
CALL = (
    "import sys; from mlagen.engine import find_or_build; from mlagen.spec.text import parse_spec; "
    "find_or_build(parse_spec(sys.argv[1]))"
)


@pytest.mark.skipif("MLAGEN_ACCEPT" in os.environ, reason="the page is being written")
def test_the_miss_of_a_call_is_the_one_shown(tmp_path: Path) -> None:
    """Word for word but for the CUDA version, on the machine of the page that has no NVRTC."""
    (shown,) = (b.text for b in blocks_of(PAGES[PAGE].read_text("utf-8")) if b.language == "text")
    kernel = shown.split(": ")[1]

    call = Session("serve", f"'{sys.executable}' -S -c '{CALL}' '{kernel}'", [])
    *_, told, code = Shells(tmp_path).run(call)

    assert (of_any_cuda(told), code) == (of_any_cuda(shown.strip()), "[exit code 1]")
