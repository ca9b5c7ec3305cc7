"""Draws a small curve of characters and a bar of progress, and keeps the points of a job's curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from backstay_client.view.follow import JobView

__all__ = ["Losses", "bar", "curve", "thin"]

# https://www.unicode.org/charts/PDF/U2800.pdf: the bits of the dots of a braille cell, by row, left and right.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_PARTS = " ▏▎▍▌▋▊▉"


def bar(fraction: float, width: int) -> str:
    """Returns a bar of `width` characters, filled to `fraction` (0 to 1) in steps of an eighth of a character."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_PARTS[part] if part else "")).ljust(width, "░")[:width]


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yields the dots of a straight line, without gaps."""
    (x, y), (to_x, to_y) = start, end
    dots = max(abs(to_x - x), abs(to_y - y), 1)
    for dot in range(dots + 1):
        yield round(x + (to_x - x) * dot / dots), round(y + (to_y - y) * dot / dots)


def thin(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Reduce the points to at most `most` by dropping every second one, where the newest stays."""
    while len(points) > most:
        points = [*points[:-1:2], points[-1]]
    return points


class Losses:
    """The losses of the updates, for a curve.

    Attributes:
        points: (step, loss) in order of the step.
    """

    def __init__(self, most: int = 2000) -> None:
        """`most` points are kept."""
        self.points: list[tuple[float, float]] = []
        self._most = most

    def add(self, view: JobView) -> None:
        """Add the loss of the newest update. After a rollback, the losses of the redone steps are dropped."""
        step, loss = view.report.step, view.report.newest_loss
        if not step or loss is None or not math.isfinite(loss):
            return
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self.points = thin([*self.points, (float(step), loss)], self._most)

    def lines(self, width: int, height: int) -> list[str]:
        """Returns the curve; see `curve`."""
        return curve(self.points, width, height)

    @property
    def ends(self) -> tuple[float, float]:
        """The highest and the lowest loss."""
        values = [value for _, value in self.points]
        return max(values), min(values)


def curve(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Returns lines of braille characters; the values are on a logarithmic axis where all are positive and span a
    decade.

    Args:
        points: (x, y) in order of x; those that are not finite are left out.
        width, height: the size in characters.

    Returns:
        `height` lines of `width` characters; none for fewer than two points.
    """
    found = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(found) < 2 or width < 1 or height < 1:
        return []
    lowest, highest = min(y for _, y in found), max(y for _, y in found)
    if lowest > 0 and highest / lowest > 10:
        found = [(x, math.log(y)) for x, y in found]
        lowest, highest = math.log(lowest), math.log(highest)
    first, last = found[0][0], found[-1][0]
    # A character has two columns and four rows of dots.
    wide, high = 2 * width - 1, 4 * height - 1
    columns: dict[int, list[float]] = {}
    for x, y in found:
        at = round((x - first) / (last - first) * wide) if last > first else 0
        columns.setdefault(at, []).append((highest - y) / (highest - lowest) if highest > lowest else 0.5)
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for at in sorted(columns):
        row = round(sum(columns[at]) / len(columns[at]) * high)
        for column, one in _line(before or (at, row), (at, row)):
            cells[one // 4][column // 2] |= _DOTS[one % 4][column % 2]
        before = at, row
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]
