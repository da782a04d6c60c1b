"""How the watcher reads pods, and its settings."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.watcher.node_sources import parse_node
from services.watcher.pod_tracker import PodTracker
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiNode, ApiPod
from shared.model.errors import RequestError
from shared.model.events.pod_events import PodRejected, PodTerminated
from shared.model.requests.request import PodRequest, Term
from shared.nats import wire
from shared.placing.index.node_index import placement_key
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import TEMPLATES_BYTES, PodParser
from shared.runtime.request_settings import RequestSettings, load_rules
from tests.support.lifecycle import most_at_once

PARSER = PodParser(frozenset({"volcano"}), Rules())


INT64 = "9223372036854775807"
"""The largest amount that the API server takes; what is above becomes this."""
NAMING = "/var/run/nvidia-container-devices/all"
VGPU = {"name": "c", "resources": {"limits": {"volcano.sh/vgpu-number": "1"}}}


def read(
    spec: Mapping[str, object], *, status: Mapping[str, object] | None = None, **meta: object
) -> ObservedPod:
    known = {"name": "p", "namespace": "ns", "uid": "u1", "resourceVersion": "1"}
    whole = {"metadata": known | meta, "spec": spec, "status": status or {}}
    pod = msgspec.json.decode(msgspec.json.encode(whole), type=ApiPod)
    return PARSER.parse(pod)


def read_ours(limits: Mapping[str, object] | None = None, **spec: object) -> ObservedPod:
    container = {"name": "c", "resources": {"limits": limits}} if limits else VGPU
    return read({"schedulerName": "volcano", "containers": [container], **spec})


DEEP = '{"x":' + "[" * 200_000


@pytest.mark.parametrize(
    "text", ["9" * 200_000, "1h" * 100_000, "[" * 200_000, "," * 200_000, DEEP]
)
@pytest.mark.parametrize("scheduler", ["volcano", "theirs"])
def test_no_annotation_takes_long_to_read(text: str, scheduler: str) -> None:
    spec = {"schedulerName": scheduler, "containers": [VGPU]}
    began = time.process_time()
    for annotation in sorted(PARSER.annotations):
        read(spec, annotations={annotation: text})

    assert time.process_time() - began < 2


def test_a_pod_that_was_resized_in_place_has_grown_beyond_its_lease() -> None:
    copy = msgspec.json.encode({"resources": {"cpu": 500, "memory": 100, "pods": 1}}).decode()
    amounts = {"cpu": "8", "memory": "50", "example.com/x": "1"}
    container = VGPU | {"resources": {"requests": amounts}}
    spec = {"schedulerName": "volcano", "nodeName": "n", "containers": [container]}

    def grown(text: str) -> object:
        return read(spec, annotations={"leasehold.dev/lease": text}).unleased_resources

    assert grown(copy) == {"cpu": 7500}
    assert grown("[") == grown(DEEP) == {}


def test_a_resize_that_no_kubelet_will_do_counts_as_what_runs() -> None:
    spec = {
        "nodeName": "n",
        "containers": [{"name": "c", "resources": {"requests": {"cpu": "999"}}}],
    }
    condition = {"type": "PodResizePending", "status": "True", "reason": "Infeasible"}
    running = {"name": "c", "allocatedResources": {"cpu": "2"}}

    def cpu(**status: object) -> object:
        return read(spec, status=status).unleased_resources["cpu"]

    assert cpu(conditions=[condition], containerStatuses=[running]) == 2000
    assert cpu(conditions=[condition]) == 999_000
    assert cpu(containerStatuses=[running]) == 999_000


GPU_LIMIT = {"volcano.sh/vgpu-number": 1}
BOTH = {"cpu": "4", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("limits", "requests", "other", "cpus"),
    [
        (BOTH, {}, BOTH, 4),
        (BOTH, {"cpu": "4000m", "memory": "1024Mi"}, BOTH, 4),
        (BOTH, BOTH, {"cpu": "9", "memory": "1Gi"}, 4),
        (BOTH | {"cpu": "1500m"}, {}, BOTH, 0),
        (BOTH, {"cpu": "2"}, BOTH, 0),
        (BOTH, {}, {"cpu": "1"}, 0),
        ({}, BOTH, BOTH, 0),
        ({}, {}, BOTH, 0),
    ],
)
def test_a_guaranteed_pod_gets_whole_cpus_exclusively(
    limits: dict[str, str], requests: dict[str, str], other: dict[str, str], cpus: int
) -> None:
    with_gpu = {"limits": limits | GPU_LIMIT, "requests": requests}
    containers = [
        {"name": "c", "resources": with_gpu},
        {"name": "other", "resources": {"limits": other}},
    ]

    request = read({"schedulerName": "volcano", "containers": containers}).request

    assert request is not None
    assert [each.exclusive_cpus for each in request.containers] == [cpus]


def test_templates_of_any_size_are_cached_within_a_bound() -> None:
    parser = PodParser(frozenset({"volcano"}), Rules())
    for number in range(40):
        spec = {"containers": [{"name": f"c{number}"}], "nodeSelector": {"a": "x" * 1_000_000}}
        parser.parse(msgspec.convert({"metadata": {"uid": "u"}, "spec": spec}, ApiPod))

    assert TEMPLATES_BYTES - 2_000_000 < sum(map(len, parser._templates)) <= TEMPLATES_BYTES


def test_an_error_is_one_line_whatever_the_value() -> None:
    paths = [{"name": "v", "hostPath": {"path": f"/{text}"}} for text in ("a\n\x1b[2Jb",)]
    spec = {"schedulerName": "volcano", "containers": [VGPU], "volumes": paths}
    pod = msgspec.convert({"metadata": {"uid": "u"}, "spec": spec}, ApiPod)

    error = PARSER.parse(pod).request_error

    assert error.isprintable()
    assert "/a\\n\\x1b[2Jb" in error


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["init", "sidecar"]))), st.integers(0, 9)
)
def test_a_pod_requests_the_most_that_it_uses_at_one_time(
    init: list[tuple[int, str]], main: int
) -> None:
    def container(memory: int, kind: str = "main") -> dict[str, object]:
        more = {"restartPolicy": "Always"} if kind == "sidecar" else {}
        return {"name": "c", "resources": {"requests": {"memory": memory}}, **more}

    seen = read(
        {
            "initContainers": [container(*each) for each in init],
            "containers": [container(main)],
            "overhead": {"memory": 3},
        }
    )

    most = 3 + most_at_once(
        [*init, (main, "main")], lambda each: each[1] == "init", lambda each: each[0]
    )
    assert seen.resources.get("memory", 0) == most


def test_pods_of_one_template_share_a_request_and_other_annotations_make_a_difference() -> None:
    limits = {"volcano.sh/vgpu-number": 1}
    spec = {
        "schedulerName": "volcano",
        "containers": [{"name": "c", "resources": {"limits": limits}}],
    }

    one, two = (read(spec, uid=uid, name=uid) for uid in ("one", "two"))
    other = read(spec, annotations={"volcano.sh/vgpu-mode": "mig"})

    assert one.request == two.request
    assert (one.pod, two.pod) == ("one", "two")
    assert other.request is not None
    assert other.request.selection.mode == "mig"


EXPECTED = "leasehold.dev/expected-run-time"
MOST = "leasehold.dev/max-run-time"


@pytest.mark.parametrize(
    ("spec", "annotations", "term"),
    [
        ({}, {}, Term()),
        ({"activeDeadlineSeconds": 7200}, {MOST: "2h"}, Term(max_run_s=7200)),
        ({"activeDeadlineSeconds": 60}, {MOST: "2h"}, Term(max_run_s=60)),
        ({"activeDeadlineSeconds": 10**30}, {}, Term(max_run_s=2**31 - 1)),
        (
            {"activeDeadlineSeconds": 60, "terminationGracePeriodSeconds": -1},
            {EXPECTED: "30s"},
            Term(max_run_s=60, expected_run_s=30, grace_s=0),
        ),
    ],
)
def test_only_what_the_kubelet_enforces_is_a_maximum_run_time(
    spec: Mapping[str, object], annotations: Mapping[str, str], term: Term
) -> None:
    seen = read({"schedulerName": "volcano", "containers": [VGPU], **spec}, annotations=annotations)

    assert seen.request is not None
    assert seen.request.term == term
    assert placement_key(seen.request) == placement_key(read_ours().request or PodRequest())


@pytest.mark.parametrize(
    ("annotations", "spec", "fault"),
    [
        ({MOST: "2h"}, {}, "set spec.activeDeadlineSeconds to 7200"),
        ({MOST: "1h"}, {"activeDeadlineSeconds": 3601}, "set spec.activeDeadlineSeconds to 3600"),
        (
            {MOST: "2 days"},
            {"activeDeadlineSeconds": 60},
            "annotation leasehold.dev/max-run-time: ",
        ),
        ({EXPECTED: "0s"}, {}, "annotation leasehold.dev/expected-run-time: "),
    ],
)
def test_a_run_time_that_nothing_enforces_or_that_is_malformed_is_refused(
    annotations: Mapping[str, str], spec: Mapping[str, object], fault: str
) -> None:
    seen = read({"schedulerName": "volcano", "containers": [VGPU], **spec}, annotations=annotations)

    assert fault in seen.request_error


def test_vcuda_memory_is_summed_as_the_kubelet_sums_it() -> None:
    limits = {"tencent.com/vcuda-core": 100, "tencent.com/vcuda-memory": 70}
    spec = {
        "schedulerName": "volcano",
        "containers": [{"name": "c", "resources": {"limits": limits}}],
    }
    shown = {"allocatable": {"tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "60"}}

    request = read(spec).request
    facts = parse_node(msgspec.convert({"metadata": {"name": "n"}, "status": shown}, ApiNode))

    assert request is not None
    assert request.resources == {"tencent.com/vcuda-memory": 70, "pods": 1}
    assert facts.allocatable == {"tencent.com/vcuda-memory": 60}


@pytest.mark.parametrize(
    "limits",
    [
        {"volcano.sh/vgpu-number": "1", "cpu": INT64},
        {"volcano.sh/vgpu-number": "1", "ephemeral-storage": INT64},
        {"volcano.sh/vgpu-number": INT64},
        {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": INT64},
    ],
)
def test_a_request_too_large_to_count_is_an_encodable_error(
    limits: dict[str, str],
) -> None:
    seen = read_ours(limits)

    assert "is more than any node has" in seen.request_error
    assert seen.request is None


def test_containers_that_together_request_too_much_to_count_are_an_error() -> None:
    half = {"name": "c", "resources": {"requests": {"memory": "9007199254740991"}}}
    seen = read_ours(containers=[half, half])

    assert "memory: 18014398509481982 is more than any node has" in seen.request_error


def test_a_node_capacity_too_large_to_count_is_capped() -> None:
    text = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": INT64, "pods": "110"}}}
    node = msgspec.json.decode(msgspec.json.encode(text), type=ApiNode)

    assert parse_node(node).allocatable == {"cpu": 2**53 - 1, "pods": 110}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            RequestSettings(gpu_scheduler_policy="spraed"),
            "--gpu-scheduler-policy must be one of .* got 'spraed'",
        ),
        (RequestSettings(node_scheduler_policy="numa"), "--node-scheduler-policy must be one of"),
        (RequestSettings(systems=("nvida",)), "there is no system 'nvida'"),
    ],
    ids=["gpu policy", "node policy", "dialect"],
)
def test_invalid_settings_are_refused_at_the_start(settings: RequestSettings, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        load_rules(settings)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"volumes": [{"name": "v", "hostPath": {"path": "/dev/nvidia0"}}]}, "/dev/nvidia0"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/etc/ld.so.preload"}}]}, "preload"),
        ({"containers": [{**VGPU, "securityContext": {"privileged": True}}]}, "c is privileged"),
        (
            {"containers": [VGPU, {"name": "side", "securityContext": {"privileged": True}}]},
            "container side is privileged",
        ),
        (
            {"containers": [{**VGPU, "volumeMounts": [{"name": "v", "mountPath": NAMING}]}]},
            "would select devices in the container runtime",
        ),
    ],
)
def test_gpusharing_35_a_pod_that_the_webhook_would_deny_is_rejected_without_it(
    spec: dict[str, Any], message: str
) -> None:
    seen = read_ours(**spec)

    [event] = PodTracker().update(seen, None)

    assert isinstance(event, PodRejected)
    assert message in event.reason


def test_volumes_of_other_kinds_and_pods_without_a_gpu_are_admitted() -> None:
    config = {"name": "v", "configMap": {"name": "c"}}
    data = {"name": "d", "hostPath": {"path": "/data"}}
    devices = {"name": "v", "hostPath": {"path": "/dev/nvidia0"}}
    ours = {"schedulerName": "volcano", "containers": [VGPU], "volumes": [config, data]}
    asking = read(ours)
    no_gpu = {"schedulerName": "volcano", "containers": [{"name": "c"}], "volumes": [devices]}
    plain = read(no_gpu)

    assert (asking.request_error, plain.request_error) == ("", "")


REJECTIONS = ("OutOfcpu", f"OutOf{'x' * 300}/mib", "UnexpectedAdmissionError", "NodeAffinity")


@pytest.mark.parametrize("reason", REJECTIONS)
def test_a_pod_that_its_kubelet_rejected_is_published_with_the_kubelets_reason(reason: str) -> None:
    spec = {"schedulerName": "volcano", "nodeName": "n", "containers": [VGPU]}
    status = {"phase": "Failed", "reason": reason, "message": "m" * 40_000}

    rejected = read(spec, status=status)
    evicted = read(spec, status={**status, "containerStatuses": [{"name": "c"}]})
    (ended,) = PodTracker().update(rejected, None)

    assert isinstance(ended, PodTerminated)
    assert ended.rejection.startswith(f"{reason}: mmm")
    (again,) = wire.decode(wire.encode([ended]), PodTerminated)
    assert again == ended
    assert not evicted.rejection
