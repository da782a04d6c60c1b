"""What the queries of the history and of autoscalers return, evaluated with values."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.api.reports.history import CLUSTER, DEVICE, Subject
from services.api.reports.prometheus import AMOUNT_METRICS, COLUMN, queries_of
from shared.model.events.pod_events import PodQueued
from shared.model.names import DeviceUuid
from tests.contract.test_monitoring import (
    existing,
    input_series,
    labels_of,
    metrics_in,
    needs_promtool,
    run_rules,
)
from tools.generate.pages import ROOT


def evaluate(
    folder: Path, series: str, query: str, *samples: tuple[str, float], at: str = "0s"
) -> None:
    """Check which samples a query returns at a time, where these series are stored."""
    expected = [{"labels": labels, "value": value} for labels, value in samples]
    check = {"expr": query, "eval_time": at, "exp_samples": expected}
    inputs = input_series(series.strip().splitlines())
    run_rules(folder, {"input_series": inputs, "promql_expr_test": [check]})


RECORDED = """
  leasehold_container_cores_measured_ratio{namespace="a",pod="p",container="1"} 0.2
  leasehold_container_cores_leased_ratio{namespace="a",pod="p",container="1"} 0.5
  leasehold_container_cores_measured_ratio{namespace="a",pod="p",container="2"} 0.1
  leasehold_container_cores_leased_ratio{namespace="a",pod="p",container="2"} 0.5
  leasehold_container_cores_measured_ratio{namespace="b",pod="whole",container="1"} 0.7
  leasehold_container_cores_leased_ratio{namespace="b",pod="whole",container="1"} 0
"""


@needs_promtool
def test_the_recorded_use_of_cores_is_that_of_the_lease_or_of_the_device(tmp_path: Path) -> None:
    used = "round(namespace_pod:leasehold_cores_used:ratio, 0.001)"
    samples = ('{namespace="a",pod="p"}', 0.3), ('{namespace="b",pod="whole"}', 0.7)

    evaluate(tmp_path, RECORDED, used, *samples)


PODS = """
  leasehold_container_gpus_leased{namespace="a",pod="busy",container="1"} 0.25
  leasehold_container_idle_seconds{namespace="a",pod="busy",container="1"} 900
  leasehold_container_gpus_leased{namespace="a",pod="busy",container="2"} 0.25
  leasehold_container_idle_seconds{namespace="a",pod="busy",container="2"} 0
  leasehold_container_gpus_leased{namespace="a",pod="idle",container="1"} 0.125
  leasehold_container_idle_seconds{namespace="a",pod="idle",container="1"} 900
  leasehold_container_gpus_leased{namespace="a",pod="idle",container="2"} 0.125
  leasehold_container_idle_seconds{namespace="a",pod="idle",container="2"} 700
  leasehold_container_memory_leased_bytes{namespace="a",pod="idle",container="1"} 1048576
  leasehold_container_memory_leased_bytes{namespace="a",pod="idle",container="2"} 1048576
  leasehold_container_memory_leased_bytes{namespace="a",pod="idle",container="0"} 5242880
  leasehold_container_memory_leased_bytes{namespace="a",pod="busy",container="1"} 1048576
  leasehold_container_memory_leased_bytes{namespace="a",pod="busy",container="2"} 1048576
  leasehold_container_memory_leased_bytes{namespace="a",pod="busy",container="0"} 1048576
  leasehold_container_cores_leased_ratio{namespace="a",pod="busy",container="0"} 0.5
  leasehold_container_cores_leased_ratio{namespace="a",pod="busy",container="1"} 0.1
  leasehold_container_cores_leased_ratio{namespace="a",pod="idle",container="1"} 0.1
  leasehold_container_memory_measured_bytes{namespace="a",pod="busy",container="0"} 4194304
  leasehold_container_memory_measured_bytes{namespace="a",pod="busy",container="1"} 2097152
  leasehold_container_cores_measured_ratio{namespace="a",pod="busy",container="0"} 0.9
  leasehold_container_cores_measured_ratio{namespace="a",pod="busy",container="1"} 0.3
"""
"""Two pods whose containers 0 are init containers."""


@needs_promtool
@pytest.mark.parametrize(
    ("column", "value"),
    [("idle", 25), ("memory", 7), ("cores", 60), ("used_memory", 2), ("used_cores", 30)],
)
def test_the_history_has_the_most_of_a_pod_and_is_idle_once_all_its_containers_are(
    column: str, value: float, tmp_path: Path
) -> None:
    query = AMOUNT_METRICS[column].replace("@", "").replace("$", "600")

    evaluate(tmp_path, PODS, query, ("{}", value))


SENSORS = """
  hw_temperature_celsius{hw_id="GPU-1",instance="1"} 61
  hw_temperature_celsius{hw_id="GPU-1",instance="2"} 60
  hw_temperature_celsius{hw_id="GPU-2",instance="1"} 90
  hw_power_watts{hw_id="GPU-1",instance="1"} 250.5
  hw_power_watts{hw_id="GPU-2",instance="1"} 400
  leasehold_gpu_sm_clock_hertz{device_uuid="GPU-1",instance="1"} 1410000000
  leasehold_gpu_sm_clock_hertz{device_uuid="GPU-2",instance="1"} 1980000000
  hw_gpu_utilization_ratio{hw_id="GPU-1",instance="1"} 0.42
  hw_gpu_utilization_ratio{hw_id="GPU-2",instance="1"} 1
"""
"""Of two GPUs, one of which two programs measure."""


@needs_promtool
@pytest.mark.parametrize(
    ("column", "value"), [("temperature", 61), ("power", 250.5), ("clock", 1410), ("busy", 42)]
)
def test_the_sensors_of_a_gpu_are_its_own_in_the_units_of_the_history(
    column: str, value: float, tmp_path: Path
) -> None:
    uuid = DeviceUuid("GPU-1")
    subject = Subject(kind=DEVICE, name=uuid, devices=(uuid,))

    evaluate(tmp_path, SENSORS, query_of(subject, column), (named(column), value))


def query_of(subject: Subject, column: str) -> str:
    (query,) = (query for query in queries_of(subject, 600) if f'"{column}"' in query)
    return query


def named(column: str, labels: str = "") -> str:
    return f'{{{COLUMN}="{column}"{labels}}}'


WAITING = """
  leasehold_waiting_pods{system="a",reason="NoFit",instance="1"} 3
  leasehold_waiting_pods{system="a",reason="NoFit",instance="2"} 2
  leasehold_waiting_pods{system="b",reason="NoFit",instance="1"} 4
  leasehold_waiting_pods{system="b",reason="ExceedsGPUQuota",instance="1"} 1
"""
"""Each replica of the API counts all pods."""


@needs_promtool
def test_waiting_pods_are_counted_by_reason_and_once_for_all_replicas(tmp_path: Path) -> None:
    samples = [
        (named("waiting", f',reason="{reason}"'), number)
        for reason, number in (("NoFit", 7), ("ExceedsGPUQuota", 1))
    ]

    evaluate(tmp_path, WAITING, query_of(Subject(kind=CLUSTER), "waiting"), *samples)


def manifests(path: str) -> Iterator[Any]:
    yield from yaml.safe_load_all((ROOT / path).read_text())


def metrics_of_adapter() -> dict[str, tuple[str, str]]:
    """By the names that pods' metrics get, the recorded series and the query of the adapter."""
    (values,) = manifests("k8s/monitoring/prometheus-adapter.yaml")
    (rule,) = values["rules"]["custom"]
    (series,) = re.findall(r'__name__=~"(.+)"', rule["seriesQuery"])
    return {
        re.sub(rule["name"]["matches"], r"\1", name): (name, rule["metricsQuery"])
        for name in existing()
        if re.fullmatch(series, name)
    }


def query_of_keda() -> str:
    (example,) = manifests("examples/inference-keda.yaml")
    query: str = example["spec"]["triggers"][0]["metadata"]["query"]
    return query


def metric_of_autoscaler() -> str:
    (example,) = manifests("examples/inference-hpa.yaml")
    name: str = example["spec"]["metrics"][0]["pods"]["metric"]["name"]
    return name


def test_the_autoscalers_of_the_examples_read_recorded_metrics() -> None:
    assert metric_of_autoscaler() in metrics_of_adapter()
    assert metrics_in(query_of_keda()) <= existing()


def test_the_length_of_the_queue_that_keda_reads_is_a_metric_of_the_watcher() -> None:
    scaled, *_ = manifests("k8s/components/keda/placer-queue.yaml")
    location = scaled["spec"]["triggers"][0]["metadata"]["valueLocation"]

    (name, labels) = re.fullmatch(r"(\w+)\{(.+)\}", location).groups()  # type: ignore[union-attr]
    chosen = dict(re.findall(r'(\w+)="([^"]+)"', labels))

    assert {name} <= existing()
    assert chosen == {"service": "watcher", "subject": PodQueued.subject}
    assert labels_of(name) >= chosen.keys()


SERVERS = """
  leasehold_container_cores_measured_ratio{namespace="default",pod="vllm-1"} 0.9x10 0.1x10
  leasehold_container_cores_leased_ratio{namespace="default",pod="vllm-1"} 0.5x20
  leasehold_container_cores_measured_ratio{namespace="default",pod="vllm-2"} 0.3x20
  leasehold_container_cores_leased_ratio{namespace="default",pod="vllm-2"} 0.5x20
  leasehold_container_cores_measured_ratio{namespace="default",pod="other"} 0.5x20
  leasehold_container_cores_leased_ratio{namespace="default",pod="other"} 0.5x20
  leasehold_container_cores_measured_ratio{namespace="b",pod="vllm-1"} 0.5x20
  leasehold_container_cores_leased_ratio{namespace="b",pod="vllm-1"} 0.5x20
"""
"""One of two servers was busy until some minutes ago."""


@needs_promtool
def test_keda_gets_what_its_servers_use_of_their_leases_now(tmp_path: Path) -> None:
    evaluate(tmp_path, SERVERS, f"round({query_of_keda()}, 0.001)", ("{}", 0.8), at="15m")


@needs_promtool
def test_an_autoscaler_gets_what_each_of_its_pods_uses_of_its_lease_now(tmp_path: Path) -> None:
    series, query = metrics_of_adapter()[metric_of_autoscaler()]
    chosen = {
        "<<.Series>>": series,
        "<<.LabelMatchers>>": 'namespace="default",pod=~"vllm-1|vllm-2"',
        "<<.GroupBy>>": "pod",
    }
    for placeholder, text in chosen.items():
        query = query.replace(placeholder, text)

    samples = ('{pod="vllm-1"}', 0.2), ('{pod="vllm-2"}', 0.6)
    evaluate(tmp_path, SERVERS, f"round({query}, 0.001)", *samples, at="15m")
