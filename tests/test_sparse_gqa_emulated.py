"""Sparse grouped-query decode on the CPU: the source of the kernels, with fibers for threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from mlagen.families.common import launchers
from mlagen.families.common.launchers import Launcher
from mlagen.families.dispatch import GQA
from mlagen.families.gqa import launch as gqa_launch
from mlagen.families.gqa import plan as gqa_plan
from mlagen.families.gqa import tensor_maps as gqa_maps
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.problem import check_problem
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from tests.emulator import emulated
from tests.emulator.emulated import COMPILER, encode, replace_launches
from tests.families.launches import record_launches
from tests.kernels import SM_80, SM_90A
from tests.problems.head_tables import HEAD_TABLES_CASES, check_head_tables
from tests.problems.sparse_gqa import SparseCase, decode_sparse
from tests.problems.sparse_gqa_cases import CASES, FP16, MSA_CASES, QSA_CASES, msa, qsa
from tests.problems.top_k import TOP_K_CASES, check_top_k

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# One split of each list, and several; with and without an instruction for e4m3.
_GPUS = ((SM_80, 1), (SM_90A, 40), (SM_80, 12))
_MAX_CTAS = 64

Check = Callable[..., None]
Emulate = Callable[..., None]
_COUNTERS = (ctypes.c_uint32 * (2 * _MAX_CTAS))()


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """Return what lets calls run by emulated launches."""

    def begin(sm_count: int, arch: Arch, *, is_sm90: bool) -> None:
        record_launches(monkeypatch, arch=arch)

        def run(args: GqaArgs, *_: object) -> tuple[torch.Tensor, ...]:
            args = args._replace(workspace_buffer=torch.full((1 << 24,), 0xFF, dtype=torch.uint8))
            problem = check_problem(args)
            on_gpu: Any = replace(problem, device=torch.device("cuda", 0))
            if is_sm90:
                launcher: Launcher = gqa_launch.make_sm90_launcher(args, on_gpu, current_settings())
            else:
                launcher = GQA.family.sm80_launcher(args, on_gpu)
            return GQA.launch(replace(launcher, problem=problem), args)

        replace_launches(monkeypatch, gqa_plan, sm_count=sm_count, seed=sm_count)
        monkeypatch.setattr(gqa_maps, "encode", encode)
        monkeypatch.setattr(launchers, "semaphores_of", lambda *_: ctypes.addressof(_COUNTERS))
        monkeypatch.setattr(GQA, "run", run)

    return begin


@pytest.fixture
def check(emulate: Emulate) -> Check:
    """Return what checks the result of emulated launches."""

    def run_case(
        case: SparseCase, sm_count: int, arch: Arch, *, is_sm90: bool, **changes: object
    ) -> None:
        emulate(sm_count, arch, is_sm90=is_sm90)
        problem = case.build("cpu")

        problem.check(*decode_sparse(problem, **changes), natural=True)
        assert not any(_COUNTERS)

    return run_case


@pytest.mark.parametrize(
    ("case", "arch", "sm_count"),
    [(case, *gpu) for case, gpu in zip(CASES, cycle(_GPUS), strict=False)],
    ids=str,
)
def test_every_edge_case_is_right_on_sm80(
    case: SparseCase, arch: Arch, sm_count: int, check: Check
) -> None:
    """Within the tolerance of float64; all that no index names is NaN."""
    check(case, sm_count, arch, is_sm90=False)


@pytest.mark.parametrize(
    ("case", "sm_count"), list(zip(MSA_CASES, cycle((1, 7, 40)), strict=False)), ids=str
)
def test_every_edge_case_of_blocks_is_right_on_sm90(
    case: SparseCase, sm_count: int, check: Check
) -> None:
    """In whole work tiles and in splits."""
    check(case, sm_count, SM_90A, is_sm90=True)


@pytest.mark.parametrize(
    ("case", "sm_count"), list(zip(QSA_CASES, cycle((1, 7, 40)), strict=False)), ids=str
)
def test_every_edge_case_of_tokens_is_right_on_sm90(
    case: SparseCase, sm_count: int, check: Check
) -> None:
    """The same, gathered."""
    check(case, sm_count, SM_90A, is_sm90=True)


@pytest.mark.parametrize("is_sm90", [False, True], ids=["sm80", "sm90"])
def test_fixed_splits_are_right(is_sm90: bool, check: Check) -> None:
    """Lists of several fixed splits, gated too."""
    blocks = msa("", seq_lens=(2600, 130), num_indices=19, kv_heads=1, head_dim=64)
    tokens = qsa("", seq_lens=(2600,), requests=(0, 0), num_indices=2051, kv_heads=1, gate=True)
    for case in (blocks,) if is_sm90 else (blocks, tokens):
        check(case, 7, SM_90A, is_sm90=is_sm90, batch_invariant=True)


@pytest.mark.parametrize("is_sm90", [False, True], ids=["sm80", "sm90"])
def test_bits_do_not_depend_on_the_width_of_indices(is_sm90: bool, emulate: Emulate) -> None:
    """One fixed split, and more behind it that no index is in."""
    shape: dict[str, Any] = {"num_indices": 8, "kv_heads": 1, "group": 16, "head_dim": 256}
    case = msa("", seq_lens=(1100,) * 4, indices="valid", output_scale=0.7, dtype=FP16, **shape)
    problem = case.build("cpu")
    results = []
    for spare, sm_count in ((0, 7), (1, 3), (30, 5)):
        emulate(sm_count, SM_90A, is_sm90=is_sm90)
        wide = torch.nn.functional.pad(problem.indices, (0, spare), value=-1)
        results.append(decode_sparse(problem, q2k_indices=wide, batch_invariant=True))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_gathered_scales_of_nvfp4_may_lie_at_any_byte(emulate: Emulate) -> None:
    """Rows of scales that are not aligned to their size are copied byte by byte."""
    case = qsa("", seq_lens=(300, 70), requests=(1, 0, 0), kv="nvfp4", gate=True)
    problem = case.build("cpu")
    names, changes = ("k_sf", "v_sf"), problem.arguments()
    wide = {name: torch.nn.functional.pad(changes[name], (1, 2), value=0x7F) for name in names}
    emulate(7, SM_90A, is_sm90=True)

    moved = {name: each[..., 1:-2] for name, each in wide.items()}
    problem.check(*decode_sparse(problem, **moved), natural=True)


def test_block_tables_of_each_kv_head_are_right(emulate: Emulate) -> None:
    """Whole and split, in fixed splits too."""
    for sm_count, case in zip(cycle((1, 12)), HEAD_TABLES_CASES, strict=False):
        emulate(sm_count, SM_80, is_sm90=False)
        check_head_tables(case, "cpu")
    check_head_tables(HEAD_TABLES_CASES[0], "cpu", batch_invariant=True)


@pytest.mark.parametrize("is_sm90", [False, True], ids=["sm80", "sm90"])
def test_top_k_indices_are_right(is_sm90: bool, emulate: Emulate) -> None:
    """In one split of each list, and in several."""
    for sm_count, case in zip(cycle((1, 30)), TOP_K_CASES, strict=False):
        emulate(sm_count, SM_90A if is_sm90 else SM_80, is_sm90=is_sm90)
        check_top_k(case, "cpu")
    check_top_k(TOP_K_CASES[0], "cpu", top_k=200)


def test_what_is_kept_of_the_emulator_is_made_of_all_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another option of any of its commands compiles again."""
    used: list[str] = []

    def build(name: str, make: Callable[[Path], object], made_of: Iterable[str | bytes]) -> Path:
        made_of_all = b"".join(
            each if isinstance(each, bytes) else each.encode() for each in made_of
        )
        used.clear()
        make(tmp_path / name)
        assert [each for each in used if each.encode() not in made_of_all] == []
        assert used
        return tmp_path / name

    def compile_(*arguments: str) -> None:
        used.extend(each for each in arguments if each.startswith("-"))

    monkeypatch.setattr(emulated, "built_once", build)
    monkeypatch.setattr(emulated, "_compile", compile_)
    monkeypatch.setattr(ctypes, "CDLL", str)

    assert str(emulated.compile_host("int one;")) == str(tmp_path / "kernel.so")
