"""MLAGEN_LINEINFO: template lines in PTX and SASS, under keys of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlagen.codegen.render import render
from mlagen.codegen.sources import template_root
from mlagen.compiler.nvrtc import compile_to_ptx
from mlagen.compiler.process import CompileProcesses
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.engine import find_or_build, key_of
from mlagen.errors import CompileError
from mlagen.spec.kernel import KernelSpec
from tests.built_once import compiled, cubin_of
from tests.kernels import COMBINE, clear_caches, gqa_sm90
from tests.text_hashes import text_sections

from .conftest import Setting, run


def test_ptx_has_the_lines_of_the_templates() -> None:
    """Every file that the PTX names is a template, and every line is in it."""
    source = render(COMBINE, line_info=True)

    ptx = compile_to_ptx(source, COMBINE.arch, find_nvrtc())

    files = dict(re.findall(r'\.file\s+(\d+) "(.*)"', ptx))
    places = set(re.findall(r"\.loc\s+(\d+) (\d+) ", ptx))
    assert str(template_root() / "kernels/combine/kernel.cu.j2") in files.values()
    assert len(places) > 50
    for file, line in places:
        path = Path(files[file])
        assert path.is_relative_to(template_root())
        assert path.read_text().splitlines()[int(line) - 1].strip()


@pytest.mark.parametrize("spec", [COMBINE, gqa_sm90()], ids=lambda spec: spec.family)
def test_the_code_is_that_of_the_normal_kernel(spec: KernelSpec) -> None:
    """Line info changes no instruction and no resource; a fresh process adds it too."""
    source = render(spec, line_info=True)
    plain, with_lines = cubin_of(spec), compiled(source, spec.arch)
    assert text_sections(with_lines.code) == text_sections(plain.code)
    assert with_lines.resources == plain.resources
    assert str(template_root()).encode() in with_lines.code
    assert str(template_root()).encode() not in plain.code
    if spec == COMBINE:
        assert CompileProcesses().compile(source, spec.arch, find_nvrtc()).code == with_lines.code


def test_the_key_names_what_is_different(setting: Setting, request: Any) -> None:
    """Option and folder are added to the key fields: installations do not share such kernels."""
    normal = key_of(COMBINE)
    setting("MLAGEN_LINEINFO", 1)
    key = key_of(COMBINE)
    folder = {"option.generate-line-info": "", "line_info": str(template_root())}
    assert key.digest != normal.digest
    assert key.differences(normal) == [(name, value, None) for name, value in folder.items()]
    setting("MLAGEN_LINEINFO", 0)
    assert key_of(COMBINE) == normal
    setting("MLAGEN_LINEINFO", 1)
    templates = request.getfixturevalue("templates")
    assert dict(key_of(COMBINE).key_fields)["line_info"] == str(templates)


def test_normal_kernels_are_not_mixed_with_them(setting: Setting) -> None:
    """Each setting finds its own kernel, and the commands name the difference."""
    plain = find_or_build(COMBINE)
    setting("MLAGEN_LINEINFO", 1)
    why = run.json("cache why", str(COMBINE), code=1)
    with_lines = find_or_build(COMBINE)

    keys = [outcome.entry.manifest.key for outcome in (plain, with_lines)]
    folder = str(template_root())
    fields = {"option.generate-line-info", "line_info"}
    assert (plain.built, with_lines.built) == (True, True)
    assert {each["key_field"] for each in why["differences"]} == fields
    assert run.json("cache stats")["usable"] == 1
    assert f"lines of {folder}" in run("cache show", keys[1]).stdout
    listed = {row.split()[0]: "info" in row for row in run("cache ls").stdout.splitlines()[1:3]}
    assert listed == {keys[0][:8]: False, keys[1][:8]: True}
    folders = {each["key"]: each["line_info"] for each in run.json("cache ls")["entries"]}
    assert folders == {keys[0]: None, keys[1]: folder}


def test_an_error_names_the_template(templates: Path) -> None:
    """NVRTC reports positions by the directives, as paths of templates."""
    path = templates / "kernels/combine/combine.cuh"
    path.write_text(path.read_text() + "int wrong = nothing;\n")
    clear_caches()
    line = len(path.read_text().splitlines())
    with pytest.raises(CompileError) as caught:
        compiled(render(COMBINE, line_info=True), COMBINE.arch)
    assert f"{path}({line}): error" in str(caught.value)
