"""The dashboard of all jobs, which shows the jobs that need attention, and their cost."""

from __future__ import annotations

from parts import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    RED,
    RESOLUTION,
    Board,
    Json,
    dashboard,
    fixed,
    graph,
    named,
    now,
    panel,
    query,
    row,
    source,
    stat,
    steps,
    variable,
)
from promql import BY_JOB, goodput, shares_by_part

from backstay_spec.goodput import PARTS

NS = 'namespace=~"$namespace"'
PHASES = {name: COLOURS[name] for name in ("Pending", "Starting", "Running", "Suspended", "Succeeded", "Failed")}
JOB_LINK = "/d/backstay-job/backstay-job?var-prometheus_datasource=${prometheus_datasource}&var-namespace=${__data.fields.Namespace}&var-training_job=${__data.fields.Job}&from=${__from}&to=${__to}"


def last(metric: str, more: str = "", by: str = BY_JOB, how: str = "max") -> str:
    """Returns the last value in the time range, even of a deleted job."""
    return f"{how} {by} (last_over_time({metric}{{{NS}{more}}}[$__range]))"


def table(expr: str) -> Json:
    return query(expr, "{{training_job}}", instant=True, kind="table")


def jobs() -> Json:
    """Returns the table of jobs."""
    step, goal = last("backstay_job_step"), f"({last('backstay_job_goal_steps')} > 0)"
    speed = f"(max {BY_JOB} (backstay_job_updates_per_second{{{NS}}}) > 0)"
    columns = {
        "A": f"{last('backstay_job_phase', by='by (namespace, training_job, phase)')} == 1",
        "B": f"{step} / {goal}",
        "C": f"({goal} - {step}) / {speed}",
        "D": goodput(NS, "$__range"),
        "E": f"sum {BY_JOB} (increase(backstay_job_pod_seconds_total{{{NS}}}[$__range])) / 3600",
        "F": f"max {BY_JOB} (training_job:backstay_cost:per_hour{{{NS}}})",
        "G": f"round(sum {BY_JOB} (increase(backstay_job_restarts_total{{{NS}}}[24h])))",
        "H": f"round(sum {BY_JOB} (increase(backstay_job_disruptions_total{{{NS}}}[24h])))",
        "I": f"time() - max {BY_JOB} ((backstay_checkpoint_timestamp_seconds{{{NS}}} or backstay_job_checkpoint_timestamp_seconds{{{NS}}})"
        f" and on (namespace, training_job) backstay_job_training{{{NS}}})",
        "J": f"max {BY_JOB} (backstay_stragglers{{{NS}}}) > 0",
        "K": f"max {BY_JOB} (backstay_job_examples_per_second{{{NS}}})",
    }
    names = {
        "namespace": "Namespace",
        "training_job": "Job",
        "phase": "Phase",
        "Value #B": "Progress",
        "Value #C": "Time left",
        "Value #D": "Goodput",
        "Value #E": "Pod hours",
        "Value #F": "Cost/h",
        "Value #G": "Crashes 24 h",
        "Value #H": "Disruptions 24 h",
        "Value #I": "Checkpoint age",
        "Value #J": "Stragglers",
        "Value #K": "Examples/s",
    }
    background = {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}}

    def limits(*pairs: tuple[float | None, str]) -> list[Json]:
        return [
            {"id": "custom.cellOptions", "value": {"type": "color-text"}},
            {"id": "thresholds", "value": steps(*pairs)},
        ]

    def unit(name: str) -> Json:
        return {"id": "unit", "value": name}

    phases = {name: {"color": colour, "text": name, "index": n} for n, (name, colour) in enumerate(PHASES.items())}
    gauge = {"id": "custom.cellOptions", "value": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}}
    return panel(
        "table",
        "Jobs",
        "Every job of the time range, including deleted jobs. The job's name leads to its dashboard. Goodput and pod hours"
        " are of the time range; time left is computed from the updates of the last 30 seconds; the cost, the"
        " mean of 5 minutes, is known where the chart has prices of pods.",
        [table(expr) for expr in columns.values()],
        width=24,
        height=8,
        defaults={"custom": {"align": "auto", "minWidth": 80}, "noValue": "-"},
        overrides=[
            *(named(name, {"id": "custom.filterable", "value": True}) for name in ("Namespace", "Job", "Phase")),
            named("Job", {"id": "links", "value": [{"title": "The job's dashboard", "url": JOB_LINK}]}),
            named("Phase", {"id": "mappings", "value": [{"type": "value", "options": phases}]}, background),
            named(
                "Progress",
                unit("percentunit"),
                gauge,
                {"id": "min", "value": 0},
                {"id": "max", "value": 1},
                fixed(BLUE),
            ),
            named("Time left", unit("dtdurations")),
            named("Goodput", unit("percentunit"), *limits((None, RED), (0.5, ORANGE), (0.8, GREEN))),
            named("Pod hours", unit("h")),
            named("Cost/h", {"id": "decimals", "value": 2}),
            named("Crashes 24 h", {"id": "decimals", "value": 0}, *limits((None, GREY), (0.5, ORANGE), (10, RED))),
            named("Disruptions 24 h", {"id": "decimals", "value": 0}, {"id": "custom.width", "value": 130}),
            named(
                "Checkpoint age",
                unit("dtdurations"),
                {"id": "custom.width", "value": 140},
                *limits((None, GREY), (600, ORANGE), (3600, RED)),
            ),
            named("Stragglers", *limits((None, GREY), (0.5, ORANGE))),
            named("Examples/s", {"id": "decimals", "value": 1}),
        ],
        options={"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": "Phase", "desc": False}]},
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True, "Value #A": True},
                    "indexByName": {name: n for n, name in enumerate(names)},
                    "renameByName": names,
                },
            },
        ],
    )


def fleet() -> Json:
    """Returns the dashboard."""
    board = Board()
    ready = f'sum by (role) (backstay_job_pods{{{NS}, state="ready"}})'
    alerts, of_no_job = 'ALERTS{alertname=~"Backstay.*", alertstate="firing", %s}', 'training_job=""'
    board.add(
        stat(
            "Jobs by phase",
            "TrainingJobs now.",
            now(f"sum by (phase) (backstay_job_phase{{{NS}}}) > 0", "{{phase}}"),
            none="no jobs",
            width=12,
            text_mode="value_and_name",
            overrides=[named(phase, fixed(colour)) for phase, colour in PHASES.items()],
            thresholds=steps((None, BLUE)),
        ),
        stat(
            "Jobs that stopped",
            "Jobs that have trained, should train, and apply no updates now.",
            query(
                f"count((backstay_job_training{{{NS}}} == 0) and on (namespace, training_job) (backstay_job_step{{{NS}}} > 0)) or vector(0)",
                "jobs",
            ),
            thresholds=steps((None, GREEN), (1, RED)),
        ),
        stat(
            "Alerts that fire",
            "Alerts about these jobs and about operators, where the chart has installed its rules.",
            query(f"count({alerts % NS} or {alerts % of_no_job}) or vector(0)", "alerts"),
            thresholds=steps((None, GREEN), (1, RED)),
        ),
        stat(
            "Servers and ranks ready",
            "Servers, ranks and evaluators of all jobs that are ready. A rank of several pods counts as one.",
            query(f'sum(backstay_job_pods{{{NS}, state="ready"}}) or vector(0)', "ready"),
            spark=True,
        ),
        jobs(),
        row("Over time"),
        graph(
            "Jobs over time",
            "TrainingJobs by phase.",
            query(f"sum by (phase) (backstay_job_phase{{{NS}}}) > 0", "{{phase}}"),
            stacked=True,
            names=tuple(PHASES),
            calcs=("max", "lastNotNull"),
        ),
        graph(
            "Servers and ranks ready by role",
            "Ready servers, ranks and evaluators. A rank of several pods counts as one.",
            query(ready, "{{role}}"),
            stacked=True,
            names=("ParameterServer", "Worker", "Evaluator"),
            calcs=("max", "lastNotNull"),
        ),
        graph(
            "Goodput by job",
            "The share of the seconds of worker pods whose computation was applied and not discarded again: the lowest ten.",
            query(f"bottomk(10, {goodput(NS, '$__rate_interval')})", "{{namespace}}/{{training_job}}"),
            unit="percentunit",
            soft_max=1,
            calcs=("mean", "min", "lastNotNull"),
        ),
        graph(
            "Pods lost",
            "Pods, or ranks of several, of all jobs that were replaced: crashes are charged to a job's budget, disruptions are not.",
            query(f"round(sum(increase(backstay_job_restarts_total{{{NS}}}[$__rate_interval])))", "crashes"),
            query(f"round(sum(increase(backstay_job_disruptions_total{{{NS}}}[$__rate_interval])))", "disruptions"),
            names=("crashes", "disruptions"),
        ),
        graph(
            "Examples",
            "Examples in applied contributions a second: the ten largest jobs.",
            query(
                f"topk(10, max {BY_JOB} (backstay_job_examples_per_second{{{NS}}}))", "{{namespace}}/{{training_job}}"
            ),
        ),
        graph(
            "Worker seconds by part",
            "The seconds of all jobs' worker pods by part; applied is goodput.",
            query(shares_by_part(NS, "$__rate_interval"), "{{part}}"),
            stacked=True,
            soft_max=1,
            unit="percentunit",
            names=PARTS,
            calcs=("mean",),
        ),
    )
    variables = [
        source("prometheus"),
        variable("namespace", "Namespace", "label_values(backstay_job_phase, namespace)", multi=True),
        RESOLUTION,
    ]
    return dashboard(
        "backstay-fleet",
        "Backstay / Fleet",
        "All TrainingJobs: phase, progress, goodput, cost, deaths.",
        board,
        variables,
        passes=False,  # "All" namespaces would mix the jobs of one name in the dashboard Job
    )
