"""Examples of the documentation run, and print the lines of their comments."""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib.util import find_spec
from itertools import dropwhile, takewhile
from typing import Any

import click
import pytest
import torch

from cache_tools.cli import cli
from cache_tools.tools.kernel_specs import spec_named
from mlagen.errors import ArgumentError
from mlagen.integrations import sglang, vllm
from mlagen.spec.text import parse_spec
from tests.doc_text import PAGES, ROOT, blocks_of, pages_with
from tests.programs import run_program

NEEDS_A_GPU = "# needs a GPU\n"
_CACHES = ("MLAGEN_CACHE_DIR", "MLAGEN_CACHE_RO")

BLOCKS = {page: blocks_of(path.read_text(encoding="utf-8")) for page, path in PAGES.items()}


def python_of(page: str, *, with_gpu: bool) -> str:
    """Return the Python blocks of a page as one program, with or without those for a GPU."""
    texts = [block.text for block in BLOCKS[page] if block.language == "python"]
    return "\n".join(text for text in texts if with_gpu or not text.startswith(NEEDS_A_GPU))


def require_output(program: str, **changes: str) -> None:
    """Run a program in a process of its own; it prints the lines of the comments on its prints."""
    if "from transformers import" in program and find_spec("transformers") is None:
        pytest.skip("needs transformers")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **changes}
    command = [sys.executable, "-c", program]
    run = run_program(command, cwd=ROOT, env=environ)
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"^ *print\(.*\)  # (.+)$", program, re.MULTILINE)
    assert [line for line in promised if line not in run.stdout.splitlines()] == []


EXAMPLES = pages_with("python")


@pytest.mark.parametrize("page", [page for page in EXAMPLES if python_of(page, with_gpu=False)])
def test_python_examples_run_on_the_cpu(page: str) -> None:
    """The Python blocks of a page run as one program, and print the lines of their comments."""
    require_output(python_of(page, with_gpu=False), CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("page", EXAMPLES)
def test_python_examples_run_on_a_gpu(page: str) -> None:
    """On a GPU all blocks of a page run, those that need one too."""
    require_output(python_of(page, with_gpu=True))


def test_examples_for_a_gpu_are_python() -> None:
    """Blocks for a GPU compile as Python."""
    for page in EXAMPLES:
        compile(python_of(page, with_gpu=True), page, "exec")


def commands_of(page: str) -> list[list[str]]:
    """Return the commands of the shell blocks of a page: no comments, variables, redirections."""
    texts = [block.text.replace("\\\n", " ") for block in BLOCKS[page] if block.language == "sh"]
    lines = [shlex.split(line, comments=True) for text in texts for line in text.splitlines()]
    commands = [dropwhile(lambda word: "=" in word, line) for line in lines if line]
    return [list(takewhile(lambda word: word != ">", command)) for command in commands]


def problem_with(words: list[str]) -> str | None:
    """Return the problem of a command of a page, or None."""
    name, *arguments = words
    if name == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        return None if f"\n{arguments[0]}:" in makefile else f"no target {arguments[0]}"
    if name in {"mlagen", "sglang", "vllm"}:
        check = _problem_with_options if name == "mlagen" else _problem_with_backend
        return check(arguments)
    if name == "python3" and arguments[:2] == ["-m", "pytest"]:
        paths = [word for word in arguments[2:] if word.startswith("tests")]
        return next((f"no {path}" for path in paths if not (ROOT / path).exists()), None)
    script = arguments[-1 if name == "torchrun" else 0]
    if name in {"python3", "torchrun"} and script.endswith(".py"):
        return None if (ROOT / script).is_file() else f"no {script}"
    if name == "pip" and arguments[0] == "install":
        extras = re.findall(r"\[(\w+)\]", arguments[-1])
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        return next((f"no extra {e}" for e in extras if f"\n{e} = [" not in project), None)
    return f"unknown command {name}"


def _problem_with_backend(arguments: list[str]) -> str | None:
    backends = [word for word in arguments if word.lower().startswith("mlagen")]
    known = {*vllm.BACKENDS, *sglang.BACKENDS}
    return next((f"no backend {word}" for word in backends if word not in known), None)


def _problem_with_options(arguments: list[str]) -> str | None:
    command: click.Command = cli
    # Commands cache the name of --help from their first context, so it must be a proper one.
    above = click.Context(cli, info_name="mlagen", **cli.context_settings)
    while isinstance(command, click.Group) and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:  # parses, and runs nothing
        given = command.make_context("mlagen", list(arguments), parent=above).params
        for text in filter(None, map(given.get, ("spec", "first", "second"))):
            spec_named(text)
        for text in given.get("kernels", ()):
            parse_spec(text)
    except (click.UsageError, ArgumentError) as error:
        return str(error)
    if isinstance(command, click.Group) and not arguments[0].startswith("-"):
        return f"no command {arguments[0]}"
    return None


def pods_of(page: str) -> list[dict[str, Any]]:
    """Return the specs of the pods in the manifests of a page."""
    yaml = pytest.importorskip("yaml", reason="needs pip install 'mlagen[test]'")
    texts = [block.text for block in BLOCKS[page] if block.language == "yaml"]
    manifests = [manifest for text in texts for manifest in yaml.safe_load_all(text)]
    assert all({"apiVersion", "kind", "metadata"} <= manifest.keys() for manifest in manifests)
    specs = [manifest["spec"] for manifest in manifests]
    pods = [spec["template"]["spec"] if "template" in spec else spec for spec in specs]
    return [pod for pod in pods if "containers" in pod]


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_manifests_of_a_page_are_consistent(page: str) -> None:
    """Commands and variables exist, and a cache lies below the mount point of a declared volume."""
    known = set(
        re.findall(r"`(MLAGEN_\w+)`", PAGES["docs/reference/environment.md"].read_text("utf-8"))
    )
    for pod in pods_of(page):
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        containers = pod.get("initContainers", []) + pod["containers"]
        caches = [_cache_of(container, known, volumes) for container in containers]
        assert len(set(caches)) == 1
        for container in containers:
            assert problem_with(container["command"]) is None


def _cache_of(container: dict[str, Any], known: set[str], volumes: set[str]) -> str:
    """Return the folder that a container of a manifest names as its cache or its layer."""
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
    assert {name for name in variables if name.startswith("MLAGEN_")} <= known
    assert set(mounts.values()) <= volumes
    (cache,) = (variables[name] for name in _CACHES if name in variables)
    is_below = any(cache.startswith(f"{path}/") for path in mounts if mounts[path] == "kernels")
    assert is_below == ("kernels" in volumes)  # else the image has it
    return str(cache)


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_that_pages_name_exist(page: str) -> None:
    """Make targets, command options, kernels, pip extras and test folders of the pages exist."""
    problems = {" ".join(words): problem_with(words) for words in commands_of(page)}
    assert {words: problem for words, problem in problems.items() if problem} == {}
