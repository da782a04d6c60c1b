"""The spans that a watcher records of whole pods."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.watcher.pod_spans import PodSpans
from shared.model.names import NodeName
from shared.pods.observed_pod import ObservedPod
from shared.runtime.settings import ServiceSettings
from shared.runtime.telemetry import open_tracing
from tests.unit.watcher.test_trackers import WAITING

CREATED_NS = int(WAITING.created_at * 1e9)
REVIEWED = structs.replace(WAITING, reviewed=f"{CREATED_NS + 5}-{CREATED_NS + 9}")
BOUND = structs.replace(WAITING, node=NodeName("a"))
RUNNING = structs.replace(BOUND, phase="Running")


def recorded(directory: Path, *states: ObservedPod | None) -> dict[str, dict[str, Any]]:
    tracing = open_tracing("watcher", ServiceSettings(trace_dir=directory))
    spans = PodSpans(tracing)
    before: ObservedPod | None = None
    for now in states:
        spans.observe([(now, before)])
        before = now
    tracing.close()
    texts = [file.read_text() for file in directory.iterdir()]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["name"]: line for line in lines}


def test_a_pod_is_one_span_from_its_review_until_its_containers_run(tmp_path: Path) -> None:
    spans = recorded(
        tmp_path, REVIEWED, BOUND, RUNNING, structs.replace(RUNNING, phase="Succeeded")
    )

    root, whole, review, start = (
        spans[name] for name in ("create pod", "start pod", "review pod", "start containers")
    )
    assert len(spans) == 4
    assert (review["start_ns"], review["end_ns"]) == (CREATED_NS + 5, CREATED_NS + 9)
    assert (root["start_ns"], root["end_ns"]) == (review["start_ns"], review["end_ns"])
    assert whole["start_ns"] == root["start_ns"]
    assert whole["end_ns"] >= start["end_ns"] > root["end_ns"]
    assert {review["parent"], start["parent"], whole["parent"]} == {root["span"]}
    assert (root["parent"], whole["ok"]) == ("", True)
    assert review["service"] == "leasehold-webhook"
    assert start["attributes"]["k8s.node.name"] == "a"


def test_a_pod_that_waits_has_a_root_span_already_and_each_watcher_the_same(
    tmp_path: Path,
) -> None:
    first, second = (recorded(tmp_path / name, REVIEWED) for name in ("first", "second"))

    assert set(first) == {"create pod", "review pod"}
    assert [first[name] for name in sorted(first)] == [second[name] for name in sorted(second)]


def test_a_wait_is_one_span_with_each_reason_once(tmp_path: Path) -> None:
    reasons = ("no node is free", "no node is free", "the quota is used up")
    waits = [structs.replace(WAITING, reason=reason) for reason in reasons]

    wait = recorded(tmp_path, WAITING, *waits, BOUND)["wait for capacity"]

    assert [text for _, text in wait["notes"]] == ["no node is free", "the quota is used up"]
    assert wait["start_ns"] == wait["notes"][0][0] <= wait["end_ns"]


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (None, "it was deleted before its containers ran"),
        (structs.replace(BOUND, phase="Failed", rejection="OutOfcpu: x"), "OutOfcpu: x"),
    ],
)
def test_a_pod_that_never_runs_is_a_failed_span(
    tmp_path: Path, last: ObservedPod | None, text: str
) -> None:
    whole = recorded(tmp_path, WAITING, last)["start pod"]

    assert (whole["ok"], whole["text"]) == (False, text)
    assert whole["attributes"]["leasehold.reason"] == text


@pytest.mark.parametrize("written", ["", "9-5", "x" * 100_000, f"1-{CREATED_NS}", "٣-٤"])
def test_times_of_a_review_that_cannot_be_are_not_believed(tmp_path: Path, written: str) -> None:
    pod = structs.replace(WAITING, reviewed=written)

    spans = recorded(tmp_path, pod, RUNNING)

    assert "review pod" not in spans
    assert spans["start pod"]["start_ns"] == CREATED_NS


def test_pods_of_others_and_pods_that_run_already_have_no_spans(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    others = structs.replace(WAITING, ours=False)

    assert recorded(tmp_path / "none", others, RUNNING) == {}
