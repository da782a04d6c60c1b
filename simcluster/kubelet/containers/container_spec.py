"""What a kubelet reads from a pod's spec, parsed once; pure."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from shared.model.quantity import parse_resources
from simcluster.apimachinery.objects import Json, parse_time

RUN_FOR = "sim.leasehold.dev/run-for"


EXIT_CODE = "sim.leasehold.dev/exit-code"


STOP_AFTER = "sim.leasehold.dev/stop-after"


_PRINTING = frozenset({("env",), ("printenv",), ("echo",), ("cat",)})


_DURATION = re.compile(r"\d+(\.\d+)?(ms|s|m|h|d)?")


_FORMS = {RUN_FOR: _DURATION, STOP_AFTER: _DURATION, EXIT_CODE: re.compile(r"\d{1,3}")}


_SEPARATOR = re.compile(r"[;&|\n]")


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Role(enum.StrEnum):
    """When a container runs: to its end before the others, beside them, or as one of them."""

    INIT = "init"
    SIDECAR = "sidecar"
    APP = "app"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """One container; `limits` holds extended resources only, `requests` everything."""

    name: str
    role: Role
    image: str
    command: tuple[str, ...]
    limits: Mapping[str, int]
    requests: Mapping[str, int]
    host_ports: frozenset[tuple[str, int]]
    env: tuple[Json, ...]
    host_paths: Mapping[str, str]
    """Mounted host directories by container path."""

    @property
    def runs_to_completion_first(self) -> bool:
        """Whether the container is over before the pod's others start."""
        return self.role is Role.INIT


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """One pod; containers in the order in which devices are given out: init first."""

    uid: str
    namespace: str
    name: str
    created_at: float
    containers: tuple[ContainerSpec, ...]
    restart_policy: str
    grace_s: int
    annotations: Mapping[str, str]
    obj: Json

    def of_role(self, *roles: Role) -> tuple[ContainerSpec, ...]:
        """Return the containers of some roles, in order."""
        return tuple(container for container in self.containers if container.role in roles)


def parse_pod(obj: Json) -> PodSpec:
    """Read a pod object."""
    meta, spec = obj["metadata"], obj["spec"]
    volumes = {
        volume["name"]: volume["hostPath"].get("path", "")
        for volume in spec.get("volumes") or ()
        if volume.get("hostPath")
    }
    init = [
        _container(c, Role.SIDECAR if c.get("restartPolicy") == "Always" else Role.INIT, volumes)
        for c in spec.get("initContainers") or ()
    ]
    app = [_container(container, Role.APP, volumes) for container in spec["containers"]]
    grace_s = spec.get("terminationGracePeriodSeconds")
    return PodSpec(
        uid=meta["uid"],
        namespace=meta["namespace"],
        name=meta["name"],
        created_at=parse_time(meta["creationTimestamp"]),
        containers=(*init, *app),
        restart_policy=spec.get("restartPolicy") or "Always",
        grace_s=30 if grace_s is None else int(grace_s),
        annotations=meta.get("annotations") or {},
        obj=obj,
    )


def _container(obj: Json, role: Role, volumes: Mapping[str, str]) -> ContainerSpec:
    resources = obj.get("resources") or {}
    limits = parse_resources(resources.get("limits") or {})
    requests = limits | parse_resources(resources.get("requests") or {})
    return ContainerSpec(
        name=obj["name"],
        role=role,
        image=obj.get("image") or "",
        command=(*(obj.get("command") or ()), *(obj.get("args") or ())),
        limits={name: count for name, count in limits.items() if "/" in name},
        requests=requests,
        host_ports=frozenset(
            (port.get("protocol") or "TCP", int(port["hostPort"]))
            for port in obj.get("ports") or ()
            if port.get("hostPort")
        ),
        env=tuple(obj.get("env") or ()),
        host_paths={
            mount["mountPath"]: volumes[mount["name"]]
            for mount in obj.get("volumeMounts") or ()
            if mount["name"] in volumes
        },
    )


@dataclass(frozen=True, slots=True)
class ContainerBehaviour:
    """What a simulated container does: ends with a code after a while, or never (None)."""

    run_for_s: float | None
    exit_code: int = 0


def parse_behaviour(container: ContainerSpec, annotations: Mapping[str, str]) -> ContainerBehaviour:
    """Say how a container runs, from its command and, for app containers, the annotations.

    Without either an init container succeeds at once and any other runs until it is stopped.
    """
    if container.role is Role.APP and (RUN_FOR in annotations or EXIT_CODE in annotations):
        return ContainerBehaviour(
            _annotation_number(annotations, RUN_FOR),
            int(_annotation_number(annotations, EXIT_CODE)),
        )
    match _words(container):
        case ("true", *_):
            return ContainerBehaviour(0)
        case ("false", *_):
            return ContainerBehaviour(0, 1)
        case ("sleep", text, *_) if _DURATION.fullmatch(text):
            return ContainerBehaviour(parse_duration_s(text))
    if prints(container):
        return ContainerBehaviour(0)
    return ContainerBehaviour(0) if container.role is Role.INIT else ContainerBehaviour(None)


def prints(container: ContainerSpec) -> bool:
    """Tell whether the command only prints something and ends."""
    return _words(container)[:1] in _PRINTING


def _words(container: ContainerSpec) -> tuple[str, ...]:
    """Return the command without its path, or the only command that a shell is told to run."""
    command = container.command
    if len(command) > 2 and command[1] == "-c" and not _SEPARATOR.search(command[2]):
        command = tuple(command[2].split())
    return (PurePosixPath(command[0]).name, *command[1:]) if command else ()


def parse_duration_s(text: str) -> float:
    """Read "2s", "150ms", "3m" or a plain number of seconds; ValueError for anything else."""
    for unit in sorted(_UNITS_S, key=len, reverse=True):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * _UNITS_S[unit]
    return float(text)


def stop_after_s(annotations: Mapping[str, str]) -> float:
    """Return how long the containers take to stop when told to."""
    return _annotation_number(annotations, STOP_AFTER)


def _annotation_number(annotations: Mapping[str, str], key: str) -> float:
    """Return an annotation's number; 0 where it was spoilt after `annotation_fault` saw it."""
    try:
        return parse_duration_s(annotations.get(key, "0"))
    except ValueError:
        return 0.0


def annotation_error(annotations: Mapping[str, str]) -> str | None:
    """Say which annotation for the simulation is not what it must be, or None."""
    for key, form in _FORMS.items():
        if key in annotations and not form.fullmatch(annotations[key]):
            return f"annotation {key} is {annotations[key]!r}, which does not match {form.pattern}"
    return None


def pod_requests(pod: PodSpec) -> dict[str, int]:
    """Return what a pod needs of each resource: the larger of its init phase and its run phase.

    A sidecar counts for the init containers after it and for the whole run.
    """
    beside: dict[str, int] = {}
    most: dict[str, int] = {}
    for container in pod.containers:
        if container.role is Role.INIT:
            for name, amount in container.requests.items():
                most[name] = max(most.get(name, 0), amount + beside.get(name, 0))
        else:
            for name, amount in container.requests.items():
                beside[name] = beside.get(name, 0) + amount
    return {name: max(most.get(name, 0), beside.get(name, 0)) for name in most | beside}
