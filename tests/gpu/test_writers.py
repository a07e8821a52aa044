"""Writers of caches on a GPU: the tests of every device, CUDA graphs, and no waits."""

from __future__ import annotations

import pytest
import torch

from tests.device_sync import no_device_sync
from tests.graph_replay import captured
from tests.writers.numpy_prologue import NOTHING
from tests.writers.test_writers import (
    APPEND,
    FILL,
    PAGED,
    Filled,
    Paged,
    TestAppend,
    TestWriters,
    _nvfp4,
    formats,
    prologues_of,
    tokens_of,
)

__all__ = ["TestAppend", "TestWriters", "_nvfp4"]


@pytest.mark.parametrize("has_prologue", [False, True], ids=["plain", "prologue"])
@formats
def test_graphs_follow_tokens_slots_and_positions(name: str, has_prologue: bool) -> None:
    """Replays write what is in the tensors then, also where no token has a slot."""
    pool = Filled(name, "cuda")
    last, prologue = pool.capacity - 1, NOTHING
    if has_prologue:
        prologue = prologues_of(name, 4, torch.bfloat16)[-1]
    words = prologue.words("cuda")
    tokens, slots = tokens_of(name, 4).cuda(), torch.tensor([-1, -1, -1, -1], device="cuda")
    graph = captured(lambda: APPEND[name](tokens, slots, pool.cache, pool.scales, **words))
    assert (pool.memory == FILL).all()

    for seed, given in enumerate(([0, last, 2, 2], [-1, 1, -1, 1], [-1, -1, last + 1, -7])):
        new = tokens_of(name, 4, seed=seed)
        tokens.copy_(new)
        slots.copy_(torch.tensor(given))
        if prologue.positions is not None:
            prologue = prologue._replace(positions=prologue.positions.roll(1))
            words["positions"].copy_(prologue.positions)
        graph.replay()

        pool.write_expected(prologue.of(new) if has_prologue else new, given)
        pool.check()


@formats
def test_a_write_does_not_wait_for_the_device(name: str) -> None:
    """The host enqueues it."""
    pool, tokens = Filled(name, "cuda"), tokens_of(name, 4).cuda()
    slots = torch.tensor([3, 1, 3, -1], device="cuda")
    for prologue in (NOTHING, *prologues_of(name, 4, torch.bfloat16)):
        words = prologue.words("cuda")
        APPEND[name](tokens, slots, pool.cache, pool.scales, **words)
        with no_device_sync():
            APPEND[name](tokens, slots, pool.cache, pool.scales, **words)


@pytest.mark.parametrize("rope", [64, 32], ids=["kernel", "torch"])
def test_graphs_append_to_pages_without_a_wait(rope: int) -> None:
    """Replays write tokens to the positions that are in the tensors then."""
    paged = Paged()
    tokens = tokens_of("656", len(paged.requests))[:, : 512 + rope].contiguous().cuda()
    cache = torch.zeros(7, 4, 512 + rope, dtype=tokens.dtype, device="cuda")
    parts, caches = ((one[..., :512], one[..., 512:]) for one in (tokens, cache))
    requests, positions, *others = paged.tensors("cuda")
    given = [torch.full_like(requests, -1), torch.zeros_like(positions)]

    def append() -> None:
        PAGED(*parts, *given, *caches, *others)

    append()
    with no_device_sync():
        append()
    graph = captured(append)
    assert not cache.any()
    given[0].copy_(requests)
    given[1].copy_(positions)
    graph.replay()

    assert torch.equal(cache.cpu().view(28, -1), paged.written(tokens, 4, 7))


@formats
def test_the_first_of_equal_slots_is_written_in_every_launch(name: str) -> None:
    """Hundreds of tokens for a few slots, in 100 launches."""
    pool, generator = Filled(name, "cuda"), torch.Generator().manual_seed(0)
    tokens = tokens_of(name, 700)
    given = torch.randint(-1, 9, (700,), generator=generator).tolist()
    pool.write_expected(tokens, given)
    tokens, slots = tokens.cuda(), torch.tensor(given, device="cuda")
    for _ in range(100):
        pool.memory.fill_(FILL)
        pool.scales.fill_(-1.0)
        APPEND[name](tokens, slots, pool.cache, pool.scales)

        pool.check()
