"""Untrusted caches: every command rejects a cache that other users can change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_tools.options.exit_codes import CACHE_UNUSABLE, DONE, FAILED
from mlagen.settings import current_settings
from tests.cache.bundle_cases import filled_store, key_for
from tests.faults.strangers import give_away

from .altered import damage, move_to_layer, snapshot
from .conftest import Run

KEY = key_for("mla_sm80").digest

COMMANDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("gc", "ls", "stats", "verify")},
    **{name: (name, KEY) for name in ("rm", "show", "why")},
    "clear": ("clear", "--yes"),
    "prune": ("prune", "--max-size", "0"),
    "verify --quarantine": ("verify", "--quarantine"),
    "export": ("export", "OUT/kernels.tar.gz"),
    "export --wheel": ("export", "OUT", "--wheel", "our-kernels"),
    "push": ("push", "file://OUT/kernels.tar.gz"),
    "import": ("import", "BUNDLE"),
}


@pytest.fixture
def bundle(tmp_path: Path, run: Run, cache_dir: Path) -> Path:
    """Fill the cache, bundle half of it, and damage one kernel."""
    filled_store(cache_dir.parent)
    bundle = tmp_path / "bundle.tar.gz"
    run("cache", "export", str(bundle), KEY)
    damage(path_of(cache_dir, "entry"))
    (tmp_path / "out").mkdir()
    return bundle


def words(command: tuple[str, ...], bundle: Path) -> list[str]:
    """Return the words of a command line."""
    out = bundle.with_name("out")
    return [word.replace("OUT", str(out)).replace("BUNDLE", str(bundle)) for word in command]


def path_of(cache_dir: Path, name: str) -> Path:
    """Return a folder of the cache by its name."""
    key = cache_dir / "v1/e" / KEY[:2] / KEY
    named = {"shard": key.parent, "key": key, "entry": key / "nvrtc-13.5.37"}
    return named.get(name, cache_dir / name)


OPEN: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "all may write": lambda place, _: place.chmod(0o777),
    "another user's": give_away,
}


def require_rejection(
    run: Run, command: tuple[str, ...], bundle: Path, cache_dir: Path, victim: Path
) -> None:
    """Require that a command ends with one line and code 4, and that nothing changes."""
    before = [snapshot(folder) for folder in (cache_dir, victim)]

    result = run("cache", *words(command, bundle))

    assert result.exit_code == CACHE_UNUSABLE, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("verif", "pack"))]
    (line,) = [line for line in lines if not line.startswith("publishing")]
    assert line.startswith("mlagen: cache: expected a trusted folder, got ")
    assert result.stdout == ""
    assert [snapshot(folder) for folder in (cache_dir, victim)] == before
    assert list(bundle.with_name("out").iterdir()) == []


@pytest.mark.parametrize("spoil", OPEN.values(), ids=OPEN)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("place", ["", "v1/e", "v1/quarantine", "key"])
def test_every_command_rejects_a_cache_that_others_can_change(
    place: str,
    command: tuple[str, ...],
    spoil: Callable[[Path, pytest.MonkeyPatch], object],
    bundle: Path,
    run: Run,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is deleted, moved, exported or reported valid; the error is one line, the code 4."""
    (cache_dir / "v1/quarantine").mkdir(mode=0o700)
    spoil(path_of(cache_dir, place), monkeypatch)

    require_rejection(run, command, bundle, cache_dir, tmp_path / "out")


@pytest.mark.parametrize("trust", ["", "1"], ids=["own", "shared"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("place", ["v1", "v1/e", "v1/staging", "v1/quarantine", "shard", "key"])
def test_no_command_follows_a_link(
    place: str,
    command: tuple[str, ...],
    trust: str,
    bundle: Path,
    run: Run,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target of a link is unchanged, whether others are trusted or not."""
    monkeypatch.setenv("MLAGEN_TRUST_SHARED", trust)
    current_settings.cache_clear()
    victim, link = tmp_path / "victim", path_of(cache_dir, place)
    if link.exists():
        link.rename(victim)
    else:
        (victim / "photos").mkdir(parents=True)
        (victim / "photos/one").write_bytes(b"precious")
    for path in (victim, *victim.iterdir()):
        os.utime(path, (0, 0))  # older than the sweep's limit
    link.symlink_to(victim)

    require_rejection(run, command, bundle, cache_dir, victim)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_link_in_the_place_of_an_entry_is_damage_and_not_followed(
    command: tuple[str, ...], bundle: Path, run: Run, cache_dir: Path, tmp_path: Path
) -> None:
    """The link itself may be removed or moved; its target is unchanged."""
    victim, link = tmp_path / "victim", path_of(cache_dir, "entry")
    link.rename(victim)
    link.symlink_to(victim)
    before = snapshot(victim)

    result = run("cache", *words(command, bundle))

    assert "Traceback" not in result.stderr
    assert snapshot(victim) == before
    if command[0] in {"show", "why"}:
        assert result.exit_code == CACHE_UNUSABLE
    elif command[0] in {"verify", "export", "push"}:
        assert result.exit_code == FAILED
    assert list(bundle.with_name("out").iterdir()) == []


READING = {name: COMMANDS[name] for name in ("verify", "verify --quarantine", "export", "push")}


@pytest.mark.parametrize("file", ["manifest.json", "kernel.cubin", "kernel.cu"])
@pytest.mark.parametrize("spoil", ["all may write", "another user's"])
@pytest.mark.parametrize("command", READING.values(), ids=READING)
def test_a_file_that_others_can_change_is_not_read(
    command: tuple[str, ...],
    spoil: str,
    file: str,
    bundle: Path,
    run: Run,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trusted folder does not make a writable file trusted."""
    other = next(path for path in (cache_dir / "v1/e").glob("*/*/*") if path.parent.name != KEY)
    if spoil == "all may write":
        (other / file).chmod(0o666)
    else:
        give_away(other / file, monkeypatch)
    run("cache", "rm", KEY)

    require_rejection(run, command, bundle, cache_dir, tmp_path / "out")


@pytest.mark.parametrize("name", ["ls", "verify", "stats", "export", "push"])
def test_a_layer_that_others_can_change_is_rejected(
    name: str, bundle: Path, run: Run, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--layers reports why a layer is rejected."""
    layer = move_to_layer(cache_dir, monkeypatch)
    (layer / "v1/e").chmod(0o777)
    options = () if name == "stats" else ("--layers",)

    require_rejection(run, (*COMMANDS[name], *options), bundle, layer, layer)


def test_an_untrusted_cache_can_be_diagnosed(bundle: Path, run: Run, cache_dir: Path) -> None:
    """`cache dir` prints its path, and `doctor` its problem."""
    assert bundle.exists()
    cache_dir.chmod(0o777)

    where, doctor = run("cache", "dir"), run("doctor")

    assert (where.exit_code, where.stdout) == (DONE, f"{cache_dir}\n")
    assert doctor.exit_code == FAILED
    assert "mode 0777, which lets others write" in " ".join(doctor.stdout.split())
