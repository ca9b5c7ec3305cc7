"""The dashboard of one job, which shows its state, the cost of lost pods, the parts of a step, and slow ranks."""

from __future__ import annotations

from parts import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    RESOLUTION,
    WINDOW,
    YELLOW,
    Board,
    Json,
    coloured,
    dashboard,
    fixed,
    graph,
    marks,
    matching,
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
from promql import COORDINATOR, CRASHES, JOB, SERVERS, WORKERS, goodput, mean, most, rate, shares_by_part
from rows_of_job import hidden_rows

from backstay_spec.goodput import PARTS

#: When the newest checkpoint was stored: the coordinator's value is newer, the operator's exists without a coordinator.
STORED = (
    f"max(backstay_checkpoint_timestamp_seconds{{{COORDINATOR}}} or backstay_job_checkpoint_timestamp_seconds{{{JOB}}})"
)
OUTCOMES = (
    *("applied", "late", "stale", "duplicate", "non_finite", "skipped"),
    *("abandoned", "lost", "old_term", "old_incarnation", "not_in_world", "out_of_order"),
)
STEP_PARTS = ("data", "compute", "send", "wait", "receive")
WAITED = "backstay_waited_for_seconds_total"
ROLES = ("ParameterServer", "Worker", "Evaluator")
POD_LINK = (
    "/d/6581e46e4e5c7ba40a07646395ef7b23/kubernetes-compute-resources-pod"
    "?var-datasource=${prometheus_datasource}&var-namespace=${namespace}&var-pod=${__data.fields.Pod}"
)
NODE_LINK = (
    "/d/200ac8fdbfbb74b39aff88118e4d1c2c/kubernetes-compute-resources-node-pods"
    "?var-datasource=${prometheus_datasource}&var-node=${__data.fields.Node}"
)
LOGS_LINK = (
    "/explore?schemaVersion=1&panes=%7B%22a%22:%7B%22datasource%22:%22${loki_datasource}%22,%22queries%22:%5B%7B%22refId%22:%22A%22,"
    "%22expr%22:%22%7Bnamespace%3D%5C%22${namespace}%5C%22,pod%3D%5C%22${__data.fields.Pod}%5C%22%7D%22%7D%5D,"
    "%22range%22:%7B%22from%22:%22${__from}%22,%22to%22:%22${__to}%22%7D%7D%7D"
)


STATE_VALUES = {
    1: ("Pending", GREY),
    2: ("Starting", YELLOW),
    3: ("Training", GREEN),
    4: ("Stopped", RED),
    5: ("Suspended", PINK),
    6: ("Succeeded", BLUE),
    7: ("Failed", RED),
    8: ("Ending", GREEN),
}


def state() -> Json:
    """Returns one row for the job, one for each role's pods."""

    def phase(name: str, value: int, more: str = "") -> str:
        return f'((max(backstay_job_phase{{{JOB}, phase="{name}"}}) == 1){more}) * {value}'

    trains = f"max(backstay_job_training{{{JOB}}})"
    began = f"max(backstay_job_step{{{JOB}}})"
    job = " or ".join(
        [
            f"(({trains} == 0) and ({began} > 0)) * 0 + 4",
            f"({trains} == 1) * 3",
            phase("Pending", 1),
            phase("Starting", 2),
            phase("Running", 2, f" and on () {trains}"),
            phase("Running", 8),
            phase("Suspended", 5),
            phase("Succeeded", 6),
            phase("Failed", 7),
        ]
    )
    ready, desired = (f'sum by (role) (backstay_job_pods{{{JOB}, state="{state}"}})' for state in ("ready", "desired"))
    # A job that is suspended, or has ended, lacks no pods.
    pods = f"(10 + ({ready} >= bool {desired}) + ({ready} > bool 0)) and on () {trains}"
    values = {**STATE_VALUES, 10: ("no pod ready", RED), 11: ("some pods ready", ORANGE), 12: ("all pods ready", GREEN)}
    mapped = {str(value): {"text": text, "color": colour, "index": value} for value, (text, colour) in values.items()}
    return panel(
        "state-timeline",
        "State",
        "The job's state, and while it should train, whether the pods of each role are ready. Stopped: it trained, and now"
        " applies no updates. Ending: after the last update.",
        [query(job, "job"), query(pods, "{{role}}")],
        width=12,
        height=8,
        defaults={
            "custom": {"fillOpacity": 80, "lineWidth": 0},
            # Grafana shows a threshold's range in place of a value if the colours come from thresholds.
            "color": {"mode": "fixed", "fixedColor": GREY},
            "mappings": [{"type": "value", "options": mapped}],
        },
        options={"mergeValues": True, "showValue": "auto", "rowHeight": 0.8, "legend": {"showLegend": False}},
    )


def first_row(board: Board) -> None:
    step, goal = f"max(backstay_job_step{{{JOB}}})", f"(max(backstay_job_goal_steps{{{JOB}}}) > 0)"
    updates = f"(max(backstay_job_updates_per_second{{{JOB}}}) > 0)"
    board.add(state())
    board.column(
        4,
        stat(
            "Progress",
            "Updates applied, of the steps of the script.",
            query(f"{step} / {goal}", "progress"),
            unit="percentunit",
            decimals=1,
            thresholds=steps((None, BLUE)),
        ),
        stat(
            "Last death",
            "The time and the cause of the newest death of a pod.",
            now(
                "topk(1, max by (role, cause) (max_over_time("
                f"backstay_job_last_death_timestamp_seconds{{{JOB}}}[$__range]))) * 1000",
                "{{role}}: {{cause}}",
            ),
            unit="dateTimeFromNow",
            none="no death",
            text_mode="value_and_name",
        ),
    )
    board.column(
        4,
        stat(
            "Time left",
            "At the speed of the last 30 seconds; nothing while no update is applied.",
            now(f"({goal} - {step}) / {updates}", "left"),
            unit="dtdurations",
            none="no updates",
        ),
        stat(
            "Updates redone",
            "Updates that were lost with a server and applied again in the time range: what deaths of servers cost."
            " A job with standbys redoes none.",
            now(f"round(sum(increase(backstay_job_steps_redone_total{{{JOB}}}[$__range])))", "updates"),
            thresholds=steps((None, GREEN), (0.5, ORANGE)),
            decimals=0,
        ),
    )
    board.column(
        4,
        stat(
            "Goodput",
            "The share of the seconds of the job's worker pods whose computation was applied and not discarded again, in"
            " the time range.",
            now(f"max({goodput(JOB, '$__range')})", "goodput"),
            unit="percentunit",
            decimals=1,
            thresholds=steps((None, RED), (0.5, ORANGE), (0.8, GREEN)),
        ),
        stat(
            "Checkpoint age",
            "Time since the newest complete checkpoint was stored. If a server without a standby dies, the job loses the"
            " updates of this time. Orange at three intervals, red at ten.",
            query(f"time() - {STORED}", "age"),
            query(
                f"(time() - {STORED}) / max(backstay_job_checkpoint_interval_seconds{{{JOB}}})",
                "intervals",
            ),
            unit="dtdurations",
            none="none stored",
            overrides=[
                named(
                    "intervals",
                    {"id": "unit", "value": "none"},
                    {"id": "decimals", "value": 1},
                    {"id": "thresholds", "value": steps((None, GREEN), (3, ORANGE), (10, RED))},
                )
            ],
            thresholds=steps((None, BLUE)),
            text_mode="value_and_name",
        ),
    )
    board.add(
        graph(
            "Loss",
            "Mean loss of the newest update's contributions, on a logarithmic axis, and on the right what evaluate"
            " returned last, by its own name.",
            query(f"max(backstay_loss{{{COORDINATOR}}})", "loss"),
            query(f"max by (name) (backstay_evaluation{{{COORDINATOR}}})", "evaluation: {{name}}"),
            log=True,
            width=12,
            calcs=("min", "lastNotNull"),
            names=("loss",),
            overrides=[
                matching(
                    "evaluation: .*",
                    {"id": "custom.axisPlacement", "value": "right"},
                    {"id": "custom.scaleDistribution", "value": {"type": "linear"}},
                    {"id": "custom.showPoints", "value": "always"},
                )
            ],
        ),
        graph(
            "Worker seconds by part",
            "The seconds of the job's worker pods by part; applied is goodput. dropped: computation that no update"
            " contains; redone: computation that a rollback discarded; missing: a slot without a pod, or a pod that died.",
            query(shares_by_part(JOB, WINDOW), "{{part}}"),
            stacked=True,
            soft_max=1,
            unit="percentunit",
            width=12,
            names=PARTS,
            calcs=("mean",),
        ),
    )


def throughput(board: Board) -> None:
    right = {"id": "custom.axisPlacement", "value": "right"}
    board.add(
        row("Throughput"),
        graph(
            "Updates",
            "Updates decided by the coordinator a second, and seconds per update on the right axis. Skipped ones had a"
            " gradient that was not finite and changed nothing. For steps of minutes choose a coarser resolution.",
            query(rate("backstay_updates_total", COORDINATOR), "updates"),
            query(f"{rate('backstay_updates_skipped_total', COORDINATOR)} > 0", "skipped"),
            query(f"1 / ({rate('backstay_updates_total', COORDINATOR)} > 0)", "seconds per update"),
            unit="ops",
            names=("updates", "skipped", "seconds per update"),
            overrides=[named("seconds per update", {"id": "unit", "value": "s"}, right)],
        ),
        graph(
            "Examples",
            "Examples in applied contributions a second; those of late or refused contributions are not in it.",
            query(rate("backstay_examples_total", COORDINATOR), "examples"),
        ),
        graph(
            "Contributions by outcome",
            "Contributions a second, stacked, by the answer to the worker. late: the update had its quorum already, as backups"
            " intend; skipped: another contribution of the update was not finite; stale, duplicate, out_of_order,"
            " old_term, old_incarnation, not_in_world: refused; lost: a server was lost before it answered.",
            query(rate("backstay_worker_contributions_total", WORKERS, "by (outcome)"), "{{outcome}}"),
            stacked=True,
            unit="ops",
            names=OUTCOMES,
        ),
    )


def step_time(board: Board) -> None:
    by_index = f'label_join({rate(WAITED, COORDINATOR, "by (rank)")}, "index", "", "rank")'
    nodes = f"max by (index, node) (backstay_step{{{WORKERS}}} * 0 + 1)"
    board.add(
        row("Where a step's time goes, and who is slow"),
        graph(
            "Step of the mean worker",
            "Mean seconds of a step by part, stacked. data: the next batch was not ready; compute: loss and gradient;"
            " send: until the contribution is sent; wait: the rest of the quorum, and the update, until the first new"
            " parameters come; receive: the rest of them.",
            query(mean("backstay_step_part_seconds", WORKERS, "by (part)"), "{{part}}"),
            unit="s",
            stacked=True,
            names=STEP_PARTS,
        ),
        panel(
            "heatmap",
            "Workers by their own part of a step",
            "How many steps took how long until their gradient existed: the batch and the computation, without the wait"
            " for others. A straggler is a band above the others, even among a thousand workers.",
            [
                query(
                    f"sum by (le) (increase(backstay_gradient_seconds_bucket{{{WORKERS}}}[{WINDOW}]))",
                    "{{le}}",
                    kind="heatmap",
                )
            ],
            unit="none",
            defaults={"custom": {"scaleDistribution": {"type": "linear"}}},
            options={
                "calculate": False,
                "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Viridis", "steps": 64, "exponent": 0.5, "reverse": False},
                "exemplars": {"color": "rgba(255,0,255,0.7)"},
                "filterValues": {"le": 1e-9},
                "legend": {"show": True},
                "rowsFrame": {"layout": "auto"},
                "showValue": "never",
                "tooltip": {"mode": "single", "yHistogram": False},
                "yAxis": {"axisPlacement": "left", "unit": "s"},
            },
            height=9,
        ),
        graph(
            "Slowest ranks",
            "Mean seconds until a rank's gradient exists, its batch included: the five slowest ranks, and the mean of all.",
            query(f"topk(5, {mean('backstay_gradient_seconds', WORKERS, 'by (index)')})", "rank {{index}}"),
            query(mean("backstay_gradient_seconds", WORKERS), "mean"),
            unit="s",
            calcs=("mean", "max"),
            names=("mean",),
        ),
        graph(
            "Stragglers",
            "How many seconds longer than the others' median a slow rank takes for its gradient. A rank is slow from half"
            " as much again as the median.",
            query(f"max by (rank) (backstay_straggler_delay_seconds{{{COORDINATOR}}})", "rank {{rank}}"),
            query(f"0 * max(backstay_world_size{{{COORDINATOR}}})", "no delay"),
            unit="s",
            calcs=("mean", "max"),
            overrides=[named("no delay", fixed(GREY))],
        ),
        graph(
            "Waited for",
            "The share of time in which an update lacked only this rank's contribution, by the part"
            " of its step. The largest five.",
            query(f"topk(5, {rate(WAITED, COORDINATOR, 'by (rank, part)')} > 0)", "rank {{rank}}: {{part}}"),
            query(f"0 * max(backstay_world_size{{{COORDINATOR}}})", "no wait"),
            unit="percentunit",
            calcs=("mean", "max"),
            overrides=[named("no wait", fixed(GREY))],
        ),
        graph(
            "Waited for, by node",
            "The same by the nodes of the rank's pods: the largest five. If a node is slow, all its ranks are slow. The wait"
            " for a rank of several pods counts for each of its nodes.",
            query(f"topk(5, sum by (node) ({nodes} * on (index) group_left () {by_index}) > 0)", "{{node}}"),
            query(f"0 * max(backstay_world_size{{{COORDINATOR}}})", "no wait"),
            unit="percentunit",
            calcs=("mean", "max"),
            overrides=[named("no wait", fixed(GREY))],
        ),
        graph(
            "Wait for the quorum",
            "Seconds from the first contribution of an update to the decision about the update: what backups"
            " shorten. The slowest wait is between the mean and the upper line, which is a bucket's edge.",
            query(mean("backstay_quorum_wait_seconds", COORDINATOR), "mean"),
            query(most("backstay_quorum_wait_seconds", COORDINATOR), "slowest, at most"),
            unit="s",
            width=12,
            names=("mean", "slowest, at most"),
        ),
        graph(
            "Update by shard",
            "Seconds from the arrival of a commit at a shard until its update is applied: the mean of the five slowest shards."
            " The upper line is a bucket's edge: none took longer.",
            query(f"topk(5, {mean('backstay_apply_seconds', SERVERS, 'by (index)')})", "shard {{index}}"),
            query(most("backstay_apply_seconds", SERVERS), "slowest, at most"),
            unit="s",
            width=12,
            names=("slowest, at most",),
        ),
    )


def pods(board: Board) -> None:
    ready = f'max(backstay_job_pods{{{JOB}, role="%s", state="ready"}})'
    desired = ready.replace('"ready"', '"desired"')
    table = [
        f"max by (pod, node, role, index) (process_start_time_seconds{{{JOB}}}) * 1000",
        f"max by (pod, node, role, index) (rate(process_cpu_seconds_total{{{JOB}}}[{WINDOW}]))"
        f" and on (pod) process_start_time_seconds{{{JOB}}}",
        f"max by (pod, node, role, index) (process_resident_memory_bytes{{{JOB}}})",
        f"max by (pod, node, role, index) (backstay_step{{{JOB}}})",
    ]
    board.add(
        row("Pods and deaths"),
        graph(
            "Workers",
            "desired: spec.workers.replicas; ready: ranks whose pods are ready; live: a heartbeat in the last 10 s; world: ranks in force.",
            query(desired % "Worker", "desired"),
            query(ready % "Worker", "ready"),
            query(f"max(backstay_live_workers{{{COORDINATOR}}})", "live"),
            query(f"max(backstay_world_size{{{COORDINATOR}}})", "world"),
            width=6,
            calcs=("min", "lastNotNull"),
            names=("desired", "ready", "live", "world"),
        ),
        graph(
            "Servers",
            "desired: shards and their standbys; ready: pods; in sync: shards that would lose nothing with their server.",
            query(desired % "ParameterServer", "desired"),
            query(ready % "ParameterServer", "ready"),
            query(f"max(backstay_job_standbys_in_sync{{{JOB}}})", "in sync"),
            width=6,
            calcs=("min", "lastNotNull"),
            names=("desired", "ready", "in sync"),
        ),
        graph(
            "Pods lost",
            "Pods, or ranks of several, replaced since the job's start, by role: crashes are charged to maxRestarts, disruptions"
            " (eviction, preemption, node loss, deletion) are not.",
            query(f"sum by (role) (backstay_job_restarts_total{{{JOB}}}) > 0", "{{role}} crashes"),
            query(f"sum by (role) (backstay_job_disruptions_total{{{JOB}}}) > 0", "{{role}} disruptions"),
            query(f"0 * sum(backstay_job_restarts_total{{{JOB}}})", "none"),
            width=6,
            calcs=("lastNotNull",),
            overrides=[
                matching(".*crashes", fixed(RED)),
                matching(".*disruptions", fixed(BLUE)),
                named("none", fixed(GREY)),
            ],
        ),
        graph(
            "Connections",
            "Pods that joined the coordinator, and workers that connected again after the loss of a server, a minute.",
            query(f"60 * {rate('backstay_joins_total', COORDINATOR)}", "joined"),
            query(f"60 * {rate('backstay_reconnects_total', WORKERS)}", "connected again"),
            width=6,
            calcs=("max",),
        ),
        panel(
            "table",
            "Pods",
            "The pods now. A pod leads to its log and to its resources, a node to its pods, where Loki and the dashboards"
            " of kube-prometheus-stack are installed.",
            [query(expr, "{{pod}}", instant=True, kind="table") for expr in table],
            width=24,
            height=9,
            defaults={"custom": {"align": "auto", "filterable": True}, "noValue": "-"},
            overrides=[
                named("Started", {"id": "unit", "value": "dateTimeFromNow"}),
                named("Processors", {"id": "decimals", "value": 2}),
                named("Memory", {"id": "unit", "value": "bytes"}),
                named("Step", {"id": "unit", "value": "none"}, {"id": "decimals", "value": 0}),
                named(
                    "Pod",
                    {
                        "id": "links",
                        "value": [{"title": "Log", "url": LOGS_LINK}, {"title": "Resources", "url": POD_LINK}],
                    },
                ),
                named("Node", {"id": "links", "value": [{"title": "Node", "url": NODE_LINK}]}),
            ],
            options={"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": "Role", "desc": False}]},
            transformations=[
                {"id": "merge", "options": {}},
                {
                    "id": "organize",
                    "options": {
                        "excludeByName": {"Time": True},
                        "indexByName": {"role": 0, "index": 1, "pod": 2, "node": 3},
                        "renameByName": {
                            "role": "Role",
                            "index": "Index",
                            "pod": "Pod",
                            "node": "Node",
                            "Value #A": "Started",
                            "Value #B": "Processors",
                            "Value #C": "Memory",
                            "Value #D": "Step",
                        },
                    },
                },
            ],
        ),
    )


def storage(board: Board) -> None:
    board.add(
        row("Checkpoints, network and processes"),
        graph(
            "Checkpoints",
            "Whole checkpoints stored a minute, and those that could not be stored.",
            query(f"60 * {rate('backstay_checkpoints_total', COORDINATOR)}", "stored"),
            query(f"60 * {rate('backstay_checkpoint_failures_total', COORDINATOR)}", "failed"),
            width=6,
            names=("stored", "failed"),
            calcs=("mean", "max"),
        ),
        graph(
            "Age of the newest checkpoint",
            "Since it was stored. It increases while no coordinator answers.",
            query(f"time() - {STORED}", "age"),
            query(f"3 * max(backstay_job_checkpoint_interval_seconds{{{JOB}}})", "three intervals"),
            unit="s",
            width=6,
            calcs=("max", "lastNotNull"),
            overrides=[named("three intervals", fixed(ORANGE)), named("age", fixed(BLUE))],
        ),
        graph(
            "Writing a shard's part",
            "Mean seconds to write a shard's part of a checkpoint: the five slowest shards.",
            query(f"topk(5, {mean('backstay_checkpoint_write_seconds', SERVERS, 'by (index)')})", "shard {{index}}"),
            unit="s",
            width=6,
        ),
        graph(
            "Bytes written",
            "Bytes of checkpoints that the servers wrote a second.",
            query(rate("backstay_checkpoint_written_bytes_total", SERVERS), "written"),
            unit="Bps",
            width=6,
        ),
        graph(
            "Tensors on the wire",
            "Bytes of contributions and parameters that the workers sent and received a second. Received bytes are drawn below zero.",
            query(rate("backstay_tensor_bytes_total", WORKERS, "by (direction)"), "{{direction}}"),
            unit="Bps",
            width=6,
            overrides=[
                *coloured(("sent", "received")),
                named("received", {"id": "custom.transform", "value": "negative-Y"}),
            ],
        ),
        graph(
            "Traffic of an update",
            "Bytes that a worker sends and receives for an update, and what they would be without codecs.",
            query(f'max(backstay_update_bytes{{{COORDINATOR}, encoding="carried"}})', "carried"),
            query(f'max(backstay_update_bytes{{{COORDINATOR}, encoding="exact"}})', "without codecs"),
            unit="decbytes",
            width=6,
            overrides=[named("carried", fixed(BLUE)), named("without codecs", fixed(ORANGE))],
        ),
        graph(
            "Processors by role",
            "Processors that the pods' main processes use: the sum of a role, and its busiest pod.",
            query(f"sum by (role) (rate(process_cpu_seconds_total{{{JOB}}}[{WINDOW}]))", "{{role}}"),
            query(f"max by (role) (rate(process_cpu_seconds_total{{{JOB}}}[{WINDOW}]))", "{{role}}, busiest"),
            width=6,
            names=ROLES,
        ),
        graph(
            "Memory by role",
            "Resident memory of the pods' main processes: the largest of a role.",
            query(f"max by (role) (process_resident_memory_bytes{{{JOB}}})", "{{role}}"),
            unit="bytes",
            width=6,
            names=ROLES,
        ),
    )


def job() -> Json:
    """Returns the dashboard."""
    board = Board()
    first_row(board)
    throughput(board)
    step_time(board)
    pods(board)
    storage(board)
    hidden_rows(board)
    died = 'max by (role, cause) (backstay_job_last_death_timestamp_seconds{%s, cause%s"%s"})'
    variables = [
        source("prometheus"),
        source("loki", hidden=True),
        variable("namespace", "Namespace", "label_values(backstay_job_phase, namespace)"),
        variable("training_job", "Job", 'label_values(backstay_job_phase{namespace=~"$namespace"}, training_job)'),
        RESOLUTION,
    ]
    return dashboard(
        "backstay-job",
        "Backstay / Job",
        "One TrainingJob: state, progress, goodput, where a step's time goes, pods and deaths.",
        board,
        variables,
        annotations=[
            marks("Crashes", died % (JOB, "=~", CRASHES), COLOURS["crashes"], "{{role}} died", "{{cause}}"),
            marks("Disruptions", died % (JOB, "!~", CRASHES), COLOURS["disruptions"], "{{role}} died", "{{cause}}"),
        ],
        since="now-1h",
    )
