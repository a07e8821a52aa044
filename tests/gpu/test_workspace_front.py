"""The front of a large workspace is not written: FlashInfer keeps semaphores there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mlagen
from mlagen.mla.flare import run_mla
from tests.problems.entry_points import decode, decode_gqa
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, mla_case
from tests.sm90_tiles import IS_SM90, choose_kernel, smaller_tiles

_FRONT = 8 << 20
_BYTES = 128 << 20


@pytest.fixture(params=["sm90", "sm80"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every call use one kind of kernel, and split its sequences."""
    if request.param == "sm90" and not IS_SM90:
        pytest.skip("needs an sm_90 GPU")
    choose_kernel(monkeypatch, request.param)
    with smaller_tiles(monkeypatch, enabled=False):
        yield


@pytest.fixture
def workspace() -> Iterator[torch.Tensor]:
    """Return a workspace; after the test its front is unchanged and its end was used."""
    memory = torch.full((_BYTES,), 0x5A, dtype=torch.uint8, device="cuda")
    yield memory
    assert (memory[:_FRONT] == 0x5A).all()
    assert not (memory[-(1 << 20) :] == 0x5A).all()


LARGE = ((20_000, 3), (9000,) * 5)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("seq_lens", LARGE, ids=["one", "some"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "bf16 over fp8_ds_mla"])
def test_mla(kind: str, seq_lens: tuple[int, ...], workspace: torch.Tensor) -> None:
    """Calls have the max number of rows per sequence."""
    problem = mla_case(kind, seq_lens=seq_lens, heads=128).build("cuda")

    out, lse = run_mla(*problem.inputs(workspace_buffer=workspace, return_lse=True))

    problem.check(out, lse)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
def test_gqa(kv: str, workspace: torch.Tensor) -> None:
    """Long sequences are split."""
    problem = GqaCase(seq_lens=(20_000, 9000), kv=kv, group=8).build("cuda")

    problem.check(decode_gqa(problem, workspace_buffer=workspace))


@pytest.mark.usefixtures("_kernel")
def test_overlapping_views_of_one_buffer(workspace: torch.Tensor) -> None:
    """Interleaved calls in views with equal start or end are right."""
    problem = MlaCase(seq_lens=(9000, 70), heads=64).build("cuda")
    needed = mlagen.workspace_bytes(batch=2, q_len=1, heads=64, max_seq_len=9000)
    views: list[Any] = [
        workspace[_FRONT:],
        workspace[_FRONT : _FRONT + needed + 1],  # unaligned end
        workspace[_FRONT : 2 * _FRONT + needed],
        workspace[-needed // 16 * 16 :],
        workspace[_FRONT:].view(torch.float32),
    ]
    outs = [torch.empty_like(decode(problem)) for _ in range(3 * len(views))]

    for turn, out in enumerate(outs):
        decode(problem, workspace_buffer=views[turn % len(views)], out=out)

    problem.check(outs[0])
    for out in outs[1:]:
        assert torch.equal(out, outs[0])
