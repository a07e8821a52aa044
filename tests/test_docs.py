"""Documentation: links, generated pages, the site, and line format."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import mlagen
from mlagen import decode, errors, mla, ops, xqa
from tests.doc_support import support_page
from tests.doc_text import PAGES, ROOT, anchors_of, badly_broken_lines, links_of

GENERATED = {"docs/reference/support.md": support_page}

EXCEPTIONS = [
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.MlagenError)
]

SOURCES = [
    path
    for folder in ("mlagen", "cache_tools", "templates", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cuh", ".j2"}
]

# Home and work folders of a real machine; examples use fictitious names.
A_MACHINE = re.compile(r"(?<![\w~.])/(?:home|root|Users|work|tmp)/\S+")


def text_of(page: str) -> str:
    """Return the text of a page."""
    return PAGES[page].read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_resolves(page: str) -> None:
    """A link within the project names an existing file and heading."""
    broken = []
    for target in links_of(text_of(page)):
        name, _, anchor = target.partition("#")
        path = (PAGES[page].parent / name).resolve() if name else PAGES[page]
        if not path.exists() or (anchor and anchor not in anchors_of(path.read_text("utf-8"))):
            broken.append(target)

    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    """Links lead from the README to every page."""
    seen, left = set(), ["README.md"]
    while left:
        page = left.pop()
        seen.add(page)
        for target in links_of(text_of(page)):
            path = (PAGES[page].parent / target.partition("#")[0]).resolve()
            name = str(path.relative_to(ROOT))
            if name in PAGES and name not in seen:
                left.append(name)

    assert PAGES.keys() - seen == set()


def test_no_page_is_longer_than_a_reader_bears() -> None:
    """A page has 400 lines at most, but the generated reference of commands."""
    lengths = {page: len(text_of(page).splitlines()) for page in PAGES}

    assert {page for page, lines in lengths.items() if lines > 400} <= {"docs/reference/cli.md"}


def test_every_page_that_code_names_exists() -> None:
    """A page that a comment or message names exists."""
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in SOURCES
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }

    assert {(path, page) for path, page in named if page not in PAGES} == set()


@pytest.mark.parametrize("page", GENERATED)
def test_generated_pages_are_up_to_date(page: str) -> None:
    """A generated page equals its generator's output; MLAGEN_ACCEPT=1 renews it."""
    expected = GENERATED[page]()
    if os.environ.get("MLAGEN_ACCEPT"):
        (ROOT / page).write_text(expected, encoding="utf-8")

    written = (ROOT / page).read_text(encoding="utf-8")

    assert written == expected, "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs.py"


def api_names() -> list[str]:
    """Return the names whose docstrings the API page shows."""
    return re.findall(r"^::: (mlagen[\w.]+)$", text_of("docs/reference/api.md"), re.MULTILINE)


def test_documented_names_can_be_imported() -> None:
    """Functions and classes of the API page can be imported by their names, and have docstrings."""
    found = {name: pkgutil.resolve_name(name) for name in api_names()}

    assert len(found) >= 10
    assert {name for name, what in found.items() if what.__name__ != name.split(".")[-1]} == set()
    assert {name for name, what in found.items() if not inspect.getdoc(what)} == set()


def test_the_api_page_links_to_the_source_of_every_name() -> None:
    """A code host shows no docstrings on the page, so a link leads to each of them."""
    page = PAGES["docs/reference/api.md"]
    linked = {(page.parent / target).resolve() for target in links_of(page.read_text("utf-8"))}

    functions = {name: inspect.unwrap(pkgutil.resolve_name(name)) for name in api_names()}
    found = {name: inspect.getsourcefile(function) for name, function in functions.items()}

    assert {name for name, path in found.items() if Path(path or "") not in linked} == set()


@pytest.mark.parametrize("module", [mlagen, mla, decode, xqa, ops], ids=lambda m: m.__name__)
def test_every_public_name_is_on_the_api_page(module: ModuleType) -> None:
    """The API page has each public function and class, except exceptions."""
    public = {name: getattr(module, name) for name in module.__all__}
    shown = {pkgutil.resolve_name(name) for name in api_names()}

    missing = {
        name
        for name, what in public.items()
        if callable(what) and what not in shown and name not in EXCEPTIONS
    }

    assert missing == set()


def test_the_site_lists_every_page_once() -> None:
    """The navigation of mkdocs.yml has each page once, and no other."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- .+: (\S+\.md)$", nav.partition("\n\n")[0], re.MULTILINE)

    assert sorted(listed) == sorted(PAGES)


def test_the_site_has_every_file_that_pages_link_to() -> None:
    """A link that works in a checkout works in the site: docs/hooks.py takes its target in."""
    hooks = ast.parse((ROOT / "docs" / "hooks.py").read_text(encoding="utf-8"))
    (patterns,) = (
        ast.literal_eval(node.value)
        for node in hooks.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SHOWN"
    )
    shown = {path for pattern in patterns for path in ROOT.glob(pattern)}

    linked = {
        (PAGES[page].parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in links_of(text_of(page))
        if not target.startswith("#")
    }

    assert linked
    assert {str(path.relative_to(ROOT)) for path in linked - shown} == set()


@pytest.mark.parametrize("exception", EXCEPTIONS)
def test_every_exception_has_a_section(exception: str) -> None:
    """docs/reference/errors.md explains each exception and its fix."""
    assert f"\n## `{exception}`\n" in text_of("docs/reference/errors.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_line_of_prose_is_one_sentence(page: str) -> None:
    """Diffs of pages are diffs of sentences."""
    assert badly_broken_lines(text_of(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_folder_of_a_machine(page: str) -> None:
    """Shown output has no path of a real machine."""
    assert A_MACHINE.findall(text_of(page)) == []
