"""Pages of the kernels: one for each decode family, in one form."""

from __future__ import annotations

import re

import pytest

from mlagen.spec.families import FAMILIES
from tests.doc_text import PAGES, blocks_of, without_blocks

KERNEL_PAGES = {
    page: path.read_text(encoding="utf-8")
    for page, path in PAGES.items()
    if re.fullmatch(r"docs/explanation/[\w-]+-kernel\.md", page)
}
SECTIONS = "Regime, Schedule, Pipeline and barriers, Combine, Limits, Rejected ideas"


def test_every_decode_kernel_has_a_page() -> None:
    """The pages of kernels are those of the decode families, one each."""
    families = {
        family.replace("_", "-") for family in FAMILIES.keys() - {"combine", "combine_states"}
    }

    assert KERNEL_PAGES.keys() == {f"docs/explanation/{name}-kernel.md" for name in families}


@pytest.mark.parametrize("text", KERNEL_PAGES.values(), ids=KERNEL_PAGES)
def test_kernel_pages_have_one_form(text: str) -> None:
    """A page has the sections in order, a diagram of the schedule, and at most 150 lines."""
    has_mermaid = any(block.language == "mermaid" for block in blocks_of(text))

    assert re.findall(r"^## (.+)$", without_blocks(text), re.MULTILINE) == SECTIONS.split(", ")
    assert has_mermaid or re.search(r"!\[[^\]]*\]\(\.\./images/[\w-]+\.svg\)", text)
    assert len(text.splitlines()) <= 150
