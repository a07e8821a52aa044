"""The files schedule_range.cuh and tile_scheduler.cuh of scheduler/ as Python, line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mlagen.codegen.sources import template_root

SPAN = (template_root() / "scheduler/schedule_range.cuh").read_text()


def constant(name: str) -> int:
    """Return a number that the CUDA source begins with."""
    found = re.search(rf"^constexpr int {name} = (\d+);", SPAN, re.MULTILINE)
    assert found is not None, name
    return int(found[1])


UNIT_COSTS = (constant("kSmallTileOverheadBlocks"), constant("kLargeTileOverheadBlocks"))
MERGE_COST = constant("kSplitOverheadBlocks")
LEAST_SPAN = constant("kMinBlocksPerRange")
MAX_SPANS = constant("kMaxRanges")
WARP_LANES = 32
THREADS = 8  # of a block; fewer than there are, so that each has several requests


@dataclass(frozen=True)
class Params:
    """What the division depends on."""

    blocks: tuple[int, ...]  # of tokens, of each request
    tiles: tuple[int, ...]  # of rows, of each request
    teams: int
    team_size: int
    unit_cost: int = UNIT_COSTS[0]

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.blocks)


class Facts(NamedTuple):
    """RequestFacts."""

    tiles: int  # for rows
    blocks: int
    groups: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """Span."""

    total: int
    spans: int
    index: int
    unit_cost: int
    begin: int
    end: int
    request: int
    group: int
    unit_begin: int


@dataclass(frozen=True, kw_only=True)
class Item:
    """Item, with where and in which order it is computed."""

    request: int
    tile: int
    first_block: int
    last_block: int
    pieces: int
    mergers: int
    piece: int
    owner: int
    block: int  # of the grid
    order: int  # among the items of that block


def ceil_div(a: int, b: int) -> int:
    """Round the quotient up."""
    return -(-a // b)


def facts_of_request(params: Params, request: int) -> Facts:
    """facts_of_request."""
    groups = ceil_div(params.tiles[request], params.team_size)
    return Facts(params.tiles[request], params.blocks[request], groups)


def line_length(facts: Facts, unit_cost: int) -> int:
    """line_length."""
    return facts.groups * (facts.blocks + unit_cost)


def aligned_spans(teams: int, units: int, blocks: int) -> int:
    """aligned_spans, with its lanes one after the other."""
    total = units * blocks
    teams = min(teams, total)
    for lane in range(WARP_LANES):
        spans = max(teams - lane, 1)
        is_aligned = units % spans == 0 or spans % units == 0
        is_cheap = total * teams <= (total + MERGE_COST * teams) * spans
        if is_aligned and is_cheap:
            return max(teams - (lane + 1) + 1, 1)
    return 0


def beginning_of(index: int, whole: int, rest: int, spans: int) -> int:
    """beginning_of."""
    return index * whole + index * rest // spans


def find_span(params: Params, team: int) -> Span | None:
    """find_span, with its threads one after the other."""
    each = ceil_div(params.requests, THREADS)
    firsts = [thread * each for thread in range(THREADS)]
    lasts = [min(first + each, params.requests) for first in firsts]
    owns = [0] * THREADS
    seen = set()  # the blocks and groups of a thread's requests
    for thread in range(THREADS):
        for request in range(firsts[thread], lasts[thread]):
            facts = facts_of_request(params, request)
            seen.add((facts.blocks, facts.groups))
            owns[thread] += line_length(facts, params.unit_cost)
    begins = [sum(owns[:thread]) for thread in range(THREADS)]
    total = sum(owns)
    blocks, groups = min(seen)
    is_uniform = blocks > 0 and groups > 0 and len(seen) == 1
    spans = max(1, min(params.teams, MAX_SPANS, total // LEAST_SPAN))
    unit_cost = params.unit_cost
    if is_uniform:
        aligned = aligned_spans(spans, params.requests * groups, blocks)
        if aligned > 0:
            spans = aligned
            unit_cost = 0
            length = groups * blocks
            total = params.requests * length
            begins = [min(first, params.requests) * length for first in firsts]
            owns = [
                max(last - first, 0) * length for first, last in zip(firsts, lasts, strict=True)
            ]
    index = spans - 1 - team
    if index < 0 or total == 0:
        return None
    whole, rest = divmod(total, spans)
    span_begin = beginning_of(index, whole, rest, spans)
    span_end = beginning_of(index + 1, whole, rest, spans)
    found = []
    for thread in range(THREADS):
        begin, own = begins[thread], owns[thread]
        if begin <= span_begin < begin + own:
            request = firsts[thread]
            facts = facts_of_request(params, request)
            while span_begin >= begin + line_length(facts, unit_cost):
                begin += line_length(facts, unit_cost)
                request += 1
                facts = facts_of_request(params, request)
            unit = facts.blocks + unit_cost
            group = (span_begin - begin) // unit
            unit_begin = begin + group * unit
            found.append(
                Span(
                    total=total,
                    spans=spans,
                    index=index,
                    unit_cost=unit_cost,
                    begin=span_begin,
                    end=span_end,
                    request=request,
                    group=group,
                    unit_begin=unit_begin,
                )
            )
    (span,) = found  # one thread writes it
    return span


def block_at(position: int, unit_begin: int, span: Span) -> int:
    """block_at."""
    return max(position - unit_begin - span.unit_cost, 0)


def span_from(position: int, span: Span) -> int:
    """span_from."""
    return (position * span.spans + span.total - 1) // span.total


def pieces_of(unit_begin: int, blocks: int, span: Span) -> tuple[int, int, bool]:
    """pieces_of: the count, the first span, and whether the last ends with the unit."""
    first_block = unit_begin + span.unit_cost
    second = span_from(first_block + 1, span)
    end = first_block + blocks
    after = span_from(end, span)
    return 1 + after - second, second - 1, after * span.total < (end + 1) * span.spans


def items_of(params: Params, span: Span, member: int) -> Iterator[Item]:
    """ItemWalk, from the first item to the last."""
    request, group, unit_begin = span.request, span.group, span.unit_begin
    facts = facts_of_request(params, request)
    order = 0

    def block_of_span(index: int) -> int:
        return (span.spans - 1 - index) * params.team_size + member

    while request < params.requests and unit_begin < span.end:
        blocks = facts.blocks
        unit_end = unit_begin + blocks + span.unit_cost
        first = block_at(span.begin, unit_begin, span) if span.begin > unit_begin else 0
        last = block_at(span.end, unit_begin, span) if span.end < unit_end else blocks
        is_here = span.begin <= unit_begin if blocks == 0 else first < last
        tile = group * params.team_size + member
        if is_here and tile < facts.tiles:
            count, first_span, end_span = 1, span.index, True
            if first > 0 or last < blocks:
                count, first_span, end_span = pieces_of(unit_begin, blocks, span)
            yield Item(
                request=request,
                tile=tile,
                first_block=first,
                last_block=last,
                pieces=count,
                mergers=count - (not end_span),
                piece=0 if first == 0 else span.index - first_span,
                owner=block_of_span(first_span),
                block=block_of_span(span.index),
                order=order,
            )
            order += 1
        # advance
        unit_begin += facts.blocks + span.unit_cost
        group += 1
        if group < facts.groups:
            continue
        group = 0
        request += 1
        while request < params.requests:
            facts = facts_of_request(params, request)
            if facts.groups:
                break
            request += 1


def all_items(params: Params) -> list[Item]:
    """Return what all blocks of the grid compute."""
    spans = [find_span(params, team) for team in range(params.teams)]
    return [
        item
        for span in spans
        if span is not None
        for member in range(params.team_size)
        for item in items_of(params, span, member)
    ]
