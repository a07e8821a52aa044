"""Pages of the kernels: one form for all of them."""

from __future__ import annotations

import re

import pytest

from mlagen.spec.families import FAMILIES
from tests.doc_text import PAGES, blocks_of, without_blocks

KERNEL_PAGES = [
    page for page in PAGES if page.startswith("docs/explanation/") and page.endswith("-kernel.md")
]
DECODE_FAMILIES = FAMILIES.keys() - {"combine"}
HEADINGS = [
    "Regime",
    "Schedule",
    "Pipeline and barriers",
    "Combine",
    "Limits",
    "Rejected ideas",
]
MAX_LINES = 150


def text_of(page: str) -> str:
    """Return the text of a page."""
    return PAGES[page].read_text(encoding="utf-8")


def test_every_decode_kernel_has_a_page() -> None:
    """The pages of kernels are those of the decode families, one each."""
    names = {f"docs/explanation/{family.replace('_', '-')}-kernel.md" for family in DECODE_FAMILIES}

    assert set(KERNEL_PAGES) == names


@pytest.mark.parametrize("page", KERNEL_PAGES)
def test_kernel_pages_have_the_same_sections(page: str) -> None:
    """A reader finds the same sections in the same order on the page of every kernel."""
    text = without_blocks(text_of(page))

    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("page", KERNEL_PAGES)
def test_kernel_pages_are_short(page: str) -> None:
    """The page of a kernel is read in one sitting."""
    assert len(text_of(page).splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", KERNEL_PAGES)
def test_kernel_pages_have_a_diagram(page: str) -> None:
    """The schedule of every kernel is drawn: a Mermaid block, or an image of `docs/images`."""
    text = text_of(page)
    has_mermaid = any(block.language == "mermaid" for block in blocks_of(text))

    assert has_mermaid or re.search(r"!\[[^\]]*\]\(\.\./images/[\w-]+\.svg\)", text)
