"""Pods as the API server sends them for review, and the decisions on them."""

import json
from typing import Any

import jsonpatch
import msgspec

from services.webhook.admission import AdmissionDecision, decide
from services.webhook.pod_admission import AdmissionPolicy, DeviceMaximum, PodAdmission
from shared.model.events.pod_events import BudgetChanged
from shared.model.names import Namespace
from shared.pods.pod_view import PodView, decode_view

VGPU = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000"}
Obj = dict[str, Any]


def reviewed(pod: Obj, namespace: str = "team-a") -> PodView:
    """Decode a pod that is written as a dictionary."""
    return decode_view(json.dumps(pod).encode(), namespace)


def container(name: str = "side", limits: dict[str, str] | None = None, **fields: Any) -> Obj:
    resources = {"limits": limits, "requests": dict(limits)} if limits else {}
    return {"name": name, "image": "app", "resources": resources, **fields}


def gpu(name: str = "main", **fields: Any) -> Obj:
    return container(name, VGPU, **fields)


def pod(
    *containers: Obj,
    notes: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    **spec: Any,
) -> Obj:
    given = {"annotations": notes, "labels": labels}
    meta: Obj = {"name": "pod"} | {name: value for name, value in given.items() if value}
    return {"metadata": meta, "spec": {"containers": list(containers), **spec}}


def env(name: str, value: str | None = None) -> Obj:
    source: Obj = {"value": value} if value is not None else {"valueFrom": {"fieldRef": {}}}
    return {"env": [{"name": name, **source}]}


def decided(
    obj: Obj,
    *,
    budget: BudgetChanged | None = None,
    exempt: bool = False,
    largest: DeviceMaximum | None = None,
    **policy: Any,
) -> AdmissionDecision:
    return decide(
        PodAdmission(
            pod=reviewed(obj),
            policy=AdmissionPolicy(**policy),
            budget=budget,
            exempt=exempt,
            largest=largest,
        )
    )


def budget(lease_class: str = "reclaimable", **fields: Any) -> BudgetChanged:
    """Return the report of an exhausted budget."""
    return BudgetChanged(
        namespace=Namespace("team-a"),
        state="exhausted",
        previous_state="ok",
        lease_class=lease_class,
        **fields,
    )


def applied(obj: Obj, decision: AdmissionDecision) -> Any:
    assert decision.allowed, decision.message
    return jsonpatch.apply_patch(obj, msgspec.to_builtins(decision.patches))
