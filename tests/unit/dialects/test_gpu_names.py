"""Which annotations name GPUs, as the webhook and as the API server's policy decide."""

import math
import posixpath
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.webhook.registration import admission_policies
from shared.dialects.gpu_names import RUNTIME_PATTERNS, annotations_with_gpus
from simcluster.apiserver.cel import compile_expression
from tests.support.webhook.gpu_annotations import HARMLESS, NAMING

LONGEST = 256 * 1024
"""Bytes of all annotations of an object that an API server accepts."""
VARIABLES = {
    each["name"]: compile_expression(each["expression"])
    for policy in admission_policies()
    if policy["metadata"]["name"] == "leasehold-annotations" and "variables" in policy["spec"]
    for each in policy["spec"]["variables"]
}
PATTERN_VARIABLES = (
    "deviceNodes",
    "otherPaths",
    "cdiVendors",
    "cdiClasses",
    "majorNumbers",
    "hiddenLetters",
)
MOST_COST = 1_000_000
"""At this cost, an API server ends the evaluation of a variable and denies the request:
https://kubernetes.io/docs/reference/using-api/cel/#resource-constraints"""


def denied_by_policy(notes: dict[str, str], old: dict[str, str] | None = None) -> Any:
    """Return the annotations that the policy finds in a new pod, or in a changed one."""
    known: dict[str, Any] = {"isNewPod": old is None, "inExemptNamespace": False}
    names = {
        "object": {"metadata": {"annotations": notes}},
        "oldObject": None if old is None else {"metadata": {"annotations": old}},
        "variables": known,
    }
    for name in ("changed", *PATTERN_VARIABLES, "namingGpus"):
        known[name] = VARIABLES[name].evaluate(names)
    return [key for key in known["changed"] if key in known["namingGpus"]]  # as its message does


@pytest.mark.parametrize(("key", "value"), NAMING)
def test_an_annotation_under_any_key_that_names_a_gpu_is_found(key: str, value: str) -> None:
    assert annotations_with_gpus({key: value, "mine": "stays"}).keys() == {key}
    assert denied_by_policy({key: value, "mine": "stays"}) == [key]
    assert denied_by_policy({key: value}, {key: "/dev/fuse"}) == [key]


@pytest.mark.parametrize(("key", "value"), HARMLESS)
def test_an_annotation_that_names_no_gpu_to_a_runtime_is_left_alone(key: str, value: str) -> None:
    assert not annotations_with_gpus({key: value})
    assert denied_by_policy({key: value}) == []


def test_what_a_pod_has_already_is_no_change() -> None:
    names = dict([NAMING[0]])

    assert denied_by_policy({**names, "mine": "new"}, {**names, "mine": "old"}) == []


@pytest.mark.parametrize("pattern", RUNTIME_PATTERNS.values(), ids=RUNTIME_PATTERNS)
def test_the_api_server_can_match_as_much_as_an_object_may_have(pattern: str) -> None:
    assert math.ceil(LONGEST * 0.1) * math.ceil(len(pattern) * 0.25) < MOST_COST


PARTS = st.sampled_from(
    ["dev", "nvidia0", "nvidiactl", "dri", "card0", "tmp", ".", "..", "", "proc/1/root", "x"]
)
AROUND = st.sampled_from(["", " ", '"', ",", ":", "- path: ", '{"p":"', "=", "\n"])


@given(st.lists(PARTS, min_size=1, max_size=9), AROUND, AROUND)
def test_a_path_is_found_by_where_it_leads_and_the_policy_misses_none(
    parts: list[str], before: str, after: str
) -> None:
    path = "/" + "/".join(parts)
    value = f"{before}{path}{after}"

    found = bool(annotations_with_gpus({"k": value}))

    leads = posixpath.normpath(f"/{path.lstrip('/')}").rpartition("/proc/1/root")[2]
    assert found or not leads.startswith(("/dev/nvidia", "/dev/dri/")), leads
    assert denied_by_policy({"k": value}) or not found


VENDORS = st.sampled_from(["nvidia.com", "k8s.gpu.nvidia.com", "example.org", "leasehold.dev"])
CLASSES = st.sampled_from(["gpu", "mig", "mig-1g.5gb", "my-gpu", "vgpu", "gds", "nic", "gpu.count"])


@given(VENDORS, CLASSES, st.text(alphabet="aZ09-_.:*", max_size=5), AROUND, AROUND)
def test_webhook_and_policy_agree_on_names_of_devices(
    vendor: str, device_class: str, device: str, before: str, after: str
) -> None:
    notes = {"k": f"{before}{vendor}/{device_class}={device}{after}"}

    assert bool(annotations_with_gpus(notes)) == bool(denied_by_policy(notes))


@given(st.text(alphabet="/.dev nvidia0=\\u:&major195", max_size=60))
def test_the_policy_finds_all_that_the_webhook_finds(value: str) -> None:
    assert denied_by_policy({"k": value}) or not annotations_with_gpus({"k": value})


@pytest.mark.parametrize(
    "part", ["/..", "/dev", "nvidia", "a/", "&major ", "\\", ":/", "gpu-=", "a/gpu.", "&a", "mig."]
)
def test_the_longest_value_takes_no_time(part: str) -> None:
    value = part * (LONGEST // len(part))
    started = time.process_time()

    annotations_with_gpus({"k": value, "l": f"a/{value}.=x"})

    assert time.process_time() - started < 5, "a quadratic search takes minutes"
