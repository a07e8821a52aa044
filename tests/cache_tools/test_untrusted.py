"""Untrusted caches: every command rejects a cache that other users can change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_tools.options.exit_codes import CACHE_UNUSABLE, DONE, FAILED
from tests.cache.builds import TOOLCHAIN
from tests.cache.bundle_cases import filled_store, key_for
from tests.faults.strangers import give_away
from tests.fixture_types import Patch

from .altered import damage, move_to_layer, snapshot
from .conftest import Setting, run

KEY = key_for("mla_sm80").digest

# Words of commands; the bundle is a file, and out an empty folder.
COMMANDS = {
    **{name: name for name in ("gc", "ls", "stats", "verify")},
    **{name: f"{name} {KEY}" for name in ("rm", "show", "why")},
    "clear": "clear --yes",
    "prune": "prune --max-size 0",
    "verify --remove": "verify --remove",
    "export": "export out/kernels.tar.gz",
    "export --wheel": "export out --wheel our-kernels",
    "push": "push file://out/kernels.tar.gz",
    "import": "import bundle.tar.gz",
}
every_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)


def path_of(root: Path, name: str) -> Path:
    """Return a folder of the cache by its name."""
    shard = root / "v2" / KEY[:2]
    return {"shard": shard, "entry": shard / f"{KEY}.{TOOLCHAIN}"}.get(name, root / name)


def require_rejection(root: Path, command: str, *unchanged: Path) -> None:
    """Require that a command ends with one line and code 4, and that nothing changes."""
    before = [snapshot(folder) for folder in (root, *unchanged)]
    result = run(f"cache {command}")
    assert result.exit_code == CACHE_UNUSABLE, result.stdout + result.stderr
    steps = ("verif", "pack", "publishing")
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith(steps)]
    assert line.startswith("mlagen: cache: expected a trusted folder, got ")
    assert result.stdout == ""
    assert [snapshot(folder) for folder in (root, *unchanged)] == before
    assert list(Path("out").iterdir()) == []


@pytest.fixture
def root(tmp_path: Path, cache_dir: Path, monkeypatch: Patch) -> Path:
    """Return a cache of two kernels, one of them damaged and bundled, beside the folder `out`."""
    filled_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    run("cache export bundle.tar.gz", KEY)
    damage(path_of(cache_dir, "entry"))
    return cache_dir


Spoil = Callable[[Path, Patch], object]
OPEN: dict[str, Spoil] = {
    "all may write": lambda place, _: place.chmod(place.stat().st_mode | 0o022),
    "another user's": give_away,
}
every_stranger = pytest.mark.parametrize("spoil", OPEN.values(), ids=OPEN)


@every_stranger
@every_command
@pytest.mark.parametrize("place", ["", "v2", "shard"])
def test_every_command_rejects_a_cache_that_others_can_change(
    place: str, command: str, spoil: Spoil, root: Path, monkeypatch: Patch
) -> None:
    """Nothing is deleted, moved, exported or reported valid; only `cache dir` ends with code 0."""
    spoil(path_of(root, place), monkeypatch)
    require_rejection(root, command)
    where = run("cache dir")
    assert (where.exit_code, where.stdout) == (DONE, f"{root}\n")


@pytest.mark.parametrize("trust", ["", "1"], ids=["own", "shared"])
@every_command
@pytest.mark.parametrize("place", ["v2", "shard"])
def test_no_command_follows_a_link(
    place: str, command: str, trust: str, root: Path, tmp_path: Path, setting: Setting
) -> None:
    """The target of a link is unchanged, whether others are trusted or not."""
    setting("MLAGEN_TRUST_SHARED", trust)
    victim, link = tmp_path / "victim", path_of(root, place)
    link.rename(victim)
    for path in (victim, *victim.iterdir()):
        os.utime(path, (0, 0))  # older than the sweep's limit
    link.symlink_to(victim)

    require_rejection(root, command, victim)


@every_command
def test_a_link_in_the_place_of_an_entry_is_damage_and_not_followed(
    command: str, root: Path, tmp_path: Path
) -> None:
    """The link itself may be removed; its target is unchanged."""
    victim, link = tmp_path / "victim", path_of(root, "entry")
    link.rename(victim)
    link.symlink_to(victim)
    before = victim.read_bytes()

    result = run(f"cache {command}")

    name = command.split(maxsplit=1)[0]
    unusable, failed = {"show", "why"}, {"verify", "export", "push"}
    assert "Traceback" not in result.stderr
    assert victim.read_bytes() == before
    assert (result.exit_code == CACHE_UNUSABLE) or name not in unusable
    assert (result.exit_code == FAILED) or name not in failed
    assert list(Path("out").iterdir()) == []


@every_stranger
@pytest.mark.parametrize("name", ["verify", "verify --remove", "export", "push"])
def test_a_file_that_others_can_change_is_not_read(
    name: str, spoil: Spoil, root: Path, monkeypatch: Patch
) -> None:
    """A trusted folder does not make a writable file trusted."""
    other = next(path for path in root.glob("v2/*/*") if not path.name.startswith(KEY))
    spoil(other, monkeypatch)
    run("cache rm", KEY)
    require_rejection(root, COMMANDS[name])


@pytest.mark.parametrize("name", ["ls", "verify", "stats", "export", "push"])
def test_a_layer_that_others_change_is_rejected(name: str, root: Path, monkeypatch: Patch) -> None:
    """--layers reports why a layer is rejected."""
    layer = move_to_layer(root, monkeypatch)
    (layer / "v2").chmod(0o777)
    option = "" if name == "stats" else " --layers"
    require_rejection(root, COMMANDS[name] + option, layer)
