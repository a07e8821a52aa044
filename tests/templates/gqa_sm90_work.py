"""The schedule_range.cuh and tile_scheduler.cuh of gqa_sm90 as Python, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

WARP_LANES = 4  # fewer than there are, so that each has several requests


class Request(NamedTuple):
    """RequestFacts, as far as dividing work goes."""

    tiles: int  # of tokens
    units: int


@dataclass(frozen=True)
class Params:
    """What the division depends on."""

    requests: tuple[Request, ...]
    teams: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """Span."""

    total: int
    spans: int
    index: int
    begin: int
    end: int


@dataclass
class Walk:
    """WalkState."""

    request: int
    unit: int
    unit_begin: int


class Item(NamedTuple):
    """Item, as far as dividing work goes."""

    team: int
    request: int
    unit: int
    first_tile: int
    last_tile: int
    pieces: int
    piece: int
    first_span: int


def unit_length(request: Request) -> int:
    """Return the positions of a unit on the line."""
    return max(request.tiles, 1)


def line_length(request: Request) -> int:
    """Return those of a request."""
    return request.units * unit_length(request)


def span_begin(index: int, total: int, spans: int) -> int:
    """Return where a span begins."""
    return index * total // spans


def span_at(position: int, span: Span) -> int:
    """Return the span that a position lies on."""
    return ((position + 1) * span.spans - 1) // span.total


def find_span(params: Params, team: int) -> tuple[Span, Walk] | None:
    """Return the span of a team and the unit that it begins in."""
    count = len(params.requests)
    each = -(-count // WARP_LANES)
    own = [
        sum(line_length(request) for request in params.requests[lane * each : (lane + 1) * each])
        for lane in range(WARP_LANES)
    ]
    through = [sum(own[: lane + 1]) for lane in range(WARP_LANES)]
    total = through[-1]
    spans = min(params.teams, total)
    if team >= spans:
        return None
    begin, end = (span_begin(index, total, spans) for index in (team, team + 1))
    lane = next(lane for lane in range(WARP_LANES) if through[lane] > begin)
    position = through[lane] - own[lane]
    request = lane * each
    while begin - position >= line_length(params.requests[request]):
        position += line_length(params.requests[request])
        request += 1
    length = unit_length(params.requests[request])
    unit = (begin - position) // length
    span = Span(total=total, spans=spans, index=team, begin=begin, end=end)
    return span, Walk(request, unit, position + unit * length)


def item_at(params: Params, span: Span, walk: Walk) -> Item:
    """Return the item that a walk is at."""
    length = unit_length(params.requests[walk.request])
    tiles = params.requests[walk.request].tiles
    unit_end = walk.unit_begin + length
    begin = max(span.begin, walk.unit_begin) - walk.unit_begin
    end = min(span.end, unit_end) - walk.unit_begin
    pieces, piece, first_span = 1, 0, span.index
    if begin > 0 or walk.unit_begin + end < unit_end:
        first_span = span_at(walk.unit_begin, span)
        pieces = span_at(unit_end - 1, span) - first_span + 1
        piece = span.index - first_span
    return Item(
        team=span.index,
        request=walk.request,
        unit=walk.unit,
        first_tile=begin,
        last_tile=min(end, tiles),
        pieces=pieces,
        piece=piece,
        first_span=first_span,
    )


def go_on(params: Params, span: Span, walk: Walk) -> bool:
    """Go to the next unit; return whether it begins on the span."""
    walk.unit_begin += unit_length(params.requests[walk.request])
    if walk.unit_begin >= span.end:
        return False
    walk.unit += 1
    if walk.unit < params.requests[walk.request].units:
        return True
    walk.unit = 0
    walk.request += 1
    while params.requests[walk.request].units == 0:
        walk.request += 1
    return True


def items_of(params: Params, team: int) -> Iterator[Item]:
    """Yield what a block of a team computes, in order."""
    found = find_span(params, team)
    if found is None:
        return
    span, walk = found
    yield item_at(params, span, walk)
    while go_on(params, span, walk):
        yield item_at(params, span, walk)
