"""Protobuf bodies, as kubectl's typed commands send them."""

import pytest

from simcluster.apimachinery.errors import ApiError
from simcluster.apiserver.http.protobuf_bodies import decode_body


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return bytes([number << 3, content])
    return bytes([number << 3 | 2, len(content)]) + content


def body(kind: str, message: bytes, api_version: str = "v1") -> bytes:
    kind_of = field(1, api_version.encode()) + field(2, kind.encode())
    return b"k8s\0" + field(1, kind_of) + field(2, message)


def test_a_configmap_is_decoded_with_its_maps() -> None:
    meta = field(1, b"settings") + field(11, field(1, b"app") + field(2, b"web"))
    message = field(1, meta) + field(2, field(1, b"a") + field(2, b"1")) + field(4, 1)

    assert decode_body(body("ConfigMap", message)) == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "settings", "labels": {"app": "web"}},
        "data": {"a": "1"},
        "immutable": True,
    }


def test_a_quota_is_decoded_with_its_amounts_and_scopes() -> None:
    hard = b"".join(
        field(1, field(1, name) + field(2, field(1, amount)))
        for name, amount in ((b"pods", b"2"), (b"requests.nvidia.com/gpu", b"4"))
    )
    chosen = field(1, field(1, b"PriorityClass") + field(2, b"In") + field(3, b"high"))
    spec = hard + field(2, b"BestEffort") + field(3, chosen)

    assert decode_body(body("ResourceQuota", field(2, spec)))["spec"] == {
        "hard": {"pods": "2", "requests.nvidia.com/gpu": "4"},
        "scopes": ["BestEffort"],
        "scopeSelector": {"matchExpressions": [
            {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]},
    }  # fmt: skip


def test_bytes_become_base64_and_numbers_differ_from_percentages() -> None:
    secret = decode_body(body("Secret", field(2, field(1, b"p") + field(2, b"q"))))
    spec = field(1, field(1, 1) + field(3, b"50%")) + field(3, field(2, 2))
    budget = decode_body(body("PodDisruptionBudget", field(2, spec), "policy/v1"))

    assert secret["data"] == {"p": "cQ=="}
    assert budget["spec"] == {"minAvailable": "50%", "maxUnavailable": 2}


def test_a_pointer_to_zero_stays_zeros_are_dropped_and_inlined_messages_merge() -> None:
    handler = field(1, field(1, b"true"))
    container = field(1, b"main") + field(10, field(1, handler) + field(2, 0) + field(3, 5))
    template = field(1, field(8, b"")) + field(2, field(2, container))
    deployment = field(2, field(1, 0) + field(3, template) + field(5, 0))

    assert decode_body(body("Deployment", deployment, "apps/v1"))["spec"] == {
        "replicas": 0,
        "template": {
            "metadata": {},
            "spec": {"containers": [{
                "name": "main",
                "livenessProbe": {"exec": {"command": ["true"]}, "timeoutSeconds": 5},
            }]},
        },
    }  # fmt: skip


def test_unknown_fields_are_skipped() -> None:
    meta = field(1, b"team") + field(200 - 185, b"ignored")

    assert decode_body(body("Namespace", field(1, meta)))["metadata"] == {"name": "team"}


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"{}", 400), (b"k8s\0\x0a\x7f", 400), (b"k8s\0", 400), (body("Gadget", b""), 415)],
)
def test_malformed_bodies_are_refused(data: bytes, code: int) -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(data)

    assert refused.value.code == code
