"""`mlagen doctor`: diagnosis of this machine and its cache."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from mlagen import __version__
from mlagen.errors import MlagenError
from mlagen.logs import visible
from mlagen.paths import folder_problem, is_folder

from ..options.exit_codes import FAILED
from ..output.report import count_text, json_option, print_facts, print_json, size_text

# Packages that calls, compiling, caching and this command need. Only their metadata is read.
_REQUIRED = (
    *("torch", "cuda-bindings", "cuda-pathfinder", "jinja2", "filelock", "packaging"),
    *("click", "rich"),
)
# Packages that call mlagen, or whose calls it takes.
_CALLERS = ("vllm", "sglang", "transformers", "flashinfer-python")
_WITHOUT_GPU = "so calls on GPU tensors fail"


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, /, *, as_json: bool) -> None:
    """Check this machine; change nothing.

    Exits with 1 if a requirement of mlagen is missing. A missing GPU is no problem: kernels
    compile without one.
    """
    from mlagen.codegen.sources import template_root

    problems: list[str] = []
    with _reported(problems):
        template_root()
    packages = {name: _version_of(name) for name in _REQUIRED}
    problems += [
        f"{name}: not installed; run: pip install {name}"
        for name, version in packages.items()
        if version is None
    ]
    document = {
        "mlagen": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "callers": {name: _version_of(name) for name in _CALLERS},
        "nvrtc": _nvrtc(problems),
        **_gpus(problems),
        **_folders(problems),
        "variables": _variables(),
    }
    document["problems"] = problems
    if as_json:
        print_json(document)
        for problem in problems:
            click.echo(f"problem: {problem}", err=True)
    else:
        print_facts(_facts(document))
    if problems:
        ctx.exit(FAILED)


@contextmanager
def _reported(problems: list[str], start: str = "") -> Iterator[None]:
    try:
        yield
    except MlagenError as error:
        problems.append(f"{start}{error}")


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc(problems: list[str]) -> dict[str, str | None]:
    from mlagen.compiler.toolchain import find_nvrtc

    document: dict[str, str | None] = dict.fromkeys(("version", "path", "source"))
    with _reported(problems):
        found = find_nvrtc()
        document |= {"version": found.version, "path": str(found.path), "source": found.source}
    return document


def _gpus(problems: list[str]) -> dict[str, Any]:
    from mlagen.runtime.device import driver_version, visible_devices
    from mlagen.spec.arch import arch_of_capability

    document: dict[str, Any] = {"driver": None, "gpus": []}
    with _reported(problems):
        driver, devices = driver_version(), visible_devices()
        for gpu in devices:
            found: dict[str, Any] = {**vars(gpu), "arch": None}
            with _reported(problems, f"{gpu.name}: "):
                found["arch"] = str(arch_of_capability(gpu.major, gpu.minor))
            document["gpus"].append(found)
        document["driver"] = driver
    return document


def _folders(problems: list[str]) -> dict[str, Any]:
    """Return the cache, its read-only layers and the locks.

    Calls skip a missing or unreadable layer.
    """
    from mlagen.cache.store import packaged_layers
    from mlagen.settings import current_settings

    settings = current_settings()
    path = settings.cache_dir
    cache = _folder(path, "cache", problems)
    cache |= _kernels(path, "cache", problems, is_shared=settings.trusts_shared)
    layers = [(path, settings.trusts_shared) for path in settings.cache_layers]
    layers += [(path, True) for path in packaged_layers()]
    problems += [
        f"layer: expected a cache folder, got {problem}: {path}"
        for path, _ in layers
        if (problem := folder_problem(path))
    ]
    documents = [
        {
            "path": str(path),
            "exists": is_folder(path),
            **_kernels(path, "layer", problems, is_shared=is_shared),
        }
        for path, is_shared in layers
    ]
    locks = _folder(settings.lock_dir, "locks", problems)
    return {
        "cache": cache,
        "layers": documents,
        "locks": {**locks, "timeout_s": settings.lock_timeout_s},
    }


def _kernels(path: Path, name: str, problems: list[str], *, is_shared: bool) -> dict[str, int]:
    from mlagen.cache.folder import Folder
    from mlagen.cache.store import stored_entries

    entries = []
    try:
        entries = list(stored_entries(Folder(path, is_shared=is_shared)))
    except MlagenError as error:
        if is_folder(path):  # otherwise already reported
            problems.append(str(error).replace("cache:", f"{name}:", 1))
    return {
        "entries": len(entries),
        "damaged": sum(stored.problem is not None for stored in entries),
        "size_bytes": sum(stored.size_bytes for stored in entries),
    }


def _variables() -> dict[str, str | None]:
    """Return the variables of mlagen that are set; one that it does not read may be a secret."""
    from mlagen.settings import set_variables, unread_variables

    unread = unread_variables(os.environ)
    names = set_variables(os.environ)
    return {name: None if name in unread else os.environ[name] for name in names}


def _folder(path: Path, name: str, problems: list[str]) -> dict[str, Any]:
    # Creates nothing: if the folder is missing, the check applies to its nearest ancestor.
    existing, problem = path, folder_problem(path)
    while problem == "none" and not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
        problem = folder_problem(existing)
    is_writable = problem is None and os.access(existing, os.W_OK | os.X_OK)
    if not is_writable:
        problems.append(f"{name}: expected a writable folder, got {problem or 'none'}: {path}")
    return {"path": str(path), "exists": is_folder(path), "writable": is_writable}


def _facts(document: dict[str, Any]) -> dict[str, str]:
    from mlagen.compiler.toolchain import is_installed

    nvrtc, cache, locks = document["nvrtc"], document["cache"], document["locks"]
    facts = {name: str(document[name]) for name in ("mlagen", "python")}
    facts |= {name: version or "missing" for name, version in document["packages"].items()}
    callers = document["callers"].items()
    facts["callers"] = ", ".join(f"{name} {version}" for name, version in callers if version)
    facts["callers"] = facts["callers"] or "none"
    facts["NVRTC"] = "missing"
    if nvrtc["version"]:
        facts["NVRTC"] = f"{nvrtc['version']} from {nvrtc['source']}: {nvrtc['path']}"
    driver = document["driver"]
    facts["driver"] = f"supports CUDA {driver}" if driver else "none"
    facts["GPUs"] = "none: kernels compile, and the CPU backend computes"
    for gpu in document["gpus"]:
        label = "GPUs" if gpu["index"] == 0 else f"GPU {gpu['index']}"
        facts[label] = (
            f"{gpu['name']}, {gpu['arch'] or 'not supported'}, {gpu['sm_count']} SMs, "
            f"{size_text(gpu['memory_bytes'])}"
        )
    facts["cache"] = f"{cache['path']}: {_state(cache)}, {_content_text(cache)}"
    layers = [f"{layer['path']}: {_content_text(layer)}" for layer in document["layers"]]
    facts["layers"] = "\n".join(layers) or "none"
    facts["locks"] = f"{locks['path']}: {_state(locks)}, wait at most {locks['timeout_s']:g} s"
    variables = document["variables"].items()
    lines = [f"{name} (not read)" if text is None else f"{name}={text}" for name, text in variables]
    facts["variables"] = "\n".join(visible(line, kept="") for line in lines) or "none"
    problems = document["problems"]
    missing = "" if document["gpus"] else f"; no {'GPU' if driver else 'driver'}, {_WITHOUT_GPU}"
    wanted = document["variables"].get("MLAGEN_TOOLCHAIN")
    if nvrtc["version"] and wanted and not is_installed(wanted):
        missing += f"; no NVRTC for MLAGEN_TOOLCHAIN={wanted}, so missing kernels are not compiled"
    facts["problems"] = "\n".join(problems) or f"none{missing}"
    return facts


def _content_text(folder: dict[str, Any]) -> str:
    damaged = f", {folder['damaged']} damaged" if folder["damaged"] else ""
    return f"{count_text(folder['entries'], 'kernel')}{damaged}, {size_text(folder['size_bytes'])}"


def _state(folder: dict[str, Any]) -> str:
    state = "exists" if folder["exists"] else "does not exist yet"
    return f"{state}, {'writable' if folder['writable'] else 'not writable'}"
