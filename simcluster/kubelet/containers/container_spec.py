"""The spec of a pod as the kubelet reads it, parsed once; pure."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shared.model.quantity import parse_resources
from simcluster.apimachinery.objects import Json, parse_time

RUN_FOR = "sim.leasehold.dev/run-for"
EXIT_CODE = "sim.leasehold.dev/exit-code"
STOP_AFTER = "sim.leasehold.dev/stop-after"
IMAGE_ENV = "sim.leasehold.dev/image-env"
"""Variables that the images of the pod's containers set, as `NAME=VALUE,NAME=VALUE`."""
_PRINTING_COMMANDS = frozenset({("env",), ("printenv",), ("echo",), ("cat",)})
_DURATION = re.compile(r"\d+(\.\d+)?(ms|s|m|h|d)?")
_ANNOTATION_PATTERNS = {
    RUN_FOR: _DURATION,
    STOP_AFTER: _DURATION,
    EXIT_CODE: re.compile(r"\d{1,3}"),
    IMAGE_ENV: re.compile(r"[A-Za-z_]\w*=[^,=]*(,[A-Za-z_]\w*=[^,=]*)*", re.ASCII),
}
_SEPARATOR = re.compile(r"[;&|\n<>()`]")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class ContainerRole(enum.StrEnum):
    """The role of a container: init containers run first, sidecars beside the app containers."""

    INIT = "init"
    SIDECAR = "sidecar"
    APP = "app"


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeMount:
    """Where a container has a volume of its pod."""

    volume: str
    path: str
    sub_path: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """One container; `limits` holds extended resources only, `requests` all resources."""

    name: str
    role: ContainerRole
    image: str
    command: tuple[str, ...]
    directory: str
    stdin: bool
    tty: bool
    limits: Mapping[str, int]
    requests: Mapping[str, int]
    host_ports: frozenset[tuple[str, int]]
    env: tuple[Json, ...]
    env_from: tuple[Json, ...]
    privileged: bool
    volume_mounts: tuple[VolumeMount, ...]
    resources: Json

    @property
    def runs_to_completion_first(self) -> bool:
        """Whether the container ends before the app containers start."""
        return self.role is ContainerRole.INIT


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """One pod; its containers in the order in which they get devices: init containers first."""

    uid: str
    namespace: str
    name: str
    created_at: float
    containers: tuple[ContainerSpec, ...]
    restart_policy: str
    grace_s: int
    annotations: Mapping[str, str]
    obj: Json

    def of_role(self, *roles: ContainerRole) -> tuple[ContainerSpec, ...]:
        """Return the containers of these roles, in order."""
        return tuple(container for container in self.containers if container.role in roles)


def parse_pod(obj: Json) -> PodSpec:
    """Parse a pod object."""
    meta = obj["metadata"]
    spec = obj["spec"]
    init = [
        _container(
            c,
            ContainerRole.SIDECAR if c.get("restartPolicy") == "Always" else ContainerRole.INIT,
        )
        for c in spec.get("initContainers") or ()
    ]
    app = [_container(container, ContainerRole.APP) for container in spec["containers"]]
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


def _container(obj: Json, role: ContainerRole) -> ContainerSpec:
    resources = obj.get("resources") or {}
    limits = parse_resources(resources.get("limits") or {})
    return ContainerSpec(
        name=obj["name"],
        role=role,
        image=obj.get("image") or "",
        command=(*(obj.get("command") or ()), *(obj.get("args") or ())),
        directory=obj.get("workingDir") or "",
        stdin=bool(obj.get("stdin")),
        tty=bool(obj.get("tty")),
        limits={name: count for name, count in limits.items() if "/" in name},
        requests=limits | parse_resources(resources.get("requests") or {}),
        host_ports=_host_ports(obj),
        env=tuple(obj.get("env") or ()),
        env_from=tuple(obj.get("envFrom") or ()),
        privileged=bool((obj.get("securityContext") or {}).get("privileged")),
        resources=obj.get("resources") or {},
        volume_mounts=tuple(
            VolumeMount(
                volume=mount["name"],
                path=mount["mountPath"],
                sub_path=mount.get("subPath") or "",
                read_only=bool(mount.get("readOnly")),
            )
            for mount in obj.get("volumeMounts") or ()
        ),
    )


def _host_ports(container: Json) -> frozenset[tuple[str, int]]:
    return frozenset(
        (port.get("protocol") or "TCP", int(port["hostPort"]))
        for port in container.get("ports") or ()
        if port.get("hostPort")
    )


@dataclass(frozen=True, slots=True)
class ContainerBehaviour:
    """How a simulated container runs: for a duration (None: until stopped), then its exit code."""

    run_for_s: float | None
    exit_code: int = 0
    known: bool = True
    """Whether annotations or a built-in command determine it; otherwise it is a guess."""


def parse_behaviour(container: ContainerSpec, annotations: Mapping[str, str]) -> ContainerBehaviour:
    """Return how a container runs, by its command and, for app containers, annotations.

    Without both, an init container succeeds at once and any other runs until it is stopped.
    """
    if container.role is ContainerRole.APP and (RUN_FOR in annotations or EXIT_CODE in annotations):
        return ContainerBehaviour(
            _annotation_number(annotations, RUN_FOR),
            int(_annotation_number(annotations, EXIT_CODE)),
        )
    match _command_words(container):
        case ("true", *_):
            return ContainerBehaviour(0)
        case ("false", *_):
            return ContainerBehaviour(0, 1)
        case ("sleep", text, *_) if text == "infinity" or _DURATION.fullmatch(text):
            return ContainerBehaviour(None if text == "infinity" else parse_duration_s(text))
    if prints(container):
        return ContainerBehaviour(0)
    run_for_s = 0 if container.role is ContainerRole.INIT else None
    return ContainerBehaviour(run_for_s, known=False)


def prints(container: ContainerSpec) -> bool:
    """Return whether the command only prints something and ends."""
    return _command_words(container)[:1] in _PRINTING_COMMANDS


def _command_words(container: ContainerSpec) -> tuple[str, ...]:
    """Return the command without its path, or the single command of a shell."""
    command = container.command
    if len(command) > 2 and command[1] == "-c" and not _SEPARATOR.search(command[2]):
        command = tuple(command[2].split())
    return (command[0].rpartition("/")[2], *command[1:]) if command else ()


def parse_duration_s(text: str) -> float:
    """Parse "2s", "150ms", "3m" or a number of seconds; raises ValueError for other text."""
    for unit in sorted(_UNITS_S, key=len, reverse=True):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * _UNITS_S[unit]
    return float(text)


def image_variables(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the images of a pod set."""
    entries = annotations.get(IMAGE_ENV, "").split(",")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries) if name}


def stop_after_s(annotations: Mapping[str, str]) -> float:
    """Return how many seconds the containers take to stop."""
    return _annotation_number(annotations, STOP_AFTER)


def _annotation_number(annotations: Mapping[str, str], key: str) -> float:
    """Return an annotation's number; 0 if it became invalid after `annotation_error`."""
    try:
        return parse_duration_s(annotations.get(key, "0"))
    except ValueError:
        return 0.0


def annotation_error(annotations: Mapping[str, str]) -> str | None:
    """Describe the first invalid annotation of the simulation; None if all are valid."""
    for key, pattern in _ANNOTATION_PATTERNS.items():
        if key in annotations and not pattern.fullmatch(annotations[key]):
            return (
                f"annotation {key} is {annotations[key]!r}, which does not match {pattern.pattern}"
            )
    return None


def pod_requests(pod: PodSpec) -> dict[str, int]:
    """Return a pod's requests: the larger of its init phase and its run phase.

    A sidecar counts for the init containers after it and for the run phase.
    """
    running: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in pod.containers:
        if container.role is ContainerRole.INIT:
            for name, amount in container.requests.items():
                peak[name] = max(peak.get(name, 0), amount + running.get(name, 0))
        else:
            for name, amount in container.requests.items():
                running[name] = running.get(name, 0) + amount
    return {name: max(peak.get(name, 0), running.get(name, 0)) for name in peak | running}
