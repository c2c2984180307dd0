"""Divides sequences among ranks, and a rank's among its micro-batches, so that all have about the same work.

Work is counted in FLOPs: attention makes one long sequence more work than as many tokens in short ones. A family is
divided only where that pays, for then its prompt is computed once more. A *part* is a list of indices into the batch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specs.wire.sequence_work import Floats, Integers, SequenceWork

# A part may have this much of the average: nothing is moved for less. Nor is a family divided, which computes its
# prompt once more: in another rank, which would have waited, or in another micro-batch of its own.
EVEN, EVEN_RANKS, EVEN_ROWS = 1.01, 1.02, 1.05
_LIGHTEST = 4  # parts that the heaviest one tries to exchange with
Part = list[int]


def unit_shards(work: SequenceWork, unit_B: Integers, count: int, together: int = 1) -> list[Integers]:
    """Do the same as `shards`, of sequences of which those with the same number in `unit_B` go to one rank."""
    units = work.joined(unit_B)
    return [units.sequences(shard) for shard in shards(units.work, count, together)]


def shards(work: SequenceWork, count: int, together: int = 1) -> list[Integers]:
    """Split all sequences over `count` ranks, ascending: the heaviest families first, each to the rank with the least
    work; then whatever makes the heaviest rank lighter. Every rank gets a sequence as long as there are enough.
    `together` ranks after one another compute together what any of them has: work is even over such groups, and inside
    them what travels."""
    if together > 1:
        groups = shards(work, count // together)
        alone = [SequenceWork.apart(work.rows_B[group], work.rows_B[group].astype(np.float64)) for group in groups]
        return [group[mine] for group, each in zip(groups, alone, strict=True) for mine in shards(each, together)]
    if count == 1:
        return [np.arange(len(work.rows_B))]
    parts = _evened(work, [work.computed.tolist(), *([] for _ in range(count - 1))], None)
    for idle in np.flatnonzero(work.rows_B == 0).tolist():
        min(parts, key=len).append(idle)
    _occupy(parts)
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def fewest_rows(work: SequenceWork, limit: int) -> list[Part]:
    """Make parts of at most `limit` rows, as few as best-fit decreasing finds: at most 11/9 of the fewest possible,
    plus one (Johnson 1973). Families are divided where they are over the limit, and where that saves a part. No
    sequence may be over it. What is no work is left out."""
    families = _families(work)
    whole = _best_fit(work, families, limit, divide=False)
    if work.shares and len(whole) > -(-sum(families.rows) // limit):
        return min(whole, _best_fit(work, families, limit, divide=True), key=len)
    return whole


def even_rows(work: SequenceWork, limit: int, found: Sequence[Part], count: int) -> list[Part]:
    """Make as many parts as `fewest_rows` `found`, or `count` where that is more and there are enough sequences; of
    even work, as far as the limit lets them be; the heaviest first."""
    parts = [list(part) for part in found] + [[] for _ in range(count - len(found))]
    _occupy(parts)
    return [sorted(part) for part in _evened(work, parts, limit) if part]


def in_step(work: SequenceWork, limit: int, parts: Sequence[Part], heaviest: Sequence[float]) -> list[Part]:
    """Order the parts of one rank, the heaviest first, as they are computed round by round by ranks that wait for one
    another; `heaviest`: the most work that any of them has in each round. A round that is lighter here takes work of
    the last ones, which then wait for less. None is left empty."""
    parts = [list(part) for part in parts]
    flops = _flops_of(work, parts)
    for at, most in enumerate(heaviest[: len(parts)]):
        for last in range(len(parts) - 1, max(at, len(parts) - 1 - _LIGHTEST), -1):
            if EVEN * flops[at] >= most:
                break
            leaving = _filling(work, parts[last], parts[at], most, limit)
            parts[at], parts[last] = parts[at] + leaving, _exchanged(parts[last], leaving, [])
            flops[[at, last]] = work.flops(parts[at]), work.flops(parts[last])
    return parts


def _filling(work: SequenceWork, members: Part, part: Part, flops: float, limit: int) -> Part:
    """Return the members, not all of them, that `part` can take up to so much work and so many rows: of each family the
    longest that fit, the heaviest family first."""
    leaving: Part = []
    rows, flops = limit - work.rows(part), flops - work.flops(part)  # that there is room for
    there = set(work.family_B[part].tolist())
    pieces = _by_family(work, [members])[0]
    for which in np.argsort(-np.array(pieces.flops), kind="stable").tolist():
        family = pieces.members[which]
        own = zip(family, work.rows_B[family].tolist(), work.flops_B[family].tolist(), strict=True)
        number, prompt = int(work.family_B[family[0]]), int(work.prompt_B[family[0]])
        prompt_flops = float(work.prompt_flops_B[family[0]])
        for member, more_rows, more_flops in own:
            if number in there and work.shares:
                more_rows, more_flops = more_rows - prompt, more_flops - prompt_flops
            if more_rows <= rows and more_flops <= flops and len(leaving) + 1 < len(members):
                leaving.append(member)
                there.add(number)
                rows, flops = rows - more_rows, flops - more_flops
    return leaving


def _evened(work: SequenceWork, parts: Sequence[Part], limit: int | None) -> list[Part]:
    """Make as many parts of even work, first by moving families, then, where that is not even enough, sequences."""
    pieces, places = _by_family(work, parts)
    whole = SequenceWork.apart(np.array(pieces.rows), np.array(pieces.flops))
    alone = _Pieces([[number] for number in range(len(pieces.rows))], pieces.rows, pieces.flops)
    packed = _lightest_first(alone, len(parts), limit) or places
    flops = _level(whole, packed, limit, EVEN)
    divided = [[member for number in part for member in pieces.members[number]] for part in packed]
    _occupy(divided)
    if work.shares:
        flops = _level(work, divided, limit, EVEN_ROWS if limit else EVEN_RANKS)
    return [divided[at] for at in np.argsort(-flops, kind="stable").tolist()]


@dataclass(frozen=True)
class _Pieces:
    """Sequences of one family each, the longest first, with what they take in one row."""

    members: list[Part]
    rows: list[int]
    flops: list[float]


def _families(work: SequenceWork) -> _Pieces:
    """Return every family that has work."""
    return _by_family(work, [work.computed.tolist()])[0]


def _by_family(work: SequenceWork, parts: Sequence[Part]) -> tuple[_Pieces, list[Part]]:
    """Split every part by family; return the pieces and, by part, their numbers. All of a part is some work."""
    chosen = np.array([member for part in parts for member in part], dtype=np.int64)
    part = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    order = np.lexsort((-work.rows_B[chosen], work.family_B[chosen], part))
    chosen, part = chosen[order], part[order]
    family = work.family_B[chosen]
    is_first = np.ones(len(chosen), dtype=bool)
    is_first[1:] = (family[1:] != family[:-1]) | (part[1:] != part[:-1])
    starts = np.flatnonzero(is_first)
    ends = np.append(starts[1:], len(chosen))[: len(starts)]
    repeats, first = ends - starts - 1, chosen[starts]
    rows = _sums(work.rows_B[chosen], starts) - repeats * work.prompt_B[first]
    flops = _sums(work.flops_B[chosen], starts) - repeats * work.prompt_flops_B[first]
    members = chosen.tolist()
    bounds = zip(starts.tolist(), ends.tolist(), strict=True)
    last = np.searchsorted(part[starts], np.arange(len(parts)), side="right").tolist()
    places = [list(range(begin, end)) for begin, end in zip([0, *last], last, strict=False)]
    return _Pieces([members[start:end] for start, end in bounds], rows.tolist(), flops.tolist()), places


def _sums(values_N: Integers | Floats, starts: Integers) -> Integers | Floats:
    return np.add.reduceat(values_N, starts) if len(starts) else values_N[:0]


def _first_fit(work: SequenceWork, members: Part, room: int) -> Part:
    """Return the members of a family that find room where none of it is yet, the longest first."""
    prompt = int(work.prompt_B[members[0]])
    room -= prompt
    chosen = []
    for member, rows in zip(members, work.rows_B[members].tolist(), strict=True):
        if rows - prompt <= room:
            room -= rows - prompt
            chosen.append(member)
    return chosen


def _best_fit(work: SequenceWork, families: _Pieces, limit: int, *, divide: bool) -> list[Part]:
    """Place the families with most rows first, each where it leaves the least room. With `divide`, one that fits
    nowhere fills what is roomiest first."""
    parts: list[Part] = []
    rooms: list[tuple[int, int]] = []  # room and number of each part, the roomiest last
    for which in np.argsort(-np.array(families.rows), kind="stable").tolist():
        rest, rows = families.members[which], families.rows[which]
        while rest:
            at, chosen = bisect_left(rooms, (rows, -1)), rest
            if at == len(rooms) and (some := _first_fit(work, rest, rooms[-1][0]) if divide and rooms else []):
                at, chosen = at - 1, some
            elif at == len(rooms):
                rooms.append((limit, len(parts)))
                parts.append([])
                chosen = rest if rows <= limit else _first_fit(work, rest, limit)
            room, number = rooms.pop(at)
            parts[number] += chosen
            insort(rooms, (room - (rows if chosen is rest else work.rows(chosen)), number))
            rest = [] if chosen is rest else [member for member in rest if member not in chosen]
            rows = work.rows(rest) if rest else 0
    return parts


def _lightest_first(pieces: _Pieces, count: int, limit: int | None) -> list[Part] | None:
    """Place the heaviest pieces first, each to the part that has least work, then fewest sequences, of those with room
    for it. None where one finds no room, or finding it takes too long."""
    parts: list[Part] = [[] for _ in range(count)]
    heap = [(0.0, 0, number) for number in range(count)]
    room = [sum(pieces.rows) if limit is None else limit] * count
    patience = len(pieces.rows)
    for which in np.argsort(-np.array(pieces.flops), kind="stable").tolist():
        members, rows = pieces.members[which], pieces.rows[which]
        full = []
        while heap and room[heap[0][2]] < rows:
            full.append(heapq.heappop(heap))
        patience -= len(full)
        if not heap or patience < 0:
            return None
        flops, held, number = heap[0]
        heapq.heapreplace(heap, (flops + pieces.flops[which], held + len(members), number))
        parts[number] += members
        room[number] -= rows
        for each in full:
            heapq.heappush(heap, each)
    return parts


def _occupy(parts: list[Part]) -> None:
    """Give each empty part a sequence of one that has several."""
    for empty in [part for part in parts if not part]:
        fullest = max(parts, key=len)
        if len(fullest) > 1:
            empty.append(fullest.pop())


# ── evening out ───────────────────────────────────────────────────────────────────────────────────


def _level(work: SequenceWork, parts: list[Part], limit: int | None, even: float) -> Floats:
    """Move and exchange sequences between the heaviest part and the lightest for as long as that makes the heaviest
    lighter; returns the work of each. No part is left empty that was not."""
    flops = _flops_of(work, parts)
    if not len(flops):
        return flops
    for _ in range(128 if limit else min(8 * len(parts), 1024)):  # moves; between ranks they matter more
        heavy = int(flops.argmax())
        if flops[heavy] <= even * flops.mean():
            break
        for light in np.argsort(flops, kind="stable")[:_LIGHTEST].tolist():
            if light != heavy and _lighten(work, parts, flops, heavy, light, limit):
                break
        else:
            break
    return flops


def _flops_of(work: SequenceWork, parts: Sequence[Part]) -> Floats:
    chosen = np.array([member for part in parts for member in part], dtype=np.int64)
    part = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    total = np.bincount(part, work.flops_B[chosen], len(parts)).astype(np.float64)
    if not work.shares:
        return total
    order = np.lexsort((work.family_B[chosen], part))
    chosen, part = chosen[order], part[order]
    again = 1 + np.flatnonzero((np.diff(work.family_B[chosen]) == 0) & (np.diff(part) == 0))
    return total - np.bincount(part[again], work.prompt_flops_B[chosen[again]], len(parts))


def _lighten(work: SequenceWork, parts: list[Part], flops: Floats, heavy: int, light: int, limit: int | None) -> bool:
    """Exchange something between two parts so that the heavier of them then has less than the heavy one has."""
    for leaving, coming in _exchanges(work, parts[heavy], parts[light], flops[heavy] - flops[light]):
        pair = [_exchanged(parts[heavy], leaving, coming), _exchanged(parts[light], coming, leaving)]
        if not pair[0] or (limit is not None and max(work.rows(part) for part in pair) > limit):
            continue
        after = [work.flops(part) for part in pair]
        if max(after) < flops[heavy] * (1 - 1e-6):
            (parts[heavy], parts[light]), flops[[heavy, light]] = pair, after
            return True
    return False


def _exchanged(part: Part, leaving: Part, coming: Part) -> Part:
    gone = set(leaving)
    return [member for member in part if member not in gone] + coming


def _exchanges(work: SequenceWork, heavy: Part, light: Part, gap: float) -> list[tuple[Part, Part]]:
    """List what might go from the heavy part to the light one and back, the most promising first."""
    found = [*_moves(work, heavy, light, gap), *_swaps(work, heavy, light, gap)]
    return [(leaving, coming) for _, leaving, coming in sorted(found, key=lambda each: each[0])]


def _moves(work: SequenceWork, heavy: Part, light: Part, gap: float) -> Iterator[tuple[float, Part, Part]]:
    """Yield sequences of one family, the heaviest ones or a single one, after how much work the heavier part then has
    above what the light one had. The prompt is computed twice unless all of the family go, or the light part has it."""
    members = np.array(heavy)
    members = members[np.lexsort((-work.flops_B[members], work.family_B[members]))]
    family = work.family_B[members]
    _, first, counts = np.unique(family, return_index=True, return_counts=True)
    first, counts = np.repeat(first, counts), np.repeat(counts, counts)
    prompt = work.prompt_flops_B[members]
    own = work.flops_B[members] - prompt
    total = np.cumsum(own)
    several, is_last = total - (total - own)[first], np.arange(len(members)) == first + counts - 1
    known = np.isin(family, work.family_B[light])
    for from_first in (True, False):
        moved, ends = (several, is_last) if from_first else (own, counts == 1)
        less, more = moved + ends * prompt, moved + ~known * prompt
        excess = np.maximum(gap - less, more) + (more - less)  # what is computed twice counts once more
        for at in np.argsort(excess, kind="stable")[:3].tolist():
            begin = int(first[at]) if from_first else at
            yield float(excess[at]), members[begin : at + 1].tolist(), []


def _swaps(work: SequenceWork, heavy: Part, light: Part, gap: float) -> Iterator[tuple[float, Part, Part]]:
    """Yield one sequence for another of about half of the gap less work; prompts that are then computed twice count
    too."""
    ours, theirs = np.array(heavy), np.array(light, dtype=np.int64)
    theirs = theirs[np.argsort(work.flops_B[theirs], kind="stable")]
    if not len(theirs):
        return
    our_flops, their_flops = work.flops_B[ours], work.flops_B[theirs]
    at = np.searchsorted(their_flops, our_flops - gap / 2).clip(0, len(theirs) - 1)
    moved = our_flops - their_flops[at]
    twice = _twice(work, ours, theirs) + _twice(work, theirs, ours)[at]
    excess = np.maximum(gap - moved, moved) + twice
    for best in np.argsort(excess, kind="stable")[:8].tolist():
        yield float(excess[best]), [int(ours[best])], [int(theirs[at[best]])]


def _twice(work: SequenceWork, members: Integers, other: Integers) -> Floats:
    """Return the work that is computed once more when one of a part's sequences, alone, goes to another part: its
    prompt, where its family stays; once less, where the other part has it."""
    if not work.shares:
        return np.zeros(len(members))
    family = work.family_B[members]
    _, which, counts = np.unique(family, return_inverse=True, return_counts=True)
    stays, known = counts[which] > 1, np.isin(family, work.family_B[other])
    return np.asarray(work.prompt_flops_B[members] * (stays.astype(np.int64) - known))
