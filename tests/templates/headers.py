"""Templates outside of their kernel: rendered for a spec, flattened, on their own."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from mlagen.artifacts import Source
from mlagen.codegen.includes import MAIN, Resolver, Text, flatten, included_name
from mlagen.codegen.render import rendered, rendered_file
from mlagen.codegen.sources import Fact, spec_facts, template_root
from mlagen.spec.arch import ARCHS
from mlagen.spec.families import specs_of
from mlagen.spec.kernel import KernelSpec
from tests.kernels import gqa_sm90

# Which no list of kernels has, since calls determine more of them.
_GATHERING = gqa_sm90(sparse_block=1)


class Variant(NamedTuple):
    """A kernel that stands for all that are made of the same files, the kernel's file first."""

    spec: KernelSpec
    files: tuple[str, ...]

    @property
    def headers(self) -> tuple[str, ...]:
        """The files without the kernel's own."""
        return self.files[1:]


@cache
def variants() -> tuple[Variant, ...]:
    """Return a variant for each set of files that a kernel of any architecture is made of."""
    found: dict[tuple[str, ...], KernelSpec] = {}
    for arch in ARCHS:
        for spec in specs_of(arch, page_size=("64",)):
            found.setdefault(kernel_files(spec), spec)
    found.setdefault(kernel_files(_GATHERING), _GATHERING)
    return tuple(Variant(spec, files) for files, spec in found.items())


def kernel_files(spec: KernelSpec) -> tuple[str, ...]:
    """Return every template that the kernel of ``spec`` is made of."""
    found = [_resolver(spec.folder).resolve(MAIN, spec.folder)]
    for name in found:
        found += [file for _, file in includes_of(name, spec) if file not in found]
    return tuple(found)


def includes_of(name: str, spec: KernelSpec) -> list[tuple[str, str]]:
    """Return what a template includes itself, as ``spec`` has it: name and file."""
    resolver = _resolver(spec.folder)
    return [
        (included, resolver.resolve(included, name)) for included in _included_names(name, spec)
    ]


def compiled_alone(name: str, spec: KernelSpec) -> Source:
    """Return a text that includes one template, flattened as the kernel of ``spec`` would be."""
    return flattened([f'#include "{own_name(name, spec)}"'], spec)


def own_name(name: str, spec: KernelSpec) -> str:
    """Return the name by which the kernel of ``spec`` includes a template."""
    folder = Path(spec.folder)
    above = [f"{place}/" for place in (folder, *folder.parents) if place != Path()]
    found = next((place for place in above if name.startswith(place)), "")
    return name.removeprefix(found).removesuffix(".j2")


def flattened(lines: list[str], spec: KernelSpec) -> Source:
    """Return ``lines``, which may include templates, as one text, as if a kernel of ``spec``."""
    probe = f"{spec.folder}/probe.cu"

    def read(name: str) -> Text:
        return (
            Text(lines, [f"{name}:1"] * len(lines)) if name == probe else rendered_file(name, spec)
        )

    text = flatten(template_root(), spec.folder, read, probe)
    return Source(text="\n".join([*text.lines, ""]), origins=tuple(text.origins))


@cache
def _resolver(folder: str) -> Resolver:
    return Resolver(template_root(), folder)


@cache
def _plain_includes(name: str) -> tuple[str, ...]:
    return _named((template_root() / name).read_text().split("\n"), name)


def _included_names(name: str, spec: KernelSpec) -> tuple[str, ...]:
    if name.endswith(".j2"):
        return _rendered_includes(name, _facts_of(spec))
    return _plain_includes(name)


@lru_cache(1)  # a kernel has several templates, and is asked for them one after the other
def _facts_of(spec: KernelSpec) -> tuple[tuple[str, Fact], ...]:
    return tuple(spec_facts(spec).items())


@cache
def _rendered_includes(name: str, facts: tuple[tuple[str, Fact], ...]) -> tuple[str, ...]:
    return _named(rendered(name, dict(facts)).lines, name)


def _named(lines: Iterable[str], name: str) -> tuple[str, ...]:
    named = (included_name(line, name) for line in lines)
    return tuple(included for included in named if included is not None)
