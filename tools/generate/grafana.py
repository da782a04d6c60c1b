"""Grafana dashboards, one per question, from the tables below."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "k8s" / "monitoring" / "grafana" / "dashboards"
MODEL = '{model=~"$model"}'
NAMESPACE = '{namespace=~"$namespace"}'
NODE = '{instance=~"$instance:.*"}'
SYSTEM = '{system=~"$system"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time: its title, the unit, and its expressions."""

    title: str
    unit: str
    expressions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A dashboard: its file, title, variables with the metric whose label they list, and panels."""

    name: str
    title: str
    variables: dict[str, str]
    panels: tuple[Panel, ...]


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{where}[5m]))"


def _p99(metric: str, by: str, where: str = "") -> str:
    return f"histogram_quantile(0.99, {_rate(f'{metric}_bucket', f'{by}, le', where)})"


QUESTIONS = (
    Question(
        "capacity",
        "How much is free?",
        {"model": "leasehold_devices"},
        (
            Panel("Devices by state", "short",
                  (f"max by (model, state) (leasehold_devices{MODEL})",)),
            Panel("Largest free share", "bytes",
                  (f"max by (model) (leasehold_largest_free_share_bytes{MODEL})",)),
            Panel("Memory leased, of usable devices", "percentunit",
                  (f"model:leasehold_memory_leased:ratio{MODEL}",)),
            Panel("Leased, in GPUs", "short",
                  (f"max by (model) (leasehold_leased_gpus{MODEL})",)),
            Panel("Idle leases by namespace", "short",
                  ("max by (namespace) (leasehold_idle_leases) or on () vector(0)",)),
            Panel("MIG layouts changed", "short",
                  ("sum by (outcome) (increase(leasehold_mig_partitions_total[5m]))",)),
        ),
    ),
    Question(
        "queue",
        "What waits, and for how long?",
        {"system": "leasehold_time_to_bind_seconds_count"},
        (
            Panel("Waiting pods by reason", "short",
                  (f"max by (system, reason) (leasehold_waiting_pods{SYSTEM})",)),
            Panel("Longest wait by reason", "s",
                  (f"max by (system, reason) (leasehold_waiting_oldest_seconds{SYSTEM})",)),
            Panel("Time to bind, 99th percentile", "s",
                  (_p99("leasehold_time_to_bind_seconds", "system, waited", SYSTEM),)),
            Panel("Decisions per second, by outcome", "short",
                  (_rate("leasehold_placements_total", "outcome"),)),
            Panel("Evictions by cause", "short",
                  ("sum by (namespace, cause) (increase(leasehold_preemption_evictions_total[5m]))"
                   " or on () vector(0)",)),
        ),
    ),
    Question(
        "budgets",
        "Who uses how much GPU time?",
        {"namespace": "leasehold_budget_used_gpu_seconds"},
        (
            Panel("GPU time left", "s",
                  (f"max by (namespace) (leasehold_budget_remaining_gpu_seconds{NAMESPACE})",)),
            Panel("GPU time used", "s",
                  (f"max by (namespace) (leasehold_budget_used_gpu_seconds{NAMESPACE})",)),
            Panel("Used now, in GPUs", "short",
                  (f"max by (namespace) (leasehold_budget_current_rate_gpus{NAMESPACE})",)),
            Panel("State", "short",
                  (f"max by (namespace, state) (leasehold_budget_state{NAMESPACE}) == 1",)),
            Panel("Delay of charges, 99th percentile", "s",
                  ("histogram_quantile(0.99, sum by (le) "
                   "(rate(leasehold_budget_charge_delay_seconds_bucket[5m])))",)),
        ),
    ),
    Question(
        "node",
        "How is one node?",
        {"instance": "leasehold_agent_leases"},
        (
            Panel("Leased against measured memory, per container", "bytes",
                  (f"leasehold_container_memory_leased_bytes{NODE}",
                   f"leasehold_container_memory_measured_bytes{NODE}")),
            Panel("Memory in use on the device", "bytes", (f"hw_gpu_memory_usage_bytes{NODE}",)),
            Panel("Core utilisation of the device", "percentunit",
                  (f"hw_gpu_utilization_ratio{NODE}",)),
            Panel("Health by device", "short", (f"leasehold_device_health{NODE} == 1",)),
            Panel("Leases known", "short", (f"leasehold_agent_leases{NODE}",)),
            Panel("Allocations per second, by outcome", "short",
                  (_rate("leasehold_allocations_total", "outcome", NODE),)),
            Panel("Duration of Allocate calls, 99th percentile", "s",
                  (_p99("leasehold_allocation_seconds", "resource", NODE),)),
            Panel("Containers outside their limits", "short",
                  (f"leasehold_container_isolation_lost{NODE}",
                   f"leasehold_container_region_tampered{NODE}")),
            Panel("Time since shares were last used", "s",
                  (f"leasehold_container_idle_seconds{NODE}",)),
        ),
    ),
    Question(
        "control-plane",
        "Does the control plane keep up?",
        {"service": "leasehold_events_handled_total"},
        (
            Panel("Missing components", "short",
                  ("max by (service) (leasehold_missing_components) or on () vector(0)",)),
            Panel("Time to handle a batch, 99th percentile", "s",
                  (_p99("leasehold_handling_seconds", "service, handler",
                        '{service=~"$service"}'),)),
            Panel("Events handled per second, by outcome", "short",
                  (_rate("leasehold_events_handled_total", "service, outcome",
                         '{service=~"$service"}'),)),
            Panel("Events published per second", "short",
                  (_rate("leasehold_events_published_total", "subject",
                         '{service=~"$service"}'),)),
            Panel("Messages sent again", "short",
                  (_rate("leasehold_resent_messages_total", "service, subject"),)),
            Panel("Differences between ledger and cluster", "short",
                  ("sum by (kind) (increase(leasehold_binder_anomalies_total[5m]))",)),
            Panel("Certificates expire in", "s",
                  ("leasehold_webhook_certificate_expiration_timestamp_seconds - time()",
                   "leasehold_auth_certificate_expiration_timestamp_seconds - time()")),
        ),
    ),
)  # fmt: skip


def dashboards() -> dict[Path, str]:
    """Return the files of all dashboards."""
    return {
        FOLDER / f"{question.name}.json": json.dumps(_dashboard(question), indent=1) + "\n"
        for question in QUESTIONS
    }


def _dashboard(question: Question) -> dict[str, Any]:
    return {
        "uid": f"leasehold-{question.name}",
        "title": f"Leasehold: {question.title}",
        "tags": ["gpu"],
        "schemaVersion": 39,
        "version": 1,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_variable(*variable) for variable in question.variables.items()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(question.panels)],
    }


def _variable(label: str, metric: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": f"label_values({metric}, {label})",
        # An agent has two ports: its own metrics, and those of its containers.
        "regex": "/([^:]+):/" if label == "instance" else "",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "expr": expression,
                "refId": chr(ord("A") + place),
                "exemplar": "_bucket" in expression,
            }
            for place, expression in enumerate(panel.expressions)
        ],
    }
