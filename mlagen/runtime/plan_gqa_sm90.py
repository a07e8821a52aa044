"""How a GQA problem is spread over a Hopper GPU: one grid, whatever the lengths are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from mlagen.runtime.plan import GqaProblemShape
from mlagen.spec.gqa_sm90 import GqaSm90Spec

# As RowState in kernels/gqa_sm90/shared_memory.cuh.
_ROW_STATE_BYTES = 8

# Positions on the line of work, times teams, are counted in 32 bits.
_MAX_PRODUCTS = 2**32 - 1


# Kv heads whose parts of a token are as many bytes are read together: memory is the faster for it,
# and for no more.
_MAX_TOGETHER_BYTES = 1024

# What a call takes, in microseconds, as far as the number of teams decides it: fitted to an H200,
# and of use for the order alone. See docs/measurements.md.
_BYTES_PER_US = 4_500_000  # that all SMs read
_BYTES_PER_US_OF_SM = 160_000  # and one by itself
_DECODED_PER_US_OF_SM = 85_000  # if it has to turn them into another type
_COMBINE_US = 1.3  # of having pieces to merge
_SPLIT_US = 0.1  # of each of them
_UNEVEN_US = 2.0  # of items in a block that are no whole units, and of no equal pieces
_IDLE_LOSS = 0.012  # of the rate, if any SM reads nothing
_SHARE_LOSS = 0.3  # and if none did

# Of the SMs a team size may leave so many without work, for the sake of a larger team.
_MAX_IDLE = Fraction(1, 25)


@dataclass(frozen=True, kw_only=True)
class GqaSm90Plan:
    """Blocks and workspace of one call."""

    cta_group_size: int  # neighbouring blocks that take kv heads, and tiles of rows, together
    num_cta_groups: int
    blocks: int
    row_tiles: int  # of each kv head of a request; 0 where requests differ
    num_tiles: int  # of a request; where requests differ, for each tile of rows that a kv head has
    all_tiles: int  # of all requests; of ragged ones at the most, if their offsets never go back
    partial_rows_offset: int  # bytes in the scratch: the values of pieces come first
    workspace_bytes: int


def plan_gqa_sm90(spec: GqaSm90Spec, problem: GqaProblemShape, sm_count: int) -> GqaSm90Plan:
    """Return the plan of a call.

    ``max_kv_len`` decides the speed alone: blocks find their work by the lengths that are on the
    device.
    """
    rows = spec.block_m
    row_tiles = -(-problem.q_len * (problem.heads // problem.kv_heads) // rows)
    parts = problem.kv_heads // spec.heads_per_cta * max(row_tiles, 1)
    together = max(row_tiles, _MAX_TOGETHER_BYTES // spec.token_bytes)
    cta_group_size = _cta_group_size(parts, together, sm_count)
    num_tiles = parts // cta_group_size
    all_tiles = problem.batch * num_tiles
    if not problem.q_len:
        all_tiles += problem.total_rows // (problem.kv_heads * rows) * num_tiles
    tiles = max(1, -(-problem.max_kv_len // spec.block_n))
    # Where a window begins inside a tile, there is one more.
    max_cta_groups = (
        min(sm_count // cta_group_size, all_tiles * (tiles + 1)) if problem.total_rows else 0
    )
    is_even = problem.q_len > 0  # as far as is known: else requests differ at least in their rows
    num_cta_groups = (
        _num_cta_groups(spec, all_tiles, tiles, cta_group_size, max_cta_groups)
        if is_even
        else max_cta_groups
    )
    blocks = num_cta_groups * cta_group_size
    # A block leaves two pieces at the most: values in fp32, and of each row its state.
    partial_rows = 2 * blocks * spec.heads_per_cta * rows
    partial_values = partial_rows * spec.variant.head_dim * 4
    return GqaSm90Plan(
        cta_group_size=cta_group_size,
        num_cta_groups=num_cta_groups,
        blocks=blocks,
        row_tiles=row_tiles,
        num_tiles=num_tiles,
        all_tiles=all_tiles,
        partial_rows_offset=partial_values,
        workspace_bytes=partial_values + partial_rows * _ROW_STATE_BYTES,
    )


def heads_of_block(spec: GqaSm90Spec, problem: GqaProblemShape, sm_count: int) -> int:
    """Return how many kv heads a block should take.

    As many as a kernel is for, where that leaves nearly all SMs a whole unit: memory is the faster
    for it, and half or a quarter as many items come to an end. Else one, for units of several heads
    would lie in more pieces.
    """
    heads = math.gcd(problem.kv_heads, spec.max_heads)
    plan = plan_gqa_sm90(replace(spec, heads_per_cta=heads), problem, sm_count)
    wanted = sm_count // plan.cta_group_size * (1 - _MAX_IDLE)
    return heads if problem.batch * plan.num_tiles >= wanted else 1


def fits_in_int32(spec: GqaSm90Spec, plan: GqaSm90Plan, max_tokens: int) -> bool:
    """Return whether blocks can count their work, if a request has ``max_tokens`` at the most."""
    tiles_of_tokens = max(1, -(-max_tokens // spec.block_n))
    return plan.all_tiles * tiles_of_tokens * plan.num_cta_groups <= _MAX_PRODUCTS


def _num_cta_groups(
    spec: GqaSm90Spec, num_tiles: int, tiles: int, cta_group_size: int, max_cta_groups: int
) -> int:
    """Return how many teams take the least time, if all requests are as long as the longest.

    Where several teams share a unit evenly, or a team has whole ones, there is less to begin and
    to merge; and merging many pieces may take longer than reading the tokens.
    """
    if max_cta_groups == 0:
        return 0
    even = [num_tiles * splits for splits in range(1, max_cta_groups // num_tiles + 1)]
    if not even:
        even = [
            max(
                num_cta_groups
                for num_cta_groups in range(1, max_cta_groups + 1)
                if num_tiles % num_cta_groups == 0
            )
        ]
    tile_bytes = 2 * spec.block_n * spec.token_bytes
    rate_of_sm = _DECODED_PER_US_OF_SM if spec.decodes_kv else _BYTES_PER_US_OF_SM

    def microseconds(num_cta_groups: int) -> float:
        idle = 1 - num_cta_groups / max_cta_groups
        loss = _SHARE_LOSS * idle + (_IDLE_LOSS if idle else 0.0)
        blocks = num_cta_groups * cta_group_size
        rate = min(_BYTES_PER_US * (1 - loss), rate_of_sm * blocks)
        is_even = num_cta_groups in even
        splits = -(-num_cta_groups // num_tiles) + (0 if is_even else 1)
        merging = _COMBINE_US + _SPLIT_US * splits if splits > 1 else 0.0
        reading = -(-num_tiles * tiles // num_cta_groups) * blocks * tile_bytes / rate
        return reading + merging + (0.0 if is_even else _UNEVEN_US)

    return min(
        (*even, max_cta_groups),
        key=lambda num_cta_groups: (microseconds(num_cta_groups), -num_cta_groups),
    )


def _cta_group_size(parts: int, together: int, sm_count: int) -> int:
    """Return the largest divisor of ``parts`` up to ``together`` whose teams leave few SMs idle."""
    most = min(parts, together, sm_count)
    sizes = [size for size in range(1, most + 1) if parts % size == 0]
    return max(size for size in sizes if sm_count % size <= sm_count * _MAX_IDLE)
