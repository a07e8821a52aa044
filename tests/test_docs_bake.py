"""The page on images shows the error of a server without a kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.doc_shell import Session, Shells, of_any_cuda
from tests.doc_text import PAGES, blocks_of

PAGE = "docs/how-to/bake-an-image.md"

# The part of a call that needs no GPU.
CALL = (
    "import sys; from mlagen.engine import find_or_build; from mlagen.spec.text import parse_spec; "
    "find_or_build(parse_spec(sys.argv[1]))"
)


@pytest.mark.skipif("MLAGEN_ACCEPT" in os.environ, reason="the page is being written")
def test_the_miss_of_a_call_is_the_one_shown(tmp_path: Path) -> None:
    """The message is the page's but for the CUDA version, on its machine without NVRTC."""
    (shown,) = (b.text for b in blocks_of(PAGES[PAGE].read_text("utf-8")) if b.language == "text")
    kernel = shown.split(": ")[1]

    call = Session("serve", f"'{sys.executable}' -S -c '{CALL}' '{kernel}'", [])
    *_, printed, code = Shells(tmp_path).run(call)

    assert (of_any_cuda(printed), code) == (of_any_cuda(shown.strip()), "[exit code 1]")
