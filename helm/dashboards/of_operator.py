"""The dashboard of the operator itself."""

from __future__ import annotations

from parts import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    RESOLUTION,
    WINDOW,
    Board,
    Json,
    dashboard,
    graph,
    now,
    query,
    row,
    source,
    stat,
    steps,
    variable,
)

OP = 'job=~"$job", pod=~"$pod"'
ROLES = ("ParameterServer", "Worker", "Evaluator")


def rate(metric: str, by: str = "", more: str = "") -> str:
    return f"sum {by} (rate(backstay_operator_{metric}{{{OP}{more}}}[{WINDOW}]))"


def mean(metric: str, by: str = "") -> str:
    return f"{rate(f'{metric}_sum', by)} / ({rate(f'{metric}_count', by)} > 0)"


def most(metric: str, by: str = "") -> str:
    labels = f"by (le, {by})" if by else "by (le)"
    return f"histogram_quantile(1, {rate(f'{metric}_bucket', labels)})"


def timed(title: str, text: str, metric: str) -> Json:
    return graph(
        title,
        f"{text} The upper line is a bucket's edge: none took longer.",
        query(mean(metric), "mean"),
        query(most(metric), "slowest, at most"),
        unit="s",
        names=("mean", "slowest, at most"),
    )


def operator() -> Json:
    """Returns the dashboard."""
    board = Board()
    board.add(
        stat(
            "Leader",
            "Operators that hold the Lease and act: each release must have one.",
            now(f"sum by (job) (backstay_operator_leader{{{OP}}}) or on () vector(0)", "{{job}}"),
            thresholds=steps((None, RED), (1, GREEN), (2, RED)),
        ),
        stat(
            "Operators up",
            "Operators that answer Prometheus.",
            now(f"sum(up{{{OP}}}) or vector(0)", "up"),
            thresholds=steps((None, RED), (1, GREEN)),
        ),
        stat(
            "Watch overdue",
            "Seconds for which a watch has not shown a write of the operator. A busy API server is seconds late.",
            now(f"max(backstay_operator_watch_overdue_seconds{{{OP}}})", "overdue"),
            unit="s",
            thresholds=steps((None, GREEN), (15, ORANGE), (60, RED)),
        ),
        stat(
            "Errors",
            "Errors after which the operator tried again, in the time range.",
            now(f"round(sum(increase(backstay_operator_errors_total{{{OP}}}[$__range]))) or vector(0)", "errors"),
            thresholds=steps((None, GREEN), (1, ORANGE)),
            decimals=0,
        ),
        stat(
            "Replacement",
            "Mean seconds between the observed end of a pod and the creation of its replacement, in the time range.",
            now(
                f"sum(increase(backstay_operator_replacement_duration_seconds_sum{{{OP}}}[$__range]))"
                f" / (sum(increase(backstay_operator_replacement_duration_seconds_count{{{OP}}}[$__range])) > 0)",
                "mean",
            ),
            unit="s",
            none="none",
            thresholds=steps((None, GREEN), (1, ORANGE), (5, RED)),
        ),
        stat(
            "Recovery of workers",
            "Mean seconds between the observed death of a worker and a contribution of its replacement, in the time range.",
            now(
                f'sum(increase(backstay_operator_recovery_duration_seconds_sum{{{OP}, role="Worker"}}[$__range]))'
                f' / (sum(increase(backstay_operator_recovery_duration_seconds_count{{{OP}, role="Worker"}}[$__range])) > 0)',
                "mean",
            ),
            unit="s",
            none="none",
            thresholds=steps((None, BLUE)),
        ),
        row("Jobs and pods"),
        graph(
            "Jobs by phase",
            "TrainingJobs that this operator serves.",
            query(f"sum by (phase) (backstay_operator_jobs{{{OP}}}) > 0", "{{phase}}"),
            stacked=True,
            names=("Pending", "Starting", "Running", "Suspended", "Succeeded", "Failed"),
            calcs=("max", "lastNotNull"),
        ),
        graph(
            "Pods created",
            "Pods created a minute, by role.",
            query(f"60 * {rate('pods_created_total', 'by (role)')}", "{{role}}"),
            query(f"0 * sum(up{{{OP}}})", "none"),
            stacked=True,
            names=ROLES,
        ),
        graph(
            "Deaths",
            "Pods found dead a minute, by role and cause.",
            query(f"60 * {rate('pod_deaths_total', 'by (role, cause)')}", "{{role}} {{cause}}"),
            query(f"0 * sum(up{{{OP}}})", "none"),
            stacked=True,
        ),
        timed(
            "Dead pod to replacement",
            "Seconds between the observed end of a pod and the creation of its replacement, if nothing delayed the creation.",
            "replacement_duration_seconds",
        ),
        graph(
            "Dead pod to working again",
            "Seconds between the observed death of a pod and its recovery: a worker has contributed, another pod is ready."
            " Mean by role.",
            query(mean("recovery_duration_seconds", "by (role)"), "{{role}}"),
            unit="s",
            names=ROLES,
        ),
        graph(
            "Calls to the jobs' servers",
            "Calls a second, by gRPC status code; the operator calls every server every 2 s.",
            query(f"{rate('progress_calls_total', 'by (code)')}", "{{code}}"),
            unit="ops",
            stacked=True,
        ),
        row("The operator's work"),
        graph(
            "Reconciliations",
            "Runs a second, and what went wrong and was tried again, by kind.",
            query(rate("reconciles_total"), "runs"),
            query(f"{rate('errors_total', 'by (kind)')} > 0", "error: {{kind}}"),
            unit="ops",
        ),
        timed(
            "Duration of a reconciliation", "One run for one job, its API calls included.", "reconcile_duration_seconds"
        ),
        graph(
            "Requests to the API server",
            "Requests a second, by verb and status code; 0: no answer, 409: the object existed already, or was changed meanwhile.",
            query(f"{rate('api_requests_total', 'by (verb, code)')}", "{{verb}} {{code}}"),
            unit="reqps",
            stacked=True,
        ),
        graph(
            "Answers of the API server",
            "Mean time to an answer by verb, and the upper edge of the slowest.",
            query(mean("api_request_duration_seconds", "by (verb)"), "{{verb}}"),
            query(most("api_request_duration_seconds"), "slowest, at most"),
            unit="s",
            names=("slowest, at most",),
        ),
        graph(
            "Watches",
            "Events a second by resource.",
            query(rate("watch_events_total", "by (resource)"), "{{resource}}"),
            unit="ops",
            stacked=True,
        ),
        graph(
            "Watches, late and missed",
            "Seconds for which a watch has not shown a write of the operator, and deletions that no watch reported.",
            query(f"max(backstay_operator_watch_overdue_seconds{{{OP}}})", "overdue"),
            query(f"{rate('missed_deletions_total', 'by (resource)')} > 0", "missed: {{resource}}"),
            unit="s",
        ),
        graph(
            "Leader over time",
            "1 for the operator that holds the Lease and acts.",
            query(f"max by (pod) (backstay_operator_leader{{{OP}}})", "{{pod}}"),
            calcs=("lastNotNull",),
            width=8,
        ),
        graph(
            "Processor",
            "Processors that the operator uses.",
            query(f"max by (pod) (rate(process_cpu_seconds_total{{{OP}}}[{WINDOW}]))", "{{pod}}"),
        ),
        graph(
            "Memory",
            "Resident memory of the operator. 1,000 jobs of 10 pods take up to 500 MB.",
            query(f"max by (pod) (process_resident_memory_bytes{{{OP}}})", "{{pod}}"),
            unit="bytes",
        ),
    )
    variables = [
        source("prometheus"),
        variable("job", "Scrape job", "label_values(backstay_operator_leader, job)", multi=True),
        variable("pod", "Pod", 'label_values(backstay_operator_leader{job=~"$job"}, pod)', multi=True),
        RESOLUTION,
    ]
    return dashboard(
        "backstay-operator",
        "Backstay / Operator",
        "The operator: leadership, replacements, API server, watches, its own resources.",
        board,
        variables,
    )
