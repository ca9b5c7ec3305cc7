"""The rows of the dashboard Job that not every job has data for. They are collapsed, and say what they need."""

from __future__ import annotations

from parts import WINDOW, Board, Json, coloured, graph, query, row
from promql import COORDINATOR, JOB, WORKERS, mean, most, rate


def _needs(text: str) -> Json:
    """Returns the text of an empty panel."""
    return {"noValue": text}


def _model() -> Json:
    """Returns numbers that only some scripts and devices provide, under the conditions in docs/monitoring.md."""
    per_rank = f"* on (index) max by (index) (backstay_contribution_flops{{{WORKERS}}})"

    def flops(select: str) -> str:
        return f"sum({rate('backstay_worker_contributions_total', select, 'by (index)')} {per_rank})"

    def memory(how: str, state: str) -> Json:
        return query(f'{how}(backstay_device_memory_bytes{{{WORKERS}, state="{state}"}})', state.replace("_", " "))

    return row(
        "Model and devices",
        collapsed=[
            graph(
                "Tokens",
                "Tokens in applied contributions a second.",
                query(f"{rate('backstay_tokens_total', COORDINATOR)} > 0", "tokens"),
                unit="short",
                width=6,
                defaults=_needs("loss returns no metric named tokens."),
            ),
            graph(
                "Gradient norm",
                "Norm of the newest mean gradient before it is clipped, on a logarithmic axis.",
                query(f"max(backstay_gradient_norm{{{COORDINATOR}}})", "norm"),
                log=True,
                calcs=("mean", "max", "lastNotNull"),
                width=6,
                defaults=_needs("train has no clip_norm."),
            ),
            graph(
                "Learning rate",
                "Learning rate of the newest update.",
                query(f"max(backstay_learning_rate{{{COORDINATOR}}})", "learning rate"),
                calcs=("min", "max", "lastNotNull"),
                width=6,
                defaults=_needs("The optimizer's state has no learning rate: see optax.inject_hyperparams."),
            ),
            graph(
                "Metrics of the loss function",
                "The metrics that loss returns beside the loss, by their name: the mean over the newest update's contributions.",
                query(f"max by (name) (backstay_train_metric{{{COORDINATOR}}})", "{{name}}"),
                calcs=("min", "max", "lastNotNull"),
                width=6,
                defaults=_needs("loss returns no metrics."),
            ),
            graph(
                "Floating-point operations",
                "Operations a second of all workers, as XLA estimates them. Those of contributions that no update"
                " contains are in the upper line alone.",
                query(flops(f'{WORKERS}, outcome="applied"'), "applied"),
                query(flops(WORKERS), "all"),
                unit="flops",
                overrides=coloured(("applied", "all")),
                defaults=_needs("XLA has no estimate for this script."),
            ),
            graph(
                "Model FLOPs utilization",
                "The share of what a worker's devices reach at most in BFloat16. The time in which a worker waits counts.",
                query(f"avg(backstay_mfu_ratio{{{WORKERS}}})", "mean"),
                query(f"min(backstay_mfu_ratio{{{WORKERS}}})", "lowest"),
                unit="percentunit",
                names=("mean", "lowest"),
                defaults=_needs("The peak of these devices is not known."),
            ),
            graph(
                "Device memory",
                "The most that a device of a worker uses now, the most that one has used, and the lowest limit.",
                memory("max", "in_use"),
                memory("max", "peak"),
                memory("min", "limit"),
                unit="bytes",
                names=("in use", "peak", "limit"),
                calcs=("max", "lastNotNull"),
                defaults=_needs("These devices do not report their memory."),
            ),
        ],
    )


def hidden_rows(board: Board) -> None:
    """Add the rows that are collapsed at first."""
    joined = f"* on (namespace, pod) group_left (role, index) max by (namespace, pod, role, index) (backstay_step{{{JOB}}} * 0 + 1)"
    pod = 'namespace=~"$namespace"'
    asynchronous = _needs("Only a job with update.mode: Async has staleness.")
    advisor = _needs("Needs cAdvisor's metrics of the kubelets, as kube-prometheus-stack collects them.")
    gpu = _needs("Needs NVIDIA's dcgm-exporter with the labels of pods.")
    staleness = f"{COORDINATOR}"
    container = f'{pod}, container="trainer"'
    board.add(
        _model(),
        row(
            "Staleness (Async)",
            collapsed=[
                graph(
                    "Staleness",
                    "Versions between computing a gradient and applying it. The upper line is a bucket's edge"
                    " (0, 1, 2, 4, 8 ...): none was staler.",
                    query(mean("backstay_staleness_versions", staleness), "mean"),
                    query(most("backstay_staleness_versions", staleness), "stalest, at most"),
                    width=24,
                    defaults=asynchronous,
                )
            ],
        ),
        row(
            "Containers (cAdvisor)",
            collapsed=[
                graph(
                    "Processors by pod",
                    "Of the container trainer: the ten busiest.",
                    query(
                        f"topk(10, sum by (namespace, pod) (rate(container_cpu_usage_seconds_total{{{container}}}[{WINDOW}])) {joined})",
                        "{{role}} {{index}}",
                    ),
                    defaults=advisor,
                ),
                graph(
                    "Processor throttled",
                    "Share of the scheduler's periods in which the container was held back by its limit.",
                    query(
                        f"topk(10, sum by (namespace, pod) (rate(container_cpu_cfs_throttled_periods_total{{{container}}}[{WINDOW}]))"
                        f" / sum by (namespace, pod) (rate(container_cpu_cfs_periods_total{{{container}}}[{WINDOW}])) {joined})",
                        "{{role}} {{index}}",
                    ),
                    unit="percentunit",
                    defaults=advisor,
                ),
                graph(
                    "Memory of its limit",
                    "Working set, as a share of the container's limit: at 100 % the kernel kills it.",
                    query(
                        f"topk(10, sum by (namespace, pod) (container_memory_working_set_bytes{{{container}}})"
                        f" / (sum by (namespace, pod) (container_spec_memory_limit_bytes{{{container}}}) > 0) {joined})",
                        "{{role}} {{index}}",
                    ),
                    unit="percentunit",
                    defaults=advisor,
                ),
            ],
        ),
        row(
            "GPUs (DCGM)",
            collapsed=[
                graph(
                    title,
                    text,
                    query(
                        f"topk(10, max by (namespace, pod, gpu) ({metric}{{{pod}}}) {joined})",
                        "{{role}} {{index}} GPU {{gpu}}",
                    ),
                    unit=unit,
                    width=6,
                    defaults=gpu,
                )
                for title, text, metric, unit in (
                    ("GPU busy", "Share of time in which a kernel ran.", "DCGM_FI_DEV_GPU_UTIL", "percent"),
                    ("GPU memory", "Frame buffer in use, in MiB.", "DCGM_FI_DEV_FB_USED", "mbytes"),
                    ("GPU power", "Power draw.", "DCGM_FI_DEV_POWER_USAGE", "watt"),
                    ("GPU temperature", "Temperature of the chip.", "DCGM_FI_DEV_GPU_TEMP", "celsius"),
                )
            ],
        ),
    )
