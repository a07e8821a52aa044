"""Documentation: links, the API page and line format; `make docs` checks the site."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import mlagen
from mlagen import decode, errors, mla, ops, writers, xqa
from tests.doc_text import PAGES, ROOT, anchors_of, badly_broken_lines, links_of

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

FAULT = re.compile(
    r"^\| (\d+) \| .+ \| .+ \| (not covered.*|`[^`]+`(?:, `[^`]+`)*) \|$", re.MULTILINE
)


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


def documented_parameters(docstring: str) -> list[str]:
    """Return the names in the parameter section of a docstring."""
    section = re.split(r"^Parameters\n-+\n", docstring + "\n", flags=re.MULTILINE)[1:]
    lines = re.findall(r"^\S.*", re.split(r"\n\w+\n-+\n", "".join(section))[0], re.MULTILINE)
    return [name.strip("* ") for line in lines for name in line.partition(" :")[0].split(",")]


def test_documented_parameters_exist() -> None:
    """The parameters of a docstring are those of the signature."""
    unknown = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".py" or "Parameters\n" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                names = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
                shown = documented_parameters(ast.get_docstring(node) or "")
                unknown[f"{path}: {node.name}"] = set(shown) - names - {"..."}
    assert {name: found for name, found in unknown.items() if found} == {}


def api_names() -> list[str]:
    """Return the names whose docstrings the API page shows."""
    return re.findall(r"^::: (mlagen[\w.]+)$", text_of("docs/reference/api.md"), re.MULTILINE)


def test_documented_names_can_be_imported() -> None:
    """Functions and classes of the API page have docstrings, and links to their sources.

    A code host shows no docstrings on the page.
    """
    page = PAGES["docs/reference/api.md"]
    linked = {(page.parent / target).resolve() for target in links_of(page.read_text("utf-8"))}
    found = {name: pkgutil.resolve_name(name) for name in api_names()}
    sources = {name: sys.modules[what.__module__].__file__ for name, what in found.items()}
    assert len(found) >= 10
    assert {name for name, what in found.items() if what.__name__ != name.split(".")[-1]} == set()
    assert {name for name, what in found.items() if not inspect.getdoc(what)} == set()
    assert {name for name, path in sources.items() if Path(path or "") not in linked} == set()
    site = (ROOT / "docs/hooks.py").read_text("utf-8")  # which passes the sources to mkdocs
    paths = {Path(path or "").relative_to(ROOT) for path in sources.values()}
    assert {path for path in paths if f'"{path}"' not in site} == set()


def test_every_exception_has_a_section() -> None:
    """docs/reference/errors.md explains each exception and its fix, below the module's tree."""
    page = text_of("docs/reference/errors.md")
    tree = [line.strip() for line in (errors.__doc__ or "").splitlines() if "──" in line]
    assert "\n".join(tree).replace("``", "") in page
    assert [name for name in EXCEPTIONS if f"\n## `{name}`\n" not in page] == []


def test_every_public_name_is_on_the_api_page() -> None:
    """The API page has each public function and class, except exceptions."""
    shown = {pkgutil.resolve_name(name) for name in api_names()}
    public = {
        name: getattr(module, name)
        for module in (mlagen, mla, decode, xqa, ops, writers)
        for name in module.__all__
    }
    missing = {name for name, what in public.items() if callable(what) and what not in shown}
    assert missing - {*EXCEPTIONS} == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_line_of_prose_is_one_sentence(page: str) -> None:
    """Diffs of pages are diffs of sentences; shown output has no path of a real machine."""
    assert badly_broken_lines(text_of(page)) == []
    assert A_MACHINE.findall(text_of(page)) == []


def test_every_row_of_the_page_of_faults_names_tests() -> None:
    """Rows are numbered, each names tests that exist, and every file of fault tests occurs."""
    page = text_of("docs/explanation/faults.md")
    rows = FAULT.findall(page)
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    known = {
        (file, node.name)
        for file in {file for file, _ in named}
        if (ROOT / file).is_file()
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }

    assert [int(number) for number, _ in rows] == list(range(1, page.count("\n| ")))
    assert [name for name in named if name not in known] == []
    assert all("::test_" in tests or tests.startswith("not covered") for _, tests in rows)
    files = {f"tests/faults/{path.name}" for path in (ROOT / "tests/faults").glob("test_*.py")}
    assert files <= {file for file, _ in named}
