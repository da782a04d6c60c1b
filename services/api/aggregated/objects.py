"""Devices, leases and waiting pods as objects for kubectl: kinds, columns and selectors; pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from services.api.projection.problems import visible_reason
from services.api.projection.visible_cluster import VisibleCluster
from shared.model.devices.device import visible_fault
from shared.model.devices.node import LabelRequirement
from shared.model.errors import RequestError
from shared.model.quantity import peaks
from shared.model.views.gpus import DevicePhase, DeviceReservation, MeasuredView, ShareView
from shared.model.views.view import View
from shared.placing.anti_affinity import matches_labels

GROUP = "visibility.leasehold.dev"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
BASE = f"/apis/{API_VERSION}"
CATEGORY = "leasehold"
NODE_LABEL = "leasehold.dev/node"
MODEL_LABEL = "leasehold.dev/model"
VERBS = ("get", "list", "watch")
MOST_SELECTOR = 2000
MOST_TERMS = 50
S = TypeVar("S", bound="Status")


class Status(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is observed."""


Mib = Annotated[int, Meta(description="MiB.")]
Percent = Annotated[int, Meta(description="Percent of one GPU.")]
Gpu = Annotated[str, Meta(description="Of the GPU.")]
Instant = Annotated[datetime | UnsetType, Meta(description="RFC 3339.")]


class GpuDeviceStatus(Status, frozen=True, kw_only=True, rename="camel"):
    """A GPU, how much of it is leased, and whether it gets new pods."""

    node: Gpu
    index: Annotated[int, Meta(description="Its number on the node.")]
    uuid: Gpu
    model: Gpu
    phase: Annotated[
        str, Meta(description="Ready, Reserved, Closed (gets no new pods) or Unhealthy.")
    ]
    message: Annotated[str, Meta(description="Why it is not Ready.")]
    mode: Annotated[str, Meta(description="How it is shared: hami-core or mig.")]
    memory_mib: Mib
    used_memory_mib: Annotated[int, Meta(description="Leased, MiB.")]
    used_cores_percent: Annotated[int, Meta(description="Leased, percent.")]
    used_shares: Annotated[int, Meta(description="Leased shares, or MIG instances.")]
    slots: Annotated[int, Meta(description="How many shares or MIG instances there can be.")]
    instances: Annotated[str, Meta(description="Its MIG instances, such as 3 x 2g.10gb.")]
    sharing_mode: Annotated[str, Meta(description="The mode of its leases; empty without any.")]
    numa: Annotated[int | UnsetType, Meta(description="Its NUMA node.")] = UNSET


class GpuLeaseShare(Status, frozen=True, kw_only=True, rename="camel"):
    """One container's share of one GPU."""

    container: Annotated[str, Meta(description="The container, or the request of the claim.")]
    init: Annotated[bool, Meta(description="Whether it is an init container.")]
    index: Annotated[int, Meta(description="The GPU's number on the node.")]
    uuid: Gpu
    model: Gpu
    memory_mib: Mib
    cores_percent: Annotated[int, Meta(description="The limit of its cores; 0: none.")]
    memory: Annotated[str, Meta(description="What holds its memory; none: nothing.")]
    compute: Annotated[str, Meta(description="What holds its cores; none: nothing.")]
    mig_profile: Annotated[str | UnsetType, Meta(description="Of its MIG instance.")] = UNSET
    used_memory_mib: Annotated[int | UnsetType, Meta(description="Measured, MiB.")] = UNSET
    used_cores_percent: Annotated[int | UnsetType, Meta(description="Measured, percent.")] = UNSET


class GpuLeaseStatus(Status, frozen=True, kw_only=True, rename="camel"):
    """The right of a pod, or of a ResourceClaim, to shares of a node's GPUs."""

    state: Annotated[str, Meta(description="reserved, bound or active.")]
    node: Annotated[str, Meta(description="The node of its GPUs.")]
    system: Annotated[str, Meta(description="The system whose resource names the pod uses.")]
    users: Annotated[tuple[str, ...], Meta(description="The UIDs of the pods that use it.")]
    message: Annotated[str, Meta(description="What is wrong with its GPUs, or it waits for.")]
    since: Instant
    expires: Instant
    idle_since: Instant
    shares: Annotated[tuple[GpuLeaseShare, ...], Meta(description="By container and GPU.")]


class WaitingPodStatus(Status, frozen=True, kw_only=True, rename="camel"):
    """A pod that waits for GPUs, and why."""

    position: Annotated[int, Meta(description="Among all waiting pods.")]
    reason: Annotated[str, Meta(description="Why most nodes refuse it; or GpuQuota, or Budget.")]
    message: Annotated[str, Meta(description="The reason in words, and what to try.")]
    permanent: Annotated[bool, Meta(description="Whether no freed capacity can help.")]
    priority: Annotated[int, Meta(description="Of the pod.")]
    since: Instant
    gang: Annotated[str, Meta(description="The gang with which it starts.")]
    planned_start: Annotated[str, Meta(description="By when it starts, or about when.")]
    start_message: Annotated[str, Meta(description="The same in words, and what ends before.")]


class Metadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The part of ObjectMeta that the objects have."""

    name: str
    namespace: str = ""
    uid: str
    resource_version: str = ""
    creation_timestamp: datetime | UnsetType = UNSET
    labels: Mapping[str, str] = {}


class VisibleObject(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: str = API_VERSION
    kind: str
    metadata: Metadata
    status: Any

    @property
    def key(self) -> tuple[str, str]:
        return self.metadata.namespace, self.metadata.name


def _status(kind: type[S], view: View, **others: Any) -> S:
    own = kind.__struct_fields__
    fields = {name: getattr(view, name, None) for name in own if name not in others} | others
    return kind(**{name: UNSET if value is None else value for name, value in fields.items()})


def _devices(cluster: VisibleCluster) -> Iterator[VisibleObject]:
    """The devices name no pod: any reader of nodes may see them."""
    projection = cluster.projection
    for view in projection.devices.values():
        message = visible_reason(projection.closed_by(view), lambda _: False)
        phase = str(view.phase)
        if view.phase is DevicePhase.RESERVED and view.reservation:
            message = DeviceReservation(until=view.reservation.until).text
        if view.phase is DevicePhase.UNHEALTHY:
            message = visible_fault(view.fault, lambda _: False) or "it is not healthy"
        if view.phase in {DevicePhase.LEASED, DevicePhase.FREE}:
            phase = "Ready"
        labels = projection.totals[view.node].node.facts.labels
        yield VisibleObject(
            kind="GPUDevice",
            metadata=Metadata(
                name=f"{view.node}-{view.index}",
                uid=view.uuid,
                labels={**labels, **_labels(view.node, view.model)},
            ),
            status=_status(GpuDeviceStatus, view, phase=phase, message=message),
        )


def _leases(cluster: VisibleCluster) -> Iterator[VisibleObject]:
    """Yield the latest lease of a name last."""
    models = {uuid: view.model for uuid, view in cluster.projection.devices.items()}
    for view in cluster.leases().leases:
        shares = tuple(_share(share, models.get(share.device, "")) for share in view.shares)
        created = _instant(view.created_at)
        yield VisibleObject(
            kind="GPULease",
            metadata=Metadata(
                name=f"claim:{view.name}" if view.claim else view.name,
                namespace=view.namespace,
                uid=view.pod,
                creation_timestamp=created,
                labels=_labels(view.node, shares[0].model if shares else ""),
            ),
            status=_status(
                GpuLeaseStatus,
                view,
                system="claim" if view.claim else view.dialect,
                message="; ".join(
                    filter(
                        None, dict.fromkeys((*view.unhealthy_devices.values(), view.waiting_text))
                    )
                ),
                since=created,
                expires=_instant(view.expires_at),
                idle_since=_instant(view.idle_since),
                shares=shares,
            ),
        )


def _share(share: ShareView, model: str) -> GpuLeaseShare:
    measured = share.measured or MeasuredView()
    return _status(
        GpuLeaseShare,
        share,
        uuid=share.device,
        model=model,
        mig_profile=share.mig and share.mig.profile,
        used_memory_mib=measured.memory_mib,
        used_cores_percent=measured.cores_percent,
    )


def _waiting(cluster: VisibleCluster) -> Iterator[VisibleObject]:
    pods = {waiting.queued.pod: waiting.queued for waiting in cluster.projection.waiting_pods()}
    for view in cluster.waiting_pods():
        queued = pods[view.pod]
        since = _instant(view.since)
        yield VisibleObject(
            kind="WaitingPod",
            metadata=Metadata(
                name=view.name,
                namespace=view.namespace,
                uid=view.pod,
                creation_timestamp=_instant(queued.created_at),
                labels=queued.labels,
            ),
            status=_status(
                WaitingPodStatus,
                view,
                reason=view.code,
                message=view.text,
                since=since,
                planned_start=view.start.short if view.start else "",
                start_message=view.start.text if view.start else "",
            ),
        )


def _instant(seconds: float | None) -> datetime | UnsetType:
    return datetime.fromtimestamp(int(seconds), UTC) if seconds else UNSET


@lru_cache
def _labels(node: str, model: str) -> Mapping[str, str]:
    value = re.sub(r"[^A-Za-z0-9_.-]+", "-", model)[:63].strip("-_.")
    return {NODE_LABEL: node[:63].rstrip("-_."), MODEL_LABEL: value}


def _age(since: datetime | UnsetType, now: float) -> str:
    if since is UNSET:
        return "<unknown>"
    seconds = max(int(now - since.timestamp()), 0)
    units = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
    return next((f"{seconds // s}{unit}" for unit, s in units if seconds >= 2 * s), f"{seconds}s")


def _device_cells(of: GpuDeviceStatus, _: float) -> tuple[Any, ...]:
    cores = f"{of.used_cores_percent}%"
    leases = f"{of.used_shares}/{of.slots}"
    shown = of.model, of.phase, of.memory_mib, of.used_memory_mib, cores, leases
    return *shown, of.mode, of.sharing_mode or "<none>", of.uuid, of.message


def _lease_cells(of: GpuLeaseStatus, now: float) -> tuple[Any, ...]:
    shares = [share for share in of.shares if not share.init] or list(of.shares)
    leased = peaks((share.uuid, share.memory_mib, share.init) for share in of.shares)
    used = [share.used_memory_mib for share in shares if share.used_memory_mib is not UNSET]
    cores = (_cores(share) for share in shares)
    return (
        *(of.state, of.node, _joined(share.index for share in of.shares)),
        *(sum(leased.values()), sum(used) if used else "<unknown>"),
        *(_joined(cores), _joined(f"{share.memory}/{share.compute}" for share in shares)),
        *(_age(of.since, now), _joined(share.model for share in shares)),
        *(of.system, _joined(share.uuid for share in shares), of.message),
    )


def _waiting_cells(of: WaitingPodStatus, now: float) -> tuple[Any, ...]:
    shown = of.position, of.reason, of.priority, _age(of.since, now), of.planned_start or "<none>"
    return *shown, of.gang, of.message


def _cores(share: GpuLeaseShare) -> str:
    cores = f"{share.cores_percent}%" if share.cores_percent else "any"
    return cores if share.mig_profile is UNSET else share.mig_profile


def _joined(texts: Iterable[Any]) -> str:
    return ",".join(dict.fromkeys(map(str, texts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    kind: str
    plural: str
    short_names: tuple[str, ...]
    namespaced: bool = True
    status: type[Status]
    read: Callable[[VisibleCluster], Iterator[VisibleObject]]
    cells: Callable[[Any, float], tuple[Any, ...]]
    columns: tuple[str, ...]
    wide: tuple[str, ...]


KINDS = (
    Kind(
        kind="GPUDevice",
        plural="gpudevices",
        short_names=("gpu", "gpus"),
        namespaced=False,
        status=GpuDeviceStatus,
        read=_devices,
        cells=_device_cells,
        columns=("Model", "Status", "MiB", "Leased MiB", "Leased Cores", "Leases"),
        wide=("Mode", "Shared", "UUID", "Message"),
    ),
    Kind(
        kind="GPULease",
        plural="gpuleases",
        short_names=("gl",),
        status=GpuLeaseStatus,
        read=_leases,
        cells=_lease_cells,
        columns=("State", "Node", "GPUs", "MiB", "Used MiB", "Cores", "Held By", "Age"),
        wide=("Model", "System", "UUIDs", "Message"),
    ),
    Kind(
        kind="WaitingPod",
        plural="waitingpods",
        short_names=("wp",),
        status=WaitingPodStatus,
        read=_waiting,
        cells=_waiting_cells,
        columns=("Position", "Reason", "Priority", "Waiting", "Start"),
        wide=("Gang", "Message"),
    ),
)


def table(kind: Kind, objects: Iterable[VisibleObject], now: float, include: str) -> dict[str, Any]:
    """`include` is what a row has of its object: Metadata, None or Object."""
    named = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    titles = (
        ("Name", 0),
        *((column, 0) for column in kind.columns),
        *((column, 1) for column in kind.wide),
    )
    rows = [
        {
            "cells": (item.metadata.name, *kind.cells(item.status, now)),
            "object": {"None": None, "Object": item}.get(
                include, {**named, "metadata": item.metadata}
            ),
        }
        for item in objects
    ]
    columns = [
        {"name": title, "type": "string", "format": "", "description": "", "priority": priority}
        for title, priority in titles
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "columnDefinitions": columns,
        "rows": rows,
    }


_TERM = re.compile(
    r"\s*(?:!\s*(?P<absent>[\w./-]+)"
    r"|(?P<key>[\w./-]+)\s*(?:(?P<op>==|!=|=)\s*(?P<value>[\w.-]*)"
    r"|\s(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*(?:,|$)"
)
_OPERATORS = {"=": "In", "==": "In", "in": "In", "!=": "NotIn", "notin": "NotIn"}


def _check_size(text: str) -> None:
    if len(text) > MOST_SELECTOR or text.count(",") >= MOST_TERMS:
        raise RequestError(
            f"a selector may have {MOST_SELECTOR} characters and {MOST_TERMS} terms and values"
        )


def parse_labels(text: str) -> tuple[LabelRequirement, ...]:
    """Raises RequestError."""
    _check_size(text)
    parts = []
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        if match is None or match.end() == at:
            raise RequestError(f"labelSelector {text!r} is not one from {text[at:]!r} on")
        at = match.end()
        values = (match["values"] or match["value"] or "").split(",")
        operator = _OPERATORS.get(match["op"] or match["set"] or "", "Exists")
        parts.append(
            LabelRequirement(match["absent"], "DoesNotExist")
            if match["absent"]
            else LabelRequirement(match["key"], operator, tuple(map(str.strip, values)))
        )
    return tuple(parts)


def parse_fields(text: str, kind: Kind) -> tuple[tuple[str, bool, str], ...]:
    """Return paths of attributes, whether they must equal, and values. Raises RequestError."""
    _check_size(text)
    of_status = [
        field for field in structs.fields(kind.status) if field.name not in {"shares", "users"}
    ]
    fields = {f"status.{field.encode_name}": f"status.{field.name}" for field in of_status}
    fields |= {name: name for name in ("metadata.name", "metadata.namespace")}
    requirements = []
    for term in filter(None, text.split(",")):
        name, equals, value = term.partition("=")
        path = fields.get(name.rstrip("!"))
        if path is None or not equals:
            raise RequestError(f"fieldSelector {term} is not FIELD=VALUE of {', '.join(fields)}")
        requirements.append((path, not name.endswith("!"), value.removeprefix("=")))
    return tuple(requirements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    namespace: str = ""
    name: str = ""
    labels: tuple[LabelRequirement, ...] = ()
    fields: tuple[tuple[str, bool, str], ...] = ()

    def of(
        self, objects: Mapping[tuple[str, str], VisibleObject]
    ) -> dict[tuple[str, str], VisibleObject]:
        return {key: item for key, item in objects.items() if self._selects(item)}

    def _selects(self, item: VisibleObject) -> bool:
        metadata = item.metadata
        return (
            self.namespace in {"", metadata.namespace}
            and self.name in {"", metadata.name}
            and matches_labels(self.labels, metadata.labels)
            and all((_text(attrgetter(f)(item)) == v) is equal for f, equal, v in self.fields)
        )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is UNSET else str(value)
