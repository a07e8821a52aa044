"""Isolation: no test touches the user's cache, and GPU tests run only on a GPU."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mlagen import jit
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla import plan as plan_mla_sm90
from mlagen.settings import current_settings
from tests.built_once import share_in
from tests.kernels import clear_caches, copy_templates

ROOT = Path(__file__).resolve().parents[1]
GPU_TESTS = ROOT / "tests/gpu"

# Pytest rewrites the asserts of modules that tests share.
pytest.register_assert_rewrite(
    *(f"tests.{path.stem}" for path in sorted(Path(__file__).parent.glob("*_semantics.py"))),
    *("tests.problems", "tests.graph_replay"),
)

# Tensors are small, so threads cost more in synchronization than they save.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of orders in which an emulated kernel runs."""
    parser.addoption(
        "--orders",
        type=int,
        default=2,
        metavar="N",
        help="Orders of warps, CTAs and copies in which each case of an emulated kernel runs.",
    )


@pytest.fixture
def orders(request: pytest.FixtureRequest) -> range:
    """Return the seeds of the orders in which warps, CTAs and copies come."""
    return range(request.config.getoption("--orders"))


def _wants_gpu(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over tests/gpu, half of all tests, where ``make cpu`` would deselect them."""
    is_left_out = collection_path == GPU_TESTS and config.getoption("markexpr") == "not gpu"
    return is_left_out or None  # None lets others decide


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests in tests/gpu, and skip them without a GPU.

    Where `make gpu` expects a GPU, a torch that does not see it is an error.
    """
    if os.environ.get("HAS_GPU") and not torch.cuda.is_available() and _wants_gpu(config):
        raise pytest.UsageError("torch: expected to see the GPU of this machine, got none")
    for item in items:
        if item.path.parent == GPU_TESTS:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the collected tests; it took a twentieth of the time."""
    gc.freeze()


@pytest.fixture(scope="session")
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run, which its workers share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


@pytest.fixture(scope="session")
def session_cache_dir(run_dir: Path) -> Path:
    """Return a cache folder shared by the tests of a run, or of several concurrent runs."""
    folder = Path(os.environ.get("MLAGEN_TEST_CACHE") or run_dir / "kernels")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def shared_builds(run_dir: Path) -> None:
    """Share what is built once among the workers of a run, and with later runs."""
    share_in(run_dir / "built_once")


# Settings of the user that tests must not inherit.
OTHER_SETTINGS = (
    *("MLAGEN_CACHE_RO", "MLAGEN_TRUST_SHARED", "MLAGEN_CACHE_MAX_SIZE", "MLAGEN_TOOLCHAIN"),
    *("MLAGEN_JIT", "MLAGEN_RECORD", "MLAGEN_MLA_P_DTYPE", "MLAGEN_LOG", "MLAGEN_LINEINFO"),
    *("MLAGEN_DUMP", "MLAGEN_DUMP_TENSORS"),
)


@pytest.fixture
def device() -> str:
    """Return the device of a test that every device runs; tests/gpu has its own."""
    return "cpu"


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """Return the cache folder of one test; it does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def isolated_settings(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path
) -> Iterator[None]:
    """Point the cache and the locks to the test's own folder; GPU tests share one cache."""
    is_gpu_test = request.node.get_closest_marker("gpu") is not None
    folder = request.getfixturevalue("session_cache_dir") if is_gpu_test else cache_dir
    # Small calls use the sm90 kernel too, with the tiles of large ones.
    if os.environ.get("MLAGEN_TEST_HOPPER") == "1":
        monkeypatch.setattr(plan_mla_sm90, "is_small_call", lambda *_: False)
        monkeypatch.setattr(mla_plan, "choose_block_m", lambda spec, *_: spec.block_m)
    # A busy machine must not add a warning to those that a test counts.
    monkeypatch.setattr(jit, "_SLOW_S", 120.0)
    for name in OTHER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLAGEN_CACHE_DIR", str(folder))
    monkeypatch.setenv("MLAGEN_LOCK_DIR", str(tmp_path / "locks"))
    current_settings.cache_clear()
    logger = logging.getLogger("mlagen")
    level, handlers = logger.level, logger.handlers[:]
    yield
    current_settings.cache_clear()
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the templates that mlagen reads during the test."""
    copy = copy_templates(tmp_path, monkeypatch)
    clear_caches()
    yield copy
    monkeypatch.undo()
    clear_caches()
