"""Any input is parsed, or refused with our own error; there is no other outcome."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.webhook.admission import AdmissionPolicy, DeviceMaximum, decide
from shared.dialects import DIALECTS, GPU_RESOURCES
from shared.dialects.volcano.device_register import parse_register
from shared.model.errors import RequestError
from shared.model.events.event import Event
from shared.model.lease_copy import dump_lease, load_lease
from shared.model.names import Namespace
from shared.nats import wire
from tests.support.samples import LEASE, SAMPLES
from tests.support.webhook.reviews import reviewed

ANNOTATIONS = (
    "gang.scheduling.koordinator.sh/min-available",
    "hami.io/gpu-scheduler-policy",
    "hami.io/node-scheduler-policy",
    "leasehold.dev/isolation",
    "nvidia.com/nouse-gputype",
    "nvidia.com/use-gpuuuid",
    "nvidia.com/vgpu-mode",
    "scheduling.koordinator.sh/device-allocate-hint",
    "scheduling.koordinator.sh/device-joint-allocate",
    "scheduling.koordinator.sh/gpu-partition-spec",
    "scheduling.k8s.io/group-name",
    "tencent.com/vcuda-core-limit",
    "volcano.sh/vgpu-mode",
)
AMOUNTS = "0,1,2,-1,1.5,100,150,99999999999999999999,1Gi,10Ki,1e3,1m,50%,\u0661,abc"
WORDS = ("", "mig", "strict", "A100,", ",,", "null", "[]", '"x"', '{"gpu":{}}', '{"gpu":[1]}')
JSON = (
    '{"gpu":{"selector":null}}',
    '{"gpu":{"allocateStrategy":"x","requestPolicy":7}}',
    '{"allocatePolicy":"Restricted"}',
)
odd: st.SearchStrategy[Any] = st.sampled_from([None, True, 3, 2.5, [], {}, "x"])
texts = st.sampled_from([*AMOUNTS.split(","), *WORDS, *JSON])
notes = st.dictionaries(st.sampled_from(ANNOTATIONS), texts, max_size=3)
named = st.fixed_dictionaries({"name": texts})


def pods_with(odd: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Pods of the right types, but for the values that `odd` gives."""
    amounts = st.dictionaries(st.sampled_from(sorted(GPU_RESOURCES)), texts | odd, max_size=4)
    resources = st.fixed_dictionaries({}, optional={"limits": amounts, "requests": amounts})
    references = st.fixed_dictionaries({"configMapRef": named | odd})
    variables = st.lists(
        st.fixed_dictionaries({"name": texts}, optional={"value": texts, "valueFrom": odd}) | odd,
        max_size=2,
    )
    containers = st.fixed_dictionaries(
        {"name": st.sampled_from("abc")},
        optional={
            "image": texts | odd,
            "resources": resources | odd,
            "env": variables | odd,
            "envFrom": st.lists(references, max_size=1) | odd,
            "securityContext": st.fixed_dictionaries({"privileged": st.booleans() | odd}) | odd,
        },
    )
    paths = st.fixed_dictionaries({"path": texts})
    volumes = st.lists(st.fixed_dictionaries({"name": texts, "hostPath": paths | odd}), max_size=2)
    return st.fixed_dictionaries(
        {
            "metadata": st.fixed_dictionaries(
                {},
                optional={
                    "annotations": notes | odd,
                    "labels": st.dictionaries(texts, texts, max_size=2) | odd,
                },
            ),
            "spec": st.fixed_dictionaries(
                {"containers": st.lists(containers | odd, max_size=3)},
                optional={
                    "initContainers": st.lists(containers, max_size=1) | odd,
                    "volumes": volumes | odd,
                    "schedulingGates": st.lists(named, max_size=2) | odd,
                    "nodeName": texts | odd,
                    "schedulerName": texts | odd,
                },
            ),
        }
    )


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Change, drop or double a few bytes."""
    found = bytearray(whole)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(found) - 1))
        found[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
        if not found:
            break
    return bytes(found)


@given(pod=pods_with(odd) | pods_with(st.none()), old_words=st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_pod_under_review_gets_a_response(pod: dict[str, Any], *, old_words: bool) -> None:
    policy = AdmissionPolicy(vendor_messages=frozenset(DIALECTS if old_words else ()))
    try:
        seen = reviewed(pod, "team-a")
    except RequestError:
        return
    decision = decide(seen, policy, largest=DeviceMaximum(16_000, 16_000))
    assert decision.allowed or decision.message


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.subject)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_damaged_message_is_read_or_refused(sample: Event, data: st.DataObject) -> None:
    message = data.draw(damaged(wire.encode([sample])))
    try:
        read = wire.decode(message, type(sample))
    except RequestError:
        return
    assert all(type(event) is type(sample) for event in read)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_lease_is_read_or_refused(data: st.DataObject) -> None:
    text = data.draw(damaged(dump_lease(LEASE).encode())).decode(errors="replace")
    try:
        load_lease(text, namespace=Namespace("team-a"), name="train")
    except RequestError:
        return


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_device_register_is_parsed_as_far_as_possible(data: st.DataObject) -> None:
    whole = b"GPU-a,10,15360,100,NVIDIA-Tesla T4,0,true:GPU-b,10,15360,100,NVIDIA-Tesla T4,0,true:"
    text = data.draw(damaged(whole)).decode(errors="replace")

    for device in parse_register(text):
        assert not device.healthy or min(device.memory_mib, device.slots) > 0
