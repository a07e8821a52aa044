"""Files for the forge and for tools: workflow, issue forms, citation and security policy."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import mlagen
from tests.test_docs_examples import problem_with

ROOT = Path(__file__).resolve().parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
QUESTIONS = [form for form in FORMS if form.name != "config.yml"]
PAGES = [*FORMS, ROOT / ".github" / "pull_request_template.md", ROOT / "SECURITY.md"]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file."""
    yaml = pytest.importorskip("yaml", reason=f"{path.name} needs pip install 'mlagen[test]'")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
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


@pytest.mark.parametrize("form", QUESTIONS, ids=lambda path: path.name)
def test_an_issue_form_is_valid(form: Path) -> None:
    """A form has a name, a description and questions with labels and distinct ids."""
    content = read_yaml(form)

    assert content["name"]
    assert content["description"]
    questions = content["body"]
    assert {question["type"] for question in questions} == {"textarea"}
    assert all(question["attributes"]["label"] for question in questions)
    assert len({question["id"] for question in questions}) == len(questions)


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
    """CITATION.cff has the required keys, and the version, licence and name of the package."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    keys = dict(re.findall(r"^([\w-]+):(?: (.+))?$", text, re.MULTILINE))

    assert {"cff-version", "message", "title", "authors"} <= keys.keys()
    assert (keys["title"], keys["version"]) == ("mlagen", mlagen.__version__)
    assert f'\nlicense = "{keys["license"]}"\n' in project
    assert re.findall(r"- name: (.+)", text) == re.findall(
        r'authors = \[{ name = "(.+?)" }', project
    )
