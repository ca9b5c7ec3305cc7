"""Draws the pictures of the dashboards and of a timeline in `docs/pictures` (`make pictures`), in about four minutes.

A job with a slow worker, deaths, a failover, a full disk and a rollback runs on the embedded cluster. A real
Prometheus observes it. It is the run of `tests/dashboard/test_prometheus.py`. Each panel's queries are answered by that
Prometheus. The drawing is not Grafana's: it has the same queries, places and colours.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("dashboard", "helpers")]

import timeline_picture  # noqa: E402
from watched import FAULTS, JOB, NAMESPACE, SCRIPT, VALUES, Cluster, Prometheus, Watch, spec_of, suffer  # noqa: E402

FOLDER = Path(__file__).parent / "pictures"
UNIT, LINE, GAP, WIDTH = 52, 30, 6, 1248  # pixels of a column of 24, of a unit of height, between panels, in all
INK, FAINT, PAPER, GRID = "#24292f", "#6e7781", "#ffffff", "#d8dee4"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#882255", "#44AA99", "#DDCC77")
POINTS = 160


@dataclass
class Series:
    """One line of a panel, whose `values` has None where there is no point."""

    name: str
    values: list[float | None]
    colour: str
    right: bool = False
    unit: str = "none"


def number(value: float, unit: str) -> str:
    """Returns a value as a person reads it."""
    if not math.isfinite(value):
        return "-"
    match unit:
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "dtdurations" | "s":
            return duration(value)
        case "bytes" | "Bps":
            for size, prefix in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "ki")):
                if abs(value) >= size:
                    return f"{value / size:.3g} {prefix}B" + ("/s" if unit == "Bps" else "")
            return f"{value:.3g} B" + ("/s" if unit == "Bps" else "")
        case "dateTimeFromNow":
            return duration(max(0.0, time.time() - value / 1000)) + " ago"
        case "h":
            return f"{value:.2g} h"
        case "ops" | "reqps":
            return f"{value:.3g}/s"
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def duration(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {name}"
    if seconds == 0 or abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found.group(1), ""), template)


class Picture:
    """One dashboard over one time range."""

    def __init__(self, prometheus: Prometheus, board: dict[str, Any], began: float, now: float) -> None:
        self._prometheus, self._board, self._began, self._now = prometheus, board, began, now
        self._step = (now - began) / POINTS
        self._made: list[str] = []

    def svg(self) -> str:
        """Returns the whole picture."""
        height = 44.0
        for panel in self._board["panels"]:
            at = panel["gridPos"]
            x, y = at["x"] * UNIT, 44 + at["y"] * (LINE + GAP)
            w, h = at["w"] * UNIT - GAP, at["h"] * (LINE + GAP) - GAP
            height = max(height, y + h + GAP)
            self._panel(panel, x + GAP / 2, y, w, h)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" '
            f'font-size="11" fill="{INK}"><rect width="100%" height="100%" fill="#f4f5f7"/>'
            f'<text x="8" y="28" font-size="18" font-weight="bold">{escape(self._board["title"])}</text>'
            + "".join(self._made)
            + "</svg>\n"
        )

    # Data.

    def _fill(self, expr: str) -> str:
        span = f"{math.ceil(self._now - self._began)}s"
        window = f"{max(15, math.ceil(4 * self._step))}s"
        values = {"__rate_interval": window, "__range": span, "namespace": NAMESPACE, "training_job": JOB}
        for name, value in {**values, "job": "backstay-system/backstay-operator", "pod": "operator"}.items():
            expr = re.sub(rf"\${name}\b", value, expr)
        return expr

    def _series(self, panel: dict[str, Any]) -> list[Series]:
        found: list[Series] = []
        overrides = panel["fieldConfig"]["overrides"]
        for target in panel["targets"]:
            instant = self._prometheus.query(self._fill(target["expr"])) if target["instant"] else []
            found_now = [{"metric": one["metric"], "values": [one["value"]]} for one in instant]
            for one in found_now if target["instant"] else self._range(target["expr"]):
                values: list[float | None] = [None] * (POINTS + 1)
                for at, text in one["values"]:
                    if math.isfinite(float(text)):
                        values[min(POINTS, round((at - self._began) / self._step))] = float(text)
                name = legend(target["legendFormat"], one["metric"])
                found.append(Series(name, values, "", unit=panel["fieldConfig"]["defaults"]["unit"]))
        for n, series in enumerate(found):
            series.colour = PALETTE[n % len(PALETTE)]
            for override in overrides:
                matcher = override["matcher"]
                if matcher["id"] == "byValue":  # of series with only zeros, which `_graph` leaves out
                    continue
                pattern = matcher["options"] if matcher["id"] == "byRegexp" else re.escape(matcher["options"])
                if re.fullmatch(pattern, series.name):
                    for one in override["properties"]:
                        match one["id"]:
                            case "color":
                                series.colour = one["value"]["fixedColor"]
                            case "custom.axisPlacement":
                                series.right = one["value"] == "right"
                            case "unit":
                                series.unit = one["value"]
                            case "custom.transform":
                                series.values = [None if v is None else -v for v in series.values]
        return found

    def _range(self, expr: str) -> list[dict[str, Any]]:
        return self._prometheus.series(self._fill(expr), self._began, self._now, self._step)

    # Drawing.

    def _text(self, x: float, y: float, text: str, **more: str) -> None:
        given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self._made.append(f'<text x="{x:.0f}" y="{y:.0f}"{given}>{escape(text)}</text>')

    def _rect(self, x: float, y: float, w: float, h: float, colour: str, more: str = "") -> None:
        self._made.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{colour}"{more}/>')

    def _panel(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        if panel["type"] == "row":
            self._text(x + 4, y + 20, ("▸ " if panel["collapsed"] else "▾ ") + panel["title"], font_weight="bold")
            return
        self._rect(x, y, w, h, PAPER, f' stroke="{GRID}" rx="3"')
        self._text(x + 8, y + 17, panel["title"], font_weight="bold")
        box = x + 8, y + 26, w - 16, h - 34
        match panel["type"]:
            case "stat":
                self._stat(panel, *box)
            case "timeseries":
                self._graph(panel, *box)
            case "state-timeline":
                self._states(panel, *box)
            case "heatmap":
                self._heat(panel, *box)
            case "table":
                self._table(panel, *box)

    def _stat(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        defaults = panel["fieldConfig"]["defaults"]
        found = [(s, last) for s in self._series(panel) if (last := last_of(s.values)) is not None]
        if not found:
            self._text(x, y + h / 2 + 8, str(defaults.get("noValue", "-")), font_size="20", fill=FAINT)
            return
        each = w / len(found)
        for n, (series, last) in enumerate(found):
            limits = defaults["thresholds"]["steps"]
            for override in panel["fieldConfig"]["overrides"]:
                if override["matcher"]["options"] == series.name:
                    for one in override["properties"]:
                        limits = one["value"]["steps"] if one["id"] == "thresholds" else limits
            colour = [one["color"] for one in limits if one["value"] is None or last >= one["value"]][-1]
            if panel["options"]["colorMode"] == "none":
                colour = INK
            size = 26 if len(found) == 1 else 19
            self._text(x + n * each, y + h / 2 + 4, number(last, series.unit), font_size=str(size), fill=colour)
            if len(found) > 1 or panel["options"]["textMode"] == "value_and_name":
                self._text(x + n * each, y + h / 2 + 22, series.name, fill=FAINT)

    def _times(self, x: float, y: float, w: float, h: float) -> None:
        for n in range(5):
            at = x + w * n / 4
            anchor = "start" if n == 0 else "end" if n == 4 else "middle"
            ago = (self._now - self._began) * (1 - n / 4)
            self._text(
                at, y + h + 12, "now" if n == 4 else f"-{duration(ago)}", fill=FAINT, text_anchor=anchor, font_size="9"
            )

    def _graph(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        series = self._series(panel)
        if any(override["matcher"]["id"] == "byValue" for override in panel["fieldConfig"]["overrides"]):
            series = [one for one in series if any(one.values)]
        custom = panel["fieldConfig"]["defaults"]["custom"]
        shown = series[:8]
        bottom = 14 * min(len(shown), 8) if len(shown) <= 4 else 14 * math.ceil(len(shown) / 2)
        plot = x + 46, y, w - 46 - (46 if any(s.right for s in series) else 0), h - bottom - 22
        stacking = custom.get("stacking", {}).get("mode")
        log = "scaleDistribution" in custom
        if not series:
            self._text(x + w / 2, y + h / 2, "No data", fill=FAINT, text_anchor="middle")
            return
        if stacking:
            self._stack(series, *plot, percent=stacking == "percent")
        else:
            for right in (False, True):
                self._lines([s for s in series if s.right == right], *plot, log=log and not right, right=right)
        self._times(*plot)
        self._marks(*plot)
        columns = 1 if len(shown) <= 4 else 2
        for n, one in enumerate(shown):
            at = x + (n % columns) * w / columns, y + h - bottom + 14 * (n // columns) + 6
            self._rect(at[0], at[1] - 7, 10, 4, one.colour)
            last = last_of(one.values)
            value = "-" if last is None else number(last, one.unit)
            self._text(at[0] + 14, at[1], f"{one.name}: {value}", font_size="10")

    def _lines(self, series: list[Series], x: float, y: float, w: float, h: float, *, log: bool, right: bool) -> None:
        values = [v for s in series for v in s.values if v is not None]
        if not values:
            return

        def scaled(value: float) -> float:
            return math.copysign(math.log10(1 + abs(value) / 0.001), value) if log else value

        low, high = scaled(min(values)), scaled(max(values))
        if not log:
            low, high = min(low, 0.0), max(high, 0.0)
        high = high if high > low else low + 1
        for n in range(3):
            at = low + (high - low) * n / 2
            shown = math.copysign((10 ** abs(at) - 1) * 0.001, at) if log else at
            level = y + h - h * n / 2
            if not right:
                self._rect(x, level, w, 0.5, GRID)
            where = {"x": x + w + 4} if right else {"x": x - 4}
            self._text(
                where["x"],
                level + 3,
                number(shown, series[0].unit),
                fill=FAINT,
                font_size="9",
                text_anchor="start" if right else "end",
            )
        for one in series:
            path, pen = [], "M"
            for n, value in enumerate(one.values):
                if value is None:
                    pen = "M"
                    continue
                at = y + h - h * (scaled(value) - low) / (high - low)
                path.append(f"{pen}{x + w * n / POINTS:.0f} {at:.1f}")
                pen = "L"
            self._made.append(f'<path d="{"".join(path)}" fill="none" stroke="{one.colour}" stroke-width="1.4"/>')

    def _stack(self, series: list[Series], x: float, y: float, w: float, h: float, *, percent: bool) -> None:
        sums = [sum(max(0.0, s.values[n] or 0) for s in series) for n in range(POINTS + 1)]
        high = 1.0 if percent else max(sums) or 1.0
        base = [0.0] * (POINTS + 1)
        for one in series:
            for n, value in enumerate(one.values):
                if value is None or value <= 0 or not sums[n]:
                    continue
                part = (value / sums[n] if percent else value) / high * h
                self._rect(x + w * n / (POINTS + 1), y + h - base[n] - part, w / (POINTS + 1) + 0.4, part, one.colour)
                base[n] += part
        for n in range(3):
            self._rect(x, y + h - h * n / 2, w, 0.5, GRID)
            text = number(high * n / 2, "percentunit" if percent else series[0].unit)
            self._text(x - 4, y + h - h * n / 2 + 3, text, fill=FAINT, font_size="9", text_anchor="end")

    def _marks(self, x: float, y: float, w: float, h: float) -> None:
        for mark in self._board["annotations"]["list"]:
            if "expr" in mark:
                expr = self._fill(mark["expr"])
                times = {
                    float(text) / 1000
                    for one in self._prometheus.series(expr, self._began, self._now, self._step)
                    for _, text in one["values"]
                }
                for at in times:
                    if self._began <= at <= self._now:
                        where = x + w * (at - self._began) / (self._now - self._began)
                        self._rect(where, y, 1, h, mark["iconColor"], ' opacity="0.7"')

    def _states(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
        rows = self._series(panel)
        each = (h - 18) / max(1, len(rows))
        left = 96.0
        for n, row in enumerate(rows):
            top = y + n * each + 2
            self._text(x, top + each / 2 + 4, row.name)
            before, began = None, 0
            for at in range(POINTS + 2):
                value = row.values[at] if at <= POINTS else None
                if value != before or at == POINTS + 1:
                    if before is not None:
                        state = mapping["options"][str(int(before))]
                        start, end = (x + left + (w - left) * p / (POINTS + 1) for p in (began, at))
                        self._rect(start, top, end - start, each - 6, state["color"])
                        if end - start > 6 * len(state["text"]):
                            self._text(start + 4, top + each / 2 + 2, state["text"], fill=PAPER, font_size="10")
                    before, began = value, at
        self._times(x + left, y, w - left, h - 16)

    def _heat(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        rows = sorted(self._series(panel), key=lambda s: float(s.name.replace("+Inf", "inf")))
        counts = [
            [max(0.0, (v or 0) - ((rows[n - 1].values[at] or 0) if n else 0)) for at, v in enumerate(row.values)]
            for n, row in enumerate(rows)
        ]
        used = [n for n, row in enumerate(counts) if max(row) > 1e-9]
        if not used:
            self._text(x + w / 2, y + h / 2, "No data", fill=FAINT, text_anchor="middle")
            return
        rows, counts = rows[used[0] : used[-1] + 1], counts[used[0] : used[-1] + 1]
        high, each, left = max(map(max, counts)), (h - 18) / len(rows), 60.0
        for n, (row, values) in enumerate(zip(rows, counts, strict=True)):
            top = y + h - 18 - (n + 1) * each
            self._text(
                x, top + each / 2 + 4, f"≤ {number(float(row.name.replace('+Inf', 'inf')), 's')}", font_size="10"
            )
            for at, value in enumerate(values):
                if value > 1e-9:
                    opacity = f' opacity="{0.15 + 0.85 * math.sqrt(value / high):.2f}"'
                    self._rect(
                        x + left + (w - left) * at / (POINTS + 1),
                        top,
                        (w - left) / (POINTS + 1) + 0.3,
                        each - 1,
                        "#440154",
                        opacity,
                    )
        self._times(x + left, y, w - left, h - 16)

    def _table(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        organize = panel["transformations"][1]["options"]
        rows: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for target in panel["targets"]:
            for sample in self._prometheus.query(self._fill(target["expr"])):
                labels = {k: v for k, v in sample["metric"].items() if k in organize["renameByName"] and k != "phase"}
                cells = rows.setdefault(tuple(sorted(labels.items())), dict(labels))
                cells |= {k: v for k, v in sample["metric"].items() if k == "phase"}
                cells[f"Value #{target['refId']}"] = float(sample["value"][1])
        names = organize["renameByName"]
        units = {
            o["matcher"]["options"]: p["value"]
            for o in panel["fieldConfig"]["overrides"]
            for p in o["properties"]
            if p["id"] == "unit"
        }
        each = w / len(names)
        for n, (field, shown) in enumerate(names.items()):
            self._text(x + n * each, y + 12, shown, fill=FAINT)
            for line, cells in enumerate(sorted(rows.values(), key=lambda c: (c.get("role", ""), c.get("index", "")))):
                value = cells.get(field, "-")
                text = number(value, units.get(shown, "none")) if isinstance(value, float) else str(value)
                self._text(x + n * each, y + 34 + 20 * line, text[-int(each / 6) :])


def last_of(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


@contextlib.contextmanager
def observed() -> Iterator[tuple[Prometheus, float]]:
    """A run, watched by Prometheus, and when it began."""
    done = subprocess.run(
        ["helm", "template", "backstay", str(ROOT / "helm" / "backstay"), "--namespace=backstay-system", *VALUES],
        check=True,
        capture_output=True,
        text=True,
    )
    objects = [one for one in yaml.safe_load_all(done.stdout) if one]
    with tempfile.TemporaryDirectory(prefix="backstay-pictures-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        with Cluster(folder / "cluster") as cluster:
            began = time.time()
            cluster.start(spec_of(folder, FAULTS))
            watch = Watch(cluster, objects, "prometheus", folder)
            with watch.prometheus as prometheus:
                suffer(cluster, watch, calm=40)
                yield prometheus, began


def main() -> int:
    """Draw every dashboard, and the timeline."""
    FOLDER.mkdir(exist_ok=True)
    timeline_picture.main()
    with observed() as (prometheus, began):
        now = time.time()
        for path in sorted((ROOT / "helm" / "backstay" / "dashboards").glob("*.json")):
            board = json.loads(path.read_text())
            (FOLDER / f"{path.stem}.svg").write_text(Picture(prometheus, board, began, now).svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
