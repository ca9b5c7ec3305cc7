"""The chart's recording rules and alerts, as a file that Prometheus and promtool read.

Each alert has a page of the same name in `docs/runbooks`. The chart's template replaces the least goodput by that of
its values, and adds a rule with the prices among them: `training_job:backstay_cost:per_hour`.
"""

from __future__ import annotations

from typing import Final

import yaml
from parts import Json
from promql import BY_JOB, goodput

RUNBOOKS: Final = "https://github.com/backstay-dev/backstay/blob/main/docs/runbooks"
_ON: Final = "on (namespace, training_job)"
_JOB: Final = "{{ $labels.namespace }}/{{ $labels.training_job }}"
#: Only jobs that are to train have this series.
_TO_TRAIN: Final = f"and {_ON} backstay_job_training"
_UPDATES: Final = "training_job:backstay_updates:rate5m"
_SECONDS: Final = "training_job:backstay_update_seconds:usual"
#: Seconds of the usual update, as at the last update: the estimate of a job that stopped must not grow. The recorded
#: series is only there for minutes after an update.
_USUAL: Final = f"last_over_time({_SECONDS}[1d:2m])"
#: The times of the last update and checkpoint survive a suspension, and the start is reset when the job resumes.
_START: Final = f"max {BY_JOB} (backstay_job_start_timestamp_seconds)"
#: Nothing until the first update since the start: pods may take their time to be scheduled, to pull and to compile.
_SINCE_UPDATE: Final = f"(time() - (max {BY_JOB} (backstay_job_last_update_timestamp_seconds) >= {_START}))"
_STORED: Final = f"max {BY_JOB} (backstay_checkpoint_timestamp_seconds or backstay_job_checkpoint_timestamp_seconds)"
#: Before the first update there is nothing to lose.
_BEGAN: Final = f"(max {BY_JOB} (backstay_job_first_update_timestamp_seconds) >= {_START})"
_SINCE_CHECKPOINT: Final = f"(time() - (({_STORED} > {_BEGAN}) or {_BEGAN}))"
_INTERVAL: Final = f"max {BY_JOB} (backstay_job_checkpoint_interval_seconds)"


def _alert(name: str, expr: str, lasts: str, severity: str, summary: str, description: str) -> Json:
    made: Json = {"alert": name, "expr": " ".join(expr.split())}
    if lasts:
        made["for"] = lasts
    return made | {
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description, "runbook_url": f"{RUNBOOKS}/{name}.md"},
    }


RECORDING: Final = [
    {"record": _UPDATES, "expr": f"sum {BY_JOB} (rate(backstay_updates_total[5m]))"},
    # The mean over the time in which a coordinator lived. A window of minutes has one of an hour's updates, or none.
    # If a job has become slower, the last half hour has the steps that are usual now, without the time of an outage.
    {
        "record": _SECONDS,
        "expr": f"1 / (((avg_over_time(({_UPDATES} > 0)[30m:1m]) < avg_over_time({_UPDATES}[6h]))"
        f" or avg_over_time({_UPDATES}[6h])) and ({_UPDATES} > 0))",
    },
    {"record": "training_job:backstay_goodput:ratio30m", "expr": goodput("", "30m")},
]

JOBS: Final = [
    _alert(
        "BackstayJobNotUpdating",
        f"{_SINCE_UPDATE} > 10 * clamp_min({_USUAL}, 6) {_TO_TRAIN}",
        "30s",
        "critical",
        f"{_JOB} applies no updates",
        f"The last update of {_JOB} is {{{{ $value | humanizeDuration }}}} old: more than ten times its usual step.",
    ),
    _alert(
        "BackstayJobFailed",
        f'(max {BY_JOB} (backstay_job_phase{{phase="Failed"}}) == 1)'
        f" and {_ON} (time() - backstay_job_completion_timestamp_seconds < 86400)",
        "",
        "critical",
        f"{_JOB} has failed",
        f"{_JOB} has failed within the last 24 hours. Its condition Failed has the reason.",
    ),
    _alert(
        "BackstayRestartBudgetLow",
        "max by (namespace, training_job, role) (backstay_job_restarts_total)"
        " / (max by (namespace, training_job, role) (backstay_job_restarts_limit) > 0) > 0.8"
        f" {_TO_TRAIN}",
        "",
        "warning",
        f"{_JOB} has used {{{{ $value | humanizePercentage }}}} of its restarts",
        f"Pods of the role {{{{ $labels.role }}}} of {_JOB} crash. When maxRestarts is used up, the job fails.",
    ),
    _alert(
        "BackstayCheckpointOld",
        f"(({_SINCE_CHECKPOINT} > 3 * {_INTERVAL}) unless {_ON} ({_SINCE_CHECKPOINT} <= 3 * {_USUAL})) {_TO_TRAIN}",
        "2m",
        "warning",
        f"{_JOB} has no recent checkpoint",
        f"{_JOB} has stored no complete checkpoint for {{{{ $value | humanizeDuration }}}}: more than three of its intervals."
        " If a server without a standby dies, the job loses the updates of this time.",
    ),
    _alert(
        "BackstayCheckpointsFail",
        # Even after the last update: the job fails if it cannot store the last checkpoint.
        f"sum {BY_JOB} (increase(backstay_checkpoint_failures_total[10m])) > 0"
        f' and {_ON} (max {BY_JOB} (backstay_job_phase{{phase=~"Starting|Running"}}) == 1)',
        "",
        "warning",
        f"{_JOB} cannot store checkpoints",
        f"{_JOB} failed to store {{{{ $value | humanize }}}} checkpoints in ten minutes. Training continues. The condition"
        " Checkpointing has the reason.",
    ),
    _alert(
        "BackstayStandbyOutOfSync",
        f"(max {BY_JOB} (backstay_job_standbys) > {_ON} max {BY_JOB} (backstay_job_standbys_in_sync)) {_TO_TRAIN}",
        "5m",
        "warning",
        f"{_JOB} has a shard without a standby that could take over",
        f"{{{{ $value }}}} standbys are desired in {_JOB}, and fewer hold what their servers do. The loss of such a"
        " server goes back to a checkpoint.",
    ),
    _alert(
        "BackstayStragglers",
        f"(max {BY_JOB} (backstay_stragglers) > {_ON} max {BY_JOB} (backstay_job_backups)) {_TO_TRAIN}",
        "10m",
        "warning",
        f"{_JOB} waits for slow workers",
        f"{{{{ $value }}}} workers of {_JOB} are slow: more than its backups make up for. Every update waits for one.",
    ),
    _alert(
        "BackstayNotFinite",
        f"sum {BY_JOB} (increase(backstay_updates_skipped_total[10m])) > 0 {_TO_TRAIN}",
        "",
        "warning",
        f"{_JOB} computes gradients that are not finite",
        f"{{{{ $value | humanize }}}} updates of {_JOB} were skipped in ten minutes. maxNonFinite of them in a row fail the job.",
    ),
    _alert(
        "BackstayGoodputLow",
        f"(training_job:backstay_goodput:ratio30m < 0.5) {_TO_TRAIN}"
        f" and {_ON} (time() - backstay_job_start_timestamp_seconds > 1800)",
        "15m",
        "warning",
        f"{_JOB} has a low goodput",
        f"{{{{ $value | humanizePercentage }}}} of the worker seconds of {_JOB} in the last 30 minutes were useful.",
    ),
]

OPERATOR: Final = [
    _alert(
        "BackstayNoLeader",
        # The chart adds labels to the metric, so that the rule of a release is about its own operator (`absent` has
        # those that are compared with `=`).
        "(max by (namespace) (backstay_operator_leader) < 1) or absent(backstay_operator_leader)",
        "2m",
        "critical",
        "No operator of Backstay acts{{ with $labels.namespace }} in the namespace {{ . }}{{ end }}",
        "No operator holds the Lease, or none can be scraped. Jobs train on, but nothing replaces dead pods.",
    ),
    _alert(
        "BackstayWatchStale",
        "max by (namespace, pod) (backstay_operator_watch_overdue_seconds) > 60",
        "2m",
        "critical",
        "The operator {{ $labels.pod }} has an outdated watch",
        "A watch has not shown one of the operator's own writes for {{ $value | humanizeDuration }}. Dead pods may go"
        " unnoticed.",
    ),
    _alert(
        "BackstayTargetDown",
        'max by (namespace, training_job, role, index, component, pod) (up{component="backstay-operator"} == 0'
        ' or up{training_job!="", role!=""} == 0)',
        "5m",
        "warning",
        "{{ $labels.pod }} cannot be scraped",
        "Prometheus gets no metrics from the pod {{ $labels.pod }}. Alerts that need these metrics cannot fire.",
    ),
]


def rules() -> str:
    """Returns the file with all rules."""
    groups = [
        {"name": "backstay.recording", "rules": RECORDING},
        {"name": "backstay.jobs", "rules": JOBS},
        {"name": "backstay.operator", "rules": OPERATOR},
    ]
    return "# Made by helm/dashboards; do not edit.\n" + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)
