"""`mlagen doctor`: what mlagen finds on this machine, and what it lacks."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from mlagen import __version__
from mlagen.errors import MlagenError

from ..exit_codes import FAILED
from ..report import count_text, json_option, print_facts, print_json, size_text

# What calls, compiling, caching and this command need. Their metadata is read; nothing is imported.
_REQUIRED = ("torch", "cuda-bindings", "jinja2", "filelock", "click", "rich")


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, /, *, as_json: bool) -> None:
    """Examine this machine; change nothing.

    Exits with 1 if something is missing that mlagen needs. That there is no GPU is no fault:
    kernels can be compiled without one.
    """
    problems: list[str] = []
    document = {
        "mlagen": __version__,
        "python": platform.python_version(),
        "packages": _packages(problems),
        "nvrtc": _nvrtc(problems),
        **_gpus(problems),
        "cache": _cache(problems),
        "locks": _locks(problems),
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


def _packages(problems: list[str]) -> dict[str, str | None]:
    versions = {name: _version_of(name) for name in _REQUIRED}
    for name, version in versions.items():
        if version is None:
            problems.append(f"{name}: not installed; run: pip install {name}")
    return versions


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc(problems: list[str]) -> dict[str, str | None]:
    from mlagen.compiler.toolchain import find_nvrtc

    try:
        found = find_nvrtc()
    except MlagenError as error:
        problems.append(str(error))
        return {"version": None, "path": None, "source": None}
    return {"version": found.version, "path": str(found.path), "source": found.source}


def _gpus(problems: list[str]) -> dict[str, Any]:
    from mlagen.runtime.device import driver_version, visible_devices
    from mlagen.spec.arch import arch_of_capability

    try:
        document: dict[str, Any] = {"driver": driver_version(), "gpus": []}
        devices = visible_devices()
    except MlagenError as error:
        problems.append(str(error))
        return {"driver": None, "gpus": []}
    for gpu in devices:
        try:
            arch = str(arch_of_capability(gpu.major, gpu.minor))
        except MlagenError as error:
            arch = None
            problems.append(f"{gpu.name}: {error}")
        document["gpus"].append({**vars(gpu), "arch": arch})
    return document


def _cache(problems: list[str]) -> dict[str, Any]:
    from mlagen.cache.catalog import stored_entries
    from mlagen.cache.layout import Layout
    from mlagen.settings import current_settings

    path = current_settings().cache_dir
    entries = []
    try:
        entries = list(stored_entries(Layout(path)))
    except MlagenError as error:
        problems.append(str(error))
    return {
        **_folder(path, "cache", problems),
        "entries": len(entries),
        "damaged": sum(stored.problem is not None for stored in entries),
        "size_bytes": sum(stored.size_bytes for stored in entries),
    }


def _locks(problems: list[str]) -> dict[str, Any]:
    from mlagen.settings import current_settings

    settings = current_settings()
    folder = _folder(settings.lock_dir, "locks", problems)
    return {**folder, "timeout_s": settings.lock_timeout_s}


def _folder(path: Path, name: str, problems: list[str]) -> dict[str, Any]:
    # Nothing is created: where the folder is missing, the first one above it is asked.
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    is_writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    if not is_writable:
        problems.append(f"{name}: expected a writable folder, got none: {path}")
    return {"path": str(path), "exists": path.is_dir(), "writable": is_writable}


def _facts(document: dict[str, Any]) -> dict[str, str]:
    nvrtc, cache, locks = document["nvrtc"], document["cache"], document["locks"]
    facts = {name: str(document[name]) for name in ("mlagen", "python")}
    facts |= {name: version or "missing" for name, version in document["packages"].items()}
    facts["NVRTC"] = "missing"
    if nvrtc["version"]:
        facts["NVRTC"] = f"{nvrtc['version']} from {nvrtc['source']}: {nvrtc['path']}"
    driver = document["driver"]
    facts["driver"] = f"serves CUDA {driver}" if driver else "none"
    facts["GPUs"] = "none: kernels can be compiled, and tensors on the CPU computed"
    for gpu in document["gpus"]:
        label = "GPUs" if gpu["index"] == 0 else f"GPU {gpu['index']}"
        facts[label] = (
            f"{gpu['name']}, {gpu['arch'] or 'not supported'}, {gpu['sm_count']} SMs, "
            f"{size_text(gpu['memory_bytes'])}"
        )
    entries = count_text(cache["entries"], "kernel")
    damaged = f", {cache['damaged']} damaged" if cache["damaged"] else ""
    size = size_text(cache["size_bytes"])
    facts["cache"] = f"{cache['path']}: {_state(cache)}, {entries}{damaged}, {size}"
    facts["locks"] = f"{locks['path']}: {_state(locks)}, wait at most {locks['timeout_s']:g} s"
    problems = document["problems"]
    facts["problems"] = "none" if not problems else "\n".join(problems)
    return facts


def _state(folder: dict[str, Any]) -> str:
    state = "exists" if folder["exists"] else "does not exist yet"
    return f"{state}, {'writable' if folder['writable'] else 'not writable'}"
