"""Every command in every cache state, of ten thousand kernels too, and never a traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from cache_tools.options.exit_codes import CACHE_UNUSABLE, DONE, FAILED, USAGE
from mlagen.cache.file import file_of
from mlagen.settings import current_settings
from tests.built_once import built_once
from tests.cache.builds import TOOLCHAIN, Parts, edit

from .altered import fill, snapshot
from .conftest import HEAVY, ROOT, Setting, run

# Commands, and their exit code on an empty cache; SPEC is a kernel that no cache here has.
LOOKING = {
    "cache dir": DONE,
    "cache ls": DONE,
    "cache ls --layers --sort spills --arch sm_90a": DONE,
    "cache stats": DONE,
    "cache show KEY": USAGE,
    "cache why SPEC": FAILED,
    "cache why KEY": USAGE,
    "cache verify": DONE,
    "cache prune --max-size 0 --dry-run": DONE,
}
REMOVING = {
    "cache prune --max-size 0": DONE,
    "cache gc": DONE,
    "cache rm KEY": USAGE,
    "cache clear --yes": DONE,
}
EVERY = {**LOOKING, **REMOVING}
OTHERS = {"--version": DONE, "-h": DONE, "doctor": DONE, "prewarm --dry-run --arch sm_90a": FAILED}
SPEC = (
    "combine(arch=sm_90a, dtype=bf16, head_dim_vo=512, batch_invariant=False, "
    "has_output_gate=False)"
)


def path_of(cache_dir: Path, key: str) -> Path:
    """Return the file of an entry."""
    return cache_dir / "v2" / key[:2] / f"{key}.{TOOLCHAIN}"


every_command = pytest.mark.parametrize("line", EVERY)


def typed(line: str, key: str = "abcdef") -> list[str]:
    """Return the words of a command line."""
    return [{"KEY": key, "SPEC": SPEC}.get(word, word) for word in line.split()]


@every_command
@pytest.mark.parametrize("folders", [None, "", "v2", "v2/ab"])
def test_an_empty_cache_has_no_kernels(folders: str | None, line: str, cache_dir: Path) -> None:
    """No command creates an absent cache, and any subset of its folders counts as empty."""
    if folders is not None:
        (cache_dir / folders).mkdir(parents=True)
        cache_dir.chmod(0o700)
    if EVERY[line] == USAGE:
        result = run(*typed(line), "--json")
        assert (result.exit_code, result.stdout) == (USAGE, "")
    else:
        found = run.json(*typed(line), code=EVERY[line])
        assert found.get("exists", cache_dir.exists()) == (folders is not None)
    assert cache_dir.exists() == (folders is not None)


@every_command
def test_a_file_in_place_of_the_cache_is_no_cache(line: str, cache_dir: Path) -> None:
    """A file in place of the cache is neither read nor removed."""
    cache_dir.write_text("a file")
    result = run(*typed(line))
    assert result.exit_code in {EVERY[line], CACHE_UNUSABLE}, result.stderr
    assert cache_dir.read_text() == "a file"


FACTS: dict[str, object] = {"kernel": {"spec": []}, "resources": None, "compile_ms": "long"}


def sealed(path: Path, *, change: Callable[[bytes], bytes]) -> None:
    """Change the manifest of an entry, under a valid digest."""
    own = Parts.of(path.read_bytes())
    path.write_bytes(file_of(change(own.manifest), own.cubin, own.packed))


def become_a_fifo(path: Path) -> None:
    """Replace an entry by a FIFO."""
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no entry": lambda path: path.write_text("{"),
    "no JSON": lambda path: sealed(path, change=lambda _: b"{"),
    "other facts": lambda path: sealed(
        path, change=lambda text: json.dumps({**json.loads(text), "facts": FACTS}).encode()
    ),
    "a number that JSON lacks": lambda path: sealed(
        path, change=lambda text: text.replace(b'"registers":32', b'"registers":NaN')
    ),
    "another content than its digest": lambda path: edit(
        path, lambda file: file.replace(b'"registers":32', b'"registers":33')
    ),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere")).name),
    "a FIFO": become_a_fifo,
}


@every_command
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_reported_and_hides_nothing_else(
    damage: Callable[[Path], object], line: str, cache_dir: Path
) -> None:
    """A list continues after a damaged kernel, and a command for that kernel reports its damage."""
    key, *_ = fill(cache_dir, 3)
    damage(path_of(cache_dir, key))

    result = run(*typed(line, key))

    expected = {"cache show": 4, "cache expl": 4, "cache veri": 1, "cache why ": 4}
    code = FAILED if "SPEC" in line else expected.get(line[:10], DONE)
    assert result.exit_code == code, result.stderr
    if code == CACHE_UNUSABLE:
        assert result.stderr.startswith("mlagen: cache: ")
        assert result.stderr.count("\n") == 1


ALL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from tests.faults.privileges import give_up_capabilities
give_up_capabilities()
given, absent = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(absent))
from cache_tools.cli import cli
found = []
for words in given:
    streams = [io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            cli.main(words, prog_name="mlagen")
        except SystemExit as ended:
            texts = [stream.buffer.getvalue().decode() for stream in streams]
            found.append((ended.code or 0, *texts))
print(json.dumps(found))
"""


def run_all(
    lines: Iterable[str], key: str = "abcdef", *options: str, absent: tuple[str, ...] = ()
) -> dict[str, tuple[int, str, str]]:
    """Run commands in one process that obeys file modes, even as root; return code and streams."""
    words = [[*typed(line, key), *options] for line in lines]
    command = [sys.executable, "-c", ALL]
    given = json.dumps([words, absent])
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ, input=given, capture_output=True, text=True, check=True
    )
    found = [(code, out, err) for code, out, err in json.loads(ran.stdout)]
    return dict(zip(lines, found, strict=True))


def test_inspection_needs_no_package_and_creates_nothing(cache_dir: Path) -> None:
    """It works without torch, Jinja, CUDA bindings and filelock, and without a cache."""
    every = EVERY | OTHERS
    found = run_all(every, absent=HEAVY)
    assert {line: code for line, (code, *_) in found.items()} == every
    assert not cache_dir.exists()
    assert not current_settings().lock_dir.exists()


def test_a_read_only_cache_can_be_listed(cache_dir: Path) -> None:
    """In a read-only cache a removal is an error of one line, and changes nothing."""
    key, *_ = fill(cache_dir, 3)
    for folder in (cache_dir, *(path for path in cache_dir.rglob("*") if path.is_dir())):
        folder.chmod(0o500)
    before = snapshot(cache_dir)

    found, rule = run_all(EVERY, key, "--json"), "mlagen: cache: expected a writable folder, got "
    for line, (code, out, err) in found.items():
        is_rejected = line in REMOVING and line != "cache gc"
        expected = CACHE_UNUSABLE if is_rejected else FAILED if "SPEC" in line else DONE
        assert code == expected, (line, err)
        assert (out == "") == err.startswith(rule) == is_rejected, line
    assert snapshot(cache_dir) == before


def test_gc_of_a_read_only_cache_does_not_claim_to_delete(
    cache_dir: Path, setting: Setting
) -> None:
    """Kernels that stay above the limit are an error, abandoned files that stay are not."""
    fill(cache_dir, 3)
    for path in (cache_dir, *cache_dir.rglob("*")):
        if path.is_file():
            os.utime(path, (1e9, 1e9))
        else:
            (path / f".{'a' * 16}.part").touch()
            os.utime(path / f".{'a' * 16}.part", (1e9, 1e9))
            path.chmod(0o500)
    before = snapshot(cache_dir)

    (below,) = run_all(["cache gc"], "", "--json").values()
    setting("MLAGEN_CACHE_MAX_SIZE", "1")
    (above,) = run_all(["cache gc"], "", "--json").values()

    assert (below[0], json.loads(below[1])["abandoned"]) == (DONE, 0)
    error = f"mlagen: cache: expected a writable folder, got Permission denied: {cache_dir}\n"
    assert above == (CACHE_UNUSABLE, "", error)
    assert snapshot(cache_dir) == before


def test_a_cache_that_cannot_be_read_is_an_error(cache_dir: Path) -> None:
    """An unreadable cache is an error, not an empty cache."""
    key, *_ = fill(cache_dir, 1)
    (cache_dir / "v2").chmod(0o000)
    found = run_all(EVERY, key)
    rules = [
        f"mlagen: cache: expected a {kind} folder, got Permission "
        for kind in ("readable", "writable")
    ]
    for line, (code, _, err) in found.items():
        is_rejected = line != "cache dir"
        assert code == (CACHE_UNUSABLE if is_rejected else DONE), (line, err)
        assert err.startswith(tuple(rules)) == is_rejected, line


def test_a_kernel_that_cannot_be_read_is_not_removed(cache_dir: Path) -> None:
    """`verify` reports it with code 4, or with 1 if another is bad, and removes only that."""
    key, bad, *_ = fill(cache_dir, 3)
    hidden, other = path_of(cache_dir, key), path_of(cache_dir, bad)
    hidden.chmod(0o000)
    before = snapshot(cache_dir)

    options = ("cache verify --remove", "cache prune --older-than 1h")
    lines = [*options, "cache ls", "cache show KEY"]
    found = run_all(lines, key)
    same = snapshot(cache_dir) == before
    other.write_text("{")
    (both,) = run_all(lines[:1], key, "--json").values()

    reason = "expected a readable entry, got Permission denied"
    code, text, _ = found[lines[0]]
    assert (code, same) == (CACHE_UNUSABLE, True)
    assert text.startswith(f"unreadable: {key[:8]}: {reason}: {hidden}\n")
    assert text.endswith("3 entries: 2 valid, 0 bad, 1 unreadable\n")
    assert f"unreadable: {key[:8]}: {reason}" in found["cache ls"][1]
    shown = (CACHE_UNUSABLE, "", f"mlagen: cache: {reason}: {hidden}\n")
    assert found["cache show KEY"] == shown
    document = json.loads(both[1])
    assert both[0] == FAILED
    assert [row["key"] for row in document["bad"]] == [bad]
    assert [row["key"] for row in document["unreadable"]] == [key]
    assert (hidden.exists(), other.exists()) == (True, False)


COUNT = 10_000


@pytest.fixture
def many(setting: Setting) -> Path:
    """Make a folder with ten thousand kernels the cache of a read-only test."""
    folder = built_once("many", lambda folder: fill(folder, COUNT))
    setting("MLAGEN_CACHE_DIR", folder)
    return folder


# Lower bound of every list: find, read and parse the manifests.
LEAST = """
import json, os, sys
for shard in os.listdir(f"{sys.argv[1]}/v2"):
    for name in os.listdir(f"{sys.argv[1]}/v2/{shard}"):
        with open(f"{sys.argv[1]}/v2/{shard}/{name}", "rb") as file:
            start = file.read(8192)
        print(json.loads(start[44 : 44 + int.from_bytes(start[8:12], "little")])["key"])
"""


def processor_s(*arguments: str) -> float:
    """Return the CPU time of a Python process, whose lines no coverage counts."""
    environ = {name: os.environ[name] for name in os.environ if not name.startswith("COVERAGE")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(ran.stdout) > COUNT
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.timeout(120)
def test_a_list_takes_less_than_a_second(many: Path) -> None:
    """On a busy machine the limit is five times the time to parse the manifests, just before."""
    for option in ((), ("--json",)):
        times = []
        for _ in range(3):  # other load only makes runs longer
            limit_s = max(1.0, 5 * processor_s("-c", LEAST, str(many)))
            times.append((processor_s("-m", "cache_tools", "cache", "ls", *option), limit_s))
            if times[-1][0] < limit_s:
                break
        assert times[-1][0] < limit_s, (option, times)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        ("cache stats", DONE, "kernels          10000, "),
        ("cache prune --max-size 0 --dry-run", DONE, "would remove 10000 kernels"),
        (
            f"cache why {SPEC.replace(' ', '')}",
            FAILED,
            "not found",
        ),
    ],
)
def test_every_command_handles_them(words: str, code: int, output: str) -> None:
    """No command takes seconds for one pass over the folder."""
    result = run(*words.split())
    assert result.exit_code == code, result.stderr
    assert output in result.stdout


def test_a_thousand_can_be_verified_and_removed(cache_dir: Path) -> None:
    """Most are removed by size, the rest at once."""
    fill(cache_dir, 1000)

    verified = run("cache verify")
    pruned = run("cache prune --max-size 1M")
    cleared = run("cache clear --yes")

    kept = int(cleared.stdout.split()[1])
    assert verified.stdout == "1000 entries: 1000 valid, 0 bad\n"
    assert f"removed {1000 - kept} kernels, " in pruned.stdout
    assert 0 < kept < 200
    assert list(cache_dir.glob("v2/*/*")) == []
