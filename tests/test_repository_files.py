"""Files for the forge, for tools and for readers: workflow, forms, lengths of modules, pages."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import tokenize
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen.spec.families import FAMILIES
from tests.doc_text import PAGES, blocks_of, without_blocks
from tests.test_docs_examples import problem_with

ROOT = Path(__file__).resolve().parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FILES = [*FORMS, ROOT / ".github" / "pull_request_template.md", ROOT / "SECURITY.md"]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
KERNEL_PAGES = {
    page: path.read_text(encoding="utf-8")
    for page, path in PAGES.items()
    if re.fullmatch(r"docs/explanation/[\w-]+-kernel\.md", page)
}
SECTIONS = "Regime, Schedule, Pipeline and barriers, Combine, Limits, Rejected ideas"


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file."""
    yaml = pytest.importorskip("yaml", reason=f"{path.name} needs pip install 'mlagen[test]'")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def code_lines(text: str) -> int:
    """Return the number of lines without blank lines, comments and docstrings."""
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT}
        and token.string.strip()
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            if first is not None and first.end_lineno is not None:
                lines -= set(range(first.lineno, first.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "tests/gpu").glob("test_*.py")), ids=lambda file: file.stem
)
def test_the_tests_of_a_gpu_can_be_imported(file: Path) -> None:
    """Runs of the CPU tests do not collect them."""
    runpy.run_path(str(file))


def test_only_code_counts() -> None:
    """Blank lines, comments and docstrings do not, a string over three lines does."""
    text = '''"""A module."""

def f():
    """Return a text.

    It has three lines.
    """
    # A comment.
    return """
a
"""
'''
    assert code_lines(text) == 4


def test_no_module_is_too_long() -> None:
    """A module of the package or of the command has 400 lines of code at most."""
    modules = [
        path for folder in ("mlagen", "cache_tools") for path in (ROOT / folder).rglob("*.py")
    ]
    texts = {str(path): path.read_text(encoding="utf-8") for path in modules}
    long = {path: code_lines(text) for path, text in texts.items() if text.count("\n") > 400}
    assert {path: lines for path, lines in long.items() if lines > 400} == {}


@pytest.mark.parametrize("page", FILES, ids=lambda path: path.name)
def test_commands_and_variables_that_a_form_names_exist(page: Path) -> None:
    """A command or variable in backticks is one of mlagen, of the Makefile or of pytest."""
    text = page.read_text(encoding="utf-8")
    code = [word.removeprefix("MLAGEN_ACCEPT=1 ") for word in re.findall(r"`([^`]+)`", text)]
    commands = [word for word in code if word.startswith(("mlagen ", "make ", "python3 -m pytest"))]
    environment = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    variables = {name for word in code for name in re.findall(r"\bMLAGEN_[A-Z_]+", word)}

    problems = {command: problem_with(shlex.split(command)) for command in commands}

    assert {command: problem for command, problem in problems.items() if problem} == {}
    assert {name for name in variables if f"`{name}`" not in environment} == set()


def test_the_workflow_runs_the_jobs_of_the_checkout() -> None:
    """Each command of the workflow is a script or a Makefile target of the checkout."""
    job = read_yaml(WORKFLOW)["jobs"]["job"]
    commands = [shlex.split(command) for command in job["strategy"]["matrix"]["command"]]

    assert [".ci/run"] in commands
    assert [
        command
        for command in commands
        if not (ROOT / command[0]).is_file() and problem_with(command)
    ] == []


def test_the_citation_is_that_of_the_package() -> None:
    """CITATION.cff has the version of the package."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")

    assert f"\nversion: {mlagen.__version__}\n" in text


def test_every_decode_kernel_has_a_page() -> None:
    """The pages of kernels are those of the decode families, one each."""
    families = {
        family.replace("_", "-")
        for family in FAMILIES.keys() - {"combine", "combine_states", "write_rows"}
    }

    assert KERNEL_PAGES.keys() == {f"docs/explanation/{name}-kernel.md" for name in families}


@pytest.mark.parametrize("text", KERNEL_PAGES.values(), ids=KERNEL_PAGES)
def test_kernel_pages_have_one_form(text: str) -> None:
    """A page has the sections in order, a diagram of the schedule, and at most 150 lines."""
    has_mermaid = any(block.language == "mermaid" for block in blocks_of(text))

    assert re.findall(r"^## (.+)$", without_blocks(text), re.MULTILINE) == SECTIONS.split(", ")
    assert has_mermaid or re.search(r"!\[[^\]]*\]\(\.\./images/[\w-]+\.svg\)", text)
    assert len(text.splitlines()) <= 150
