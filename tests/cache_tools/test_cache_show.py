"""`mlagen cache show` and `why`: a kernel and its parts, and the nearest by key fields."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda.pathfinder
import pytest

from cache_tools.tools.disassembly import find_nvdisasm, sass_of
from cache_tools.tools.entries import (
    Difference,
    differences,
    entries_of,
    key_of_entry,
    nearest_entry,
    print_differences,
)
from mlagen.cache.file import FileDigest, decode_all
from mlagen.cache.key import CacheKey
from mlagen.cache.store import kernel_store
from mlagen.errors import ArgumentError, ToolchainError
from tests.cache.builds import Parts, cut, entry_path, make_build, make_store
from tests.fixture_types import Patch

from .altered import damage, move_to_layer, recast, snapshot, use
from .conftest import Cached, run

OLD, NEWEST = "nvrtc-12.8.1", "nvrtc-13.5.37"
TIME = {"time": "2020-01-01T00:00:00+00:00"}
PARTS = {"source": "kernel.cu", "log": "build.log"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_printed_byte_for_byte(part: str, cached: Cached) -> None:
    """It can be redirected to a file, and has its own name in the document."""
    command = ("cache", "show", cached.keys[0], f"--{part}")
    text, document = run(*command), run(*command, "--json")
    content = decode_all(cached.paths[0].read_bytes())[1][PARTS[part]].decode()
    assert (text.exit_code, text.stdout) == (0, content)
    assert json.loads(document.stdout)["entries"][0][part]


def test_a_prefix_of_six_digits_or_more_is_a_key(cached: Cached, monkeypatch: Patch) -> None:
    """It may be in upper case; the message on an ambiguous one has digits that distinguish."""
    store = kernel_store()
    everything = list(store.entries())
    keys = ", ".join(sorted(key[:10] for key in cached.keys))
    messages = {
        "abc": "key: expected 6 to 64 lower-case hex digits, got 'abc'",
        "kernel": "key: expected 6 to 64 lower-case hex digits, got 'kernel'",
        "abcdef": f"key: expected more digits than abcdef, got several keys: {keys}",
    }

    for digits in (6, 8, 64):
        (found,) = entries_of(store, cached.keys[0][:digits].upper())
        assert found.key == cached.keys[0]
    for prefix, message in messages.items():
        if prefix == "abcdef":
            monkeypatch.setattr(store, "select", lambda _prefix: everything)
        with pytest.raises(ArgumentError, match=f"^{message}$"):
            entries_of(store, prefix)


@pytest.fixture
def tool(monkeypatch: Patch, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a fake nvdisasm, which cuda.pathfinder finds."""
    found = {"nvdisasm": None}
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", found.get)
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(content: str | bytes = "exit 0", folder: str = "bin") -> Path:
        path = tmp_path / folder / "nvdisasm"
        path.parent.mkdir(exist_ok=True)
        script = content if isinstance(content, bytes) else f"#!/bin/sh\n{content}\n".encode()
        path.write_bytes(script)
        path.chmod(0o755)
        found["nvdisasm"] = None if folder == "." else str(path)  # type: ignore[assignment]
        return path

    return make


def test_nvdisasm_is_found_or_its_package_named(cached: Cached, tool: Callable[..., Path]) -> None:
    """cuda.pathfinder's result takes precedence over the PATH; without both, the code is 3."""
    result = run("cache show", cached.keys[0], "--sass")
    message = "mlagen: nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm\n"
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", message)
    for folder in (".", "bin"):
        path = tool(folder=folder)
        assert find_nvdisasm() == path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("echo 'fatal: no such arch' >&2; exit 1", "nvdisasm: fatal: no such arch: combine"),
        ("exit 3", "nvdisasm: exit status 3: combine"),
        (b"\x7fELF of another machine", "nvdisasm: cannot be run, .*: .*/nvdisasm"),
    ],
    ids=["a reason", "none", "a binary of another machine"],
)
def test_a_rejected_cubin_is_an_error(
    content: str | bytes, message: str, tool: Callable[..., Path]
) -> None:
    """The message has the first line of nvdisasm's, and the name of the kernel."""
    tool(content)
    with pytest.raises(ToolchainError, match=f"^{message}$"):
        sass_of(b"", "combine")


def test_a_program_compiles_it_again_without_mlagen(cached: Cached, tmp_path: Path) -> None:
    """It prints kernel, compiler and digest of the cubin; another cubin is exit code 1."""
    unit, path = cached.units[0], cached.paths[0]
    manifest, files = decode_all(path.read_bytes())
    source, digest = files["kernel.cu"].decode(), manifest.files["kernel.cubin"].sha256
    # NVRTC 12.8 omits its patch level.
    compiler = re.sub(r"^(nvrtc-12\.8)\.\d+$", r"\1", str(unit.toolchain))
    program = run("cache show", cached.keys[0], "--reproduce").stdout
    script = tmp_path / "reproduce.py"
    script.write_text(f"import sys; sys.modules['mlagen'] = None\n{program}")
    wrong = "int f() { return nothing; }\n"
    ran = []
    for text in (source, source.replace("combine(", "combine_2("), wrong):
        digests = {**manifest.files, "kernel.cu": FileDigest.of(text.encode())}
        rest = b"".join(
            files[name] for name in manifest.files if name.startswith(("kernel.m", "b"))
        )
        packed = zlib.compress(text.encode() + rest)
        own = Parts.of(path.read_bytes())._replace(packed=packed)
        path.write_bytes(own.sealed(files=digests, packed_bytes=len(packed)))
        command = [sys.executable, str(script)]
        ran.append(subprocess.run(command, capture_output=True, text=True, check=False))

    same, other, failed = ran
    assert (same.returncode, same.stdout) == (0, f"{unit.spec} by {compiler}: sha256 {digest}\n")
    expected = f"expected sha256 {digest}, built by {unit.toolchain}\n"
    assert (other.returncode, other.stderr) == (1, expected)
    assert failed.returncode == 1
    assert 'kernel.cu(1): error: identifier "nothing" is undefined' in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_program_without_nvrtc_ends_in_one_line(cached: Cached) -> None:
    """It names the package that has the library."""
    missing = "def missing(): raise RuntimeError\n"
    missing += "from cuda.bindings import nvrtc\nnvrtc.nvrtcVersion = missing\n"
    program = missing + run("cache show", cached.keys[0], "--reproduce").stdout

    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    expected = "NVRTC: expected its library, got none; run: pip install nvidia-cuda-nvrtc\n"
    assert (ran.returncode, ran.stderr) == (1, expected)


def fields_of(document: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the differing key fields."""
    return {item["key_field"]: tuple(item.values())[1:] for item in document["differences"]}


@pytest.mark.parametrize("is_layer", [False, True], ids=["the cache", "a layer"])
def test_a_cached_kernel_is_found(is_layer: bool, cached: Cached, monkeypatch: Patch) -> None:
    """Document and text name its folder, which nothing changes."""
    root = move_to_layer(cached.root, monkeypatch) if is_layer else cached.root
    before, spec = snapshot(root), str(cached.units[0].spec)
    found, text = run.json("cache why", spec), run("cache why", spec).stdout
    entry = found["entry"]
    assert (found["is_found"], found["key"]) == (True, cached.keys[0])
    assert (entry["layer"], entry["is_read_only"]) == (str(root), is_layer)
    assert text == f"found: {spec}\n{entry['path']}\n"
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("changes", "reason", "field", "nearest"),
    [
        ({}, "absent", "spec.head_dim_vo", "512"),
        ({"key_fields": {"templates": "0" * 64}}, "absent", "templates", "0" * 64),
        ({"key_fields": {"fact.slices": "9"}}, "absent", "fact.slices", "9"),
        ({"toolchain": OLD}, "other toolchain", "toolchain", OLD),
    ],
    ids=["spec", "sources", "facts", "compiler"],
)
def test_a_missing_kernel_is_compared_with_the_nearest(
    changes: Any, reason: str, field: str, nearest: str, cached: Cached
) -> None:
    """Only the differing key fields are shown, and the last line compiles it."""
    recast(cached.paths[0], **changes)
    spec = str(cached.units[0].spec).replace("=512", "=512" if changes else "=128")
    found, text = run.json("cache why", spec, code=1), run("cache why", spec).stdout
    assert (found["reason"], found["is_found"]) == (reason, False)
    assert text.splitlines()[-1] == f"run: mlagen prewarm --kernel '{spec}'"
    assert [(name, theirs) for name, (_, theirs) in fields_of(found).items()] == [(field, nearest)]


@pytest.mark.parametrize("text", ["combine", "combine(head_dim_vo=512)", "combine(dtype=bf16)"])
def test_names_that_are_left_out_are_filled_in(text: str) -> None:
    """The default kernel of `mlagen kernel show` is looked up."""
    kernel = run.json("kernel show", text)["kernel"]
    assert run.json("cache why", text, code=1)["kernel"] == kernel
    assert run.json("cache why", kernel, code=1)["kernel"] == kernel


def test_a_damaged_kernel_is_the_reason_and_stays(cached: Cached) -> None:
    """It is not removed, unlike in a call; a folder that others may write in is another."""
    cubin, spec = damage(cached.paths[0]), str(cached.units[0].spec)

    found, text = run.json("cache why", spec, code=1), run("cache why", spec).stdout
    cached.root.chmod(0o777)
    unreadable = run("cache why", spec)

    assert found["reason"] == "damaged"
    assert found["problem"].startswith("kernel.cubin: expected sha256 ")
    assert text.startswith("not found: damaged: kernel.cubin: expected sha256 ")
    assert f"\ndamaged: {cached.paths[0]}\nrun: mlagen prewarm --kernel '" in text
    assert unreadable.exit_code == 1
    assert unreadable.stdout.startswith("not found: unreadable: ")
    assert "MLAGEN_TRUST_SHARED=1" in unreadable.stdout
    assert cubin.exists()


def test_a_cached_key_has_its_reason(cached: Cached) -> None:
    """It is compared with the nearest earlier kernel; the first of a family with none."""
    recast(cached.paths[0], created={**TIME, "because": None})
    recast(cached.paths[1], created={"because": "other toolchain"})
    found, first = (run.json("cache why", key) for key in cached.keys[::-1])
    text = run("cache why", cached.keys[0][:8]).stdout
    assert (found["reason"], list(fields_of(found))) == ("other toolchain", ["spec.head_dim_vo"])
    assert (first["reason"], first["nearest"], first["differences"]) == (None, None, [])
    assert "compiled because: not recorded, by prewarm of mlagen " in text
    assert "no other combine is cached to compare with" in text


@pytest.mark.parametrize("families", [[], [("family", "mla_sm80", "mla_sm90")]], ids=len)
def test_other_families_have_other_templates(
    families: list[Difference], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only of one family do the templates differ as between two versions."""
    print_differences([*families, ("templates", "0" * 64, "1" * 64)], "one", "other")
    assert ("two versions of mlagen" in capsys.readouterr().out) == (not families)


def test_what_cannot_be_read_is_mended_and_not_only_compiled_again(
    cached: Cached, monkeypatch: Patch
) -> None:
    """A damaged or untrusted layer stays as it is, which the last line says."""
    layer = move_to_layer(cached.root, monkeypatch)
    entry = layer / cached.paths[0].relative_to(cached.root)
    damage(entry)
    damaged = run("cache why", str(cached.units[0].spec)).stdout
    layer.chmod(0o777)
    untrusted = run("cache why", str(cached.units[0].spec)).stdout
    assert "no differences" not in damaged + untrusted
    assert damaged.endswith("build this layer again: prewarm writes into the cache folder only\n")
    assert untrusted.endswith("mend this folder: prewarm does not\n")


def test_one_kernel_by_two_compilers(cached: Cached) -> None:
    """Both are shown, or the one that is named; a key alone is ambiguous where one is compared."""
    recast(cached.paths[0], toolchain=OLD, keeps=True)
    toolchains, key = (OLD, str(cached.units[0].toolchain)), cached.keys[0][:8]
    every = run.json("cache show", key)["entries"]
    assert tuple(entry["toolchain"] for entry in every) == toolchains
    assert run.json("cache show", f"{key}/{OLD}")["entries"] == every[:1]
    rejected = run("cache why", key)
    rule = f"expected {key}/TOOLCHAIN, got no toolchain out of {', '.join(toolchains)}"
    assert (rejected.exit_code, rejected.stderr) == (2, f"mlagen: key: {rule}\n")


@pytest.mark.parametrize("which", ["why {}", "show {}", "show {} --source"])
def test_a_damaged_kernel_is_not_shown(which: str, cached: Cached) -> None:
    """Damage is an error with the reason and the path, wherever the kernel stands."""
    cubin = damage(cached.paths[0])
    result = run("cache", *which.format(*cached.keys).split())
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("mlagen: cache: kernel.cubin: expected sha256 ")
    assert result.stderr.endswith(f": {cubin}\n")


def make_key(toolchain: str = NEWEST, **key_fields: str) -> CacheKey:
    """Return the key of a small kernel."""
    fields = {"family": "attend", "arch": "sm_80", "page_size": "64"} | key_fields
    names = {name: name if name == "family" else f"spec.{name}" for name in fields}
    return CacheKey(tuple((names[name], value) for name, value in fields.items()), toolchain)


def test_the_nearest_has_the_fewest_differences_and_was_used_last(tmp_path: Path) -> None:
    """Kernels of another family are not compared, and a damaged entry has no key."""
    old, young = make_key(page_size="16"), make_key(page_size="32")
    far, other = make_key(arch="sm_90a", page_size="16"), make_key(family="combine")
    store = make_store(tmp_path)
    for age_s, key in ((0, far), (0, other), (7200, old), (3600, young)):
        store.find_or_build(key, lambda: make_build(toolchain=NEWEST))
        use(entry_path(tmp_path, key), age_s=age_s, now=time.time())

    found = nearest_entry(make_key(), store.entries())

    assert found is not None
    assert (found[0].key, found[1]) == (young.digest, [("spec.page_size", "64", "32")])
    assert nearest_entry(make_key(family="nothing like it"), store.entries()) is None
    cut(entry_path(tmp_path, young))
    (again,) = [each for each in store.entries() if each.key == young.digest]
    assert key_of_entry(again) is None
    # The toolchain counts only if the key does not accept the other one.
    assert differences(make_key("nvrtc-13"), make_key(NEWEST)) == []
    expected = [("toolchain", "nvrtc-13.0.88", NEWEST)]
    assert differences(make_key("nvrtc-13.0.88"), make_key(NEWEST)) == expected
