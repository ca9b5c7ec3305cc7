"""Panels, layout and variables of Grafana dashboards, as the JSON that Grafana imports (schema version 39, Grafana 10+).

Only what the three dashboards need. `Board` places panels from left to right in rows, so that they cannot overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]

SOURCE: Final[Json] = {"type": "prometheus", "uid": "${prometheus_datasource}"}
TAG: Final = "backstay"
WINDOW: Final = "$__rate_interval"

# The colours that Okabe and Ito chose so that people with any form of colour blindness can distinguish them, and greys.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, RED, PINK, GREY, DARK = "#E69F00", "#D55E00", "#CC79A7", "#999999", "#666666"

#: A name in a legend has one colour on every dashboard.
COLOURS: Final[Mapping[str, str]] = {
    # outcomes of contributions, and what a worker's computation was for
    "applied": BLUE,
    "late": ORANGE,
    "stale": YELLOW,
    "duplicate": SKY,
    "non_finite": RED,
    "abandoned": PINK,
    "lost": "#AA4499",
    "old_term": GREY,
    "old_incarnation": GREY,
    "not_in_world": GREY,
    "out_of_order": DARK,
    # parts of a step and of a worker's time
    "data": SKY,
    "compute": BLUE,
    "send": ORANGE,
    "wait": GREY,
    "receive": GREEN,
    "dropped": RED,
    "redone": "#661100",
    "computing": "#332288",
    "checkpoint": "#999933",
    "starting": YELLOW,
    "compiling": PINK,
    "reconnecting": "#882255",
    "ending": DARK,
    "missing": "#AA4499",
    "other": DARK,
    # roles
    "ParameterServer": ORANGE,
    "Worker": BLUE,
    "Evaluator": PINK,
    # phases
    "Pending": GREY,
    "Starting": YELLOW,
    "Running": GREEN,
    "Suspended": PINK,
    "Succeeded": BLUE,
    "Failed": RED,
    # pairs
    "desired": GREY,
    "ready": GREEN,
    "live": BLUE,
    "world": ORANGE,
    "in sync": BLUE,
    "mean": BLUE,
    "slowest, at most": ORANGE,
    "sent": BLUE,
    "received": ORANGE,
    "stored": BLUE,
    "failed": RED,
    "crashes": RED,
    "disruptions": BLUE,
    "updates": BLUE,
    "skipped": "#882255",
    "seconds per update": ORANGE,
    "loss": BLUE,
    # of several ranks or devices
    "all": ORANGE,
    "lowest": ORANGE,
    "in use": BLUE,
    "peak": ORANGE,
    "limit": GREY,
}


#: Grafana's titles of the columns of a legend, which it sorts by.
_CALCULATIONS: Final = {"mean": "Mean", "max": "Max", "min": "Min", "lastNotNull": "Last *"}


def query(expr: str, legend: str, *, instant: bool = False, kind: str = "time_series") -> Json:
    """Returns one query; its reference is set by the panel.

    Args:
        expr: PromQL. With `WINDOW`, points are as far apart as the variable `resolution` says, and rates span at least
            four of them. Without, points are as near as scrapes.
        legend: a template such as ``{{role}}``.
        instant: the value at the end of the time range, not a series.
        kind: ``time_series``, ``table`` or ``heatmap``.
    """
    made: Json = {
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": " ".join(expr.split()),
        "legendFormat": legend,
        "format": kind,
        "instant": instant,
        "range": not instant,
    }
    if WINDOW in expr:
        made["interval"] = "$resolution"
    return made


def now(expr: str, legend: str) -> Json:
    """Returns one value at the end of the time range. Grafana shows the last value of a series, even when there is none
    now."""
    return query(expr, legend, instant=True)


def steps(*pairs: tuple[float | None, str]) -> Json:
    """Thresholds as (lowest value, colour), where the first is for all lower values."""
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in pairs]}


def fixed(colour: str) -> Json:
    """Returns the colour of a field."""
    return {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}


def named(name: str, *properties: Json) -> Json:
    """Properties of the series or column with this name."""
    return {"matcher": {"id": "byName", "options": name}, "properties": list(properties)}


def matching(pattern: str, *properties: Json) -> Json:
    """Properties of the series whose name matches a regular expression."""
    return {"matcher": {"id": "byRegexp", "options": pattern}, "properties": list(properties)}


#: A series with only zeros is drawn, and has no line in the legend. A query keeps zeros, because the legend's mean needs them.
NO_ZEROS: Final[Json] = {
    "matcher": {"id": "byValue", "options": {"reducer": "allIsZero", "op": "gte", "value": 0}},
    "properties": [{"id": "custom.hideFrom", "value": {"legend": True, "tooltip": True, "viz": False}}],
}


def coloured(names: Sequence[str]) -> list[Json]:
    """Returns each name's own colour."""
    return [named(name, fixed(COLOURS[name])) for name in names]


def panel(
    kind: str,
    title: str,
    text: str,
    queries: Sequence[Json],
    *,
    unit: str = "none",
    width: int = 8,
    height: int = 8,
    defaults: Json | None = None,
    overrides: Sequence[Json] = (),
    options: Json | None = None,
    transformations: Sequence[Json] = (),
    links: Sequence[Json] = (),
) -> Json:
    """Returns one panel; `Board.add` gives it its place.

    Args:
        text: what it shows, for the panel's help.
        unit: a unit of Grafana's.
        defaults: defaults of the fields, besides the unit.
    """
    refs = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    made: Json = {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "targets": [{"refId": ref, **one} for ref, one in zip(refs, queries, strict=False)],
        "fieldConfig": {"defaults": {"unit": unit, **(defaults or {})}, "overrides": list(overrides)},
        "options": options or {},
        "gridPos": {"w": width, "h": height, "x": 0, "y": 0},
    }
    if transformations:
        made["transformations"] = list(transformations)
    if links:
        made["links"] = list(links)
    return made


def graph(
    title: str,
    text: str,
    *queries: Json,
    stacked: bool | str = False,
    log: bool = False,
    calcs: Sequence[str] = ("mean", "max", "lastNotNull"),
    names: Sequence[str] = (),
    overrides: Sequence[Json] = (),
    soft_max: float | None = None,
    defaults: Json | None = None,
    width: int = 8,
    height: int = 9,
    **more: Any,
) -> Json:
    """Returns a time series. `stacked`: True, or ``percent``. `log`: a logarithmic axis that also shows values of 0 and
    less. `names`: legends that have a fixed colour."""
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if stacked else 10,
        "showPoints": "auto",  # a point between two gaps has no line
        "spanNulls": False,
        "insertNulls": False,
        "axisSoftMin": None if log else 0,
    }
    if soft_max is not None:
        custom["axisSoftMax"] = soft_max
    if stacked:
        custom["stacking"] = {"mode": "percent" if stacked == "percent" else "normal", "group": "A"}
        custom["lineWidth"] = 0
    if log:
        custom["scaleDistribution"] = {"type": "symlog", "log": 10, "linearThreshold": 0.001}
    return panel(
        "timeseries",
        title,
        text,
        queries,
        defaults={"custom": custom, "color": {"mode": "palette-classic-by-name"}, **(defaults or {})},
        overrides=[*coloured(names), *overrides, *([NO_ZEROS] if stacked else [])],
        options={
            "legend": {
                "showLegend": True,
                "displayMode": "table",
                "placement": "right" if stacked and width >= 12 else "bottom",
                "calcs": list(calcs),
                "sortBy": _CALCULATIONS[calcs[0]],
                "sortDesc": True,
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        width=width,
        height=height,
        **more,
    )


def stat(
    title: str,
    text: str,
    *queries: Json,
    thresholds: Json | None = None,
    colour: str = "value",
    mappings: Sequence[Json] = (),
    none: str = "-",
    decimals: int | None = None,
    text_mode: str = "auto",
    spark: bool = False,
    **more: Any,
) -> Json:
    """Returns one or a few numbers at the end of the time range, so that they stay after a job or the operator is gone.

    Args:
        thresholds: values with their colours; None: one colour.
        none: what is shown where there is no value, and why.
    """
    defaults: Json = {
        "mappings": list(mappings),
        "noValue": none,
        "color": {"mode": "thresholds"},
        "thresholds": thresholds or steps((None, BLUE)),
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    more.setdefault("width", 4)
    more.setdefault("height", 4)
    return panel(
        "stat",
        title,
        text,
        queries,
        defaults=defaults,
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": colour if thresholds else "none",
            "graphMode": "area" if spark else "none",
            "textMode": text_mode,
            "justifyMode": "auto",
            "orientation": "auto",
        },
        **more,
    )


def row(title: str, *, collapsed: Sequence[Json] | None = None) -> Json:
    """Returns a row's heading. `collapsed`: its panels, which are hidden and not queried until a user opens the row."""
    return {
        "type": "row",
        "title": title,
        "collapsed": collapsed is not None,
        "panels": list(collapsed or ()),
        "gridPos": {"w": 24, "h": 1, "x": 0, "y": 0},
    }


class Board:
    """Places panels."""

    def __init__(self) -> None:
        self.panels: list[Json] = []
        self._x = self._y = self._height = 0

    def add(self, *panels: Json) -> None:
        """Add panels from left to right; a panel that does not fit begins the next line."""
        for one in panels:
            at = one["gridPos"]
            if one["type"] == "row" or self._x + at["w"] > 24:
                self._break()
            at["x"], at["y"] = self._x, self._y
            self._x += at["w"]
            self._height = max(self._height, at["h"])
            self.panels.append(one)
            if one["type"] == "row":
                self._break()
                inner = Board()
                inner._y = self._y
                inner.add(*one["panels"])

    def column(self, width: int, *panels: Json) -> None:
        """Add panels one below the other, as one column of the line."""
        if self._x + width > 24:
            self._break()
        y = self._y
        for one in panels:
            one["gridPos"] |= {"x": self._x, "y": y, "w": width}
            y += one["gridPos"]["h"]
            self.panels.append(one)
        self._x += width
        self._height = max(self._height, y - self._y)

    def _break(self) -> None:
        self._x, self._y, self._height = 0, self._y + self._height, 0


def variable(name: str, label: str, ask: str, *, multi: bool = False, **more: Any) -> Json:
    """Returns a variable whose values Prometheus knows. `ask`: ``label_values(...)``."""
    made: Json = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": ask, "refId": name},
        "definition": ask,
        "refresh": 2,
        "sort": 1,
        "multi": multi,
        "includeAll": multi,
        **more,
    }
    if multi:  # All is the list of values, and not a pattern that matches what others export too
        made |= {"current": {"selected": True, "text": "All", "value": "$__all"}}
    return made


def choice(name: str, label: str, values: Sequence[str], chosen: str) -> Json:
    """Returns a variable with given values."""
    options = [{"text": value, "value": value, "selected": value == chosen} for value in values]
    current = {"text": chosen, "value": chosen, "selected": True}
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": ",".join(values),
        "options": options,
        "current": current,
        "multi": False,
        "includeAll": False,
    }


def source(kind: str, *, hidden: bool = False) -> Json:
    """Returns a variable that chooses a data source, such as ``prometheus``."""
    return {
        "name": f"{kind}_datasource",
        "label": f"{kind.title()} data source",
        "type": "datasource",
        "query": kind,
        "refresh": 1,
        "hide": 2 if hidden else 0,
        "multi": False,
        "includeAll": False,
        "options": [],
        "current": {},
        "regex": "",
    }


RESOLUTION: Final = choice("resolution", "Resolution", ("15s", "1m", "5m", "15m"), "1m")


def marks(name: str, expr: str, colour: str, title: str, text: str) -> Json:
    """Returns one mark for each event. `expr` returns the event's Unix time in seconds: an event is not drawn as an
    area."""
    return {
        "name": name,
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "datasource": SOURCE,
        "expr": f"{expr} * 1000",
        "useValueForTime": True,
        "step": "15s",
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": "role,cause",
    }


def dashboard(
    uid: str,
    title: str,
    text: str,
    board: Board,
    variables: Sequence[Json],
    *,
    annotations: Sequence[Json] = (),
    links: Sequence[Json] = (),
    since: str = "now-3h",
    passes: bool = True,
) -> Json:
    """Returns a whole dashboard. The three are linked by their tag.

    Args:
        passes: whether the values of its variables are passed on to the others.
    """
    number = 0
    for one in board.panels:
        for each in (one, *one.get("panels", ())):
            number += 1
            each["id"] = number
    own = {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": SKY,
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }
    others = {
        "type": "dashboards",
        "title": "Backstay",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": passes,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }
    return {
        "id": None,
        "uid": uid,
        "title": title,
        "description": text,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": since, "to": "now"},
        "timepicker": {},
        "fiscalYearStartMonth": 0,
        "weekStart": "",
        "liveNow": False,
        "links": [others, *links],
        "annotations": {"list": [own, *annotations]},
        "templating": {"list": list(variables)},
        "panels": board.panels,
    }
