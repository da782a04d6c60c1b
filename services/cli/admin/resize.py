"""The command `resize`: finds the pod, sends a request to a binder, and prints its reply.

`--json` prints {"outcome": "resized" | "unchanged" | "refused" | "unavailable", "pod", "namespace",
"name", "container", "node", "devices": [index], "before" and "after": {"memory_mib",
"cores_percent"} or null, "pending": [steps that follow automatically], "notes", "reason", "hint"}.
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.cli import terminal
from services.cli.program import program
from services.cli.snapshot.location import nats_credentials_of
from services.cli.state_dir import StateDir, load_state
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.types import ObjectMeta
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.request_reply import ResizeReply, ResizeRequest
from shared.model.lease import MIB, ShareSize
from shared.model.names import PodUid
from shared.model.quantity import parse_quantity
from shared.nats.bus import Bus

CONNECT_S = 5.0
REPLY_S = 20.0
"""A binder sends two requests to the node and writes to the pod before it replies."""
EXIT_CODES = {"resized": 0, "unchanged": 0, "refused": 1, "unavailable": 3}


class _PodIdentity(msgspec.Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeTarget:
    """The servers of one Leasehold that a resize needs."""

    nats_url: str
    nats_credentials: ClientCredentials
    kubeconfig: Path | None


def resize(flags: argparse.Namespace) -> int:
    """Resize, and print the outcome."""
    memory_mib = _memory_mib(flags.memory)
    if memory_mib is None and flags.cores is None:
        raise RequestError("set --memory 6Gi, --cores 30, or both")
    target = _target(flags)

    async def send() -> tuple[PodUid, ResizeReply] | None:
        pod = await _uid_of(target, flags.namespace, flags.pod)
        if pod is None:
            return None
        request = ResizeRequest(
            pod=pod, container=flags.container, memory_mib=memory_mib, cores_percent=flags.cores
        )
        return pod, await _request(target, request)

    result = asyncio.run(send())
    name = f"{flags.namespace}/{flags.pod}"
    if result is None:
        print(
            f"leasehold resize: there is no pod {name}; `kubectl get pods -A` lists them, -n names "
            "another namespace",
            file=sys.stderr,
        )
        return 1
    pod, reply = result
    if flags.output:
        terminal.print_document(shape(pod, flags.namespace, flags.pod, reply), flags.output)
    elif reply.outcome in {"resized", "unchanged"}:
        print("\n".join(lines(name, reply)))
    else:
        print(f"leasehold resize: {refusal(name, reply)}", file=sys.stderr)
    return EXIT_CODES.get(reply.outcome, 1)


def _memory_mib(text: str) -> int | None:
    if not text:
        return None
    amount = parse_quantity(text) / MIB
    if amount.denominator != 1 or amount < 1:
        raise RequestError(f"--memory must be whole MiB, such as 6Gi or 6144Mi, got {text}")
    return int(amount)


def _target(flags: argparse.Namespace) -> ResizeTarget:
    directory = StateDir.at(Path(flags.state))
    saved = None if flags.nats_url else load_state(directory)
    if saved is None and not flags.nats_url:
        raise UnavailableError(
            f"no stack in {directory.root}: run `{program()} up`, or set --state, or --nats-url "
            "and --kubeconfig of a cluster"
        )
    kubeconfig = flags.kubeconfig or (saved.kubeconfig if saved else "")
    stored = saved.nats_client_credentials if saved else NO_CREDENTIALS
    return ResizeTarget(
        nats_url=flags.nats_url or (saved.nats_url if saved else ""),
        nats_credentials=nats_credentials_of(flags) or stored,
        kubeconfig=Path(kubeconfig) if kubeconfig else None,
    )


async def _uid_of(target: ResizeTarget, namespace: str, name: str) -> PodUid | None:
    async with KubernetesClient(load_credentials(target.kubeconfig)) as kubernetes:
        try:
            pod = await kubernetes.read(pod_path(namespace, name), _PodIdentity)
        except NotFoundError:
            return None
    return PodUid(pod.metadata.uid)


async def _request(target: ResizeTarget, request: ResizeRequest) -> ResizeReply:
    async with Bus.connect(
        target.nats_url,
        name="leasehold resize",
        credentials=target.nats_credentials,
        patience_s=CONNECT_S,
    ) as bus:
        try:
            return await bus.request(request, ResizeReply, timeout_s=REPLY_S)
        except UnavailableError as error:
            raise UnavailableError(
                f"no reply from a binder ({error}); the outcome is unknown: see `{program()} ps`, "
                "or run the command again, the same size is never granted twice"
            ) from error


def shape(pod: PodUid, namespace: str, name: str, reply: ResizeReply) -> dict[str, Any]:
    """Return the JSON form."""
    return {
        "outcome": reply.outcome,
        "pod": pod,
        "namespace": namespace,
        "name": name,
        "container": reply.container,
        "node": reply.node,
        "devices": list(reply.devices),
        "before": _size_shape(reply.before),
        "after": _size_shape(reply.after),
        "pending": list(reply.pending),
        "notes": list(reply.notes),
        "reason": reply.reason,
        "hint": reply.hint,
    }


def _size_shape(size: ShareSize | None) -> dict[str, int] | None:
    if size is None:
        return None
    return {"memory_mib": size.memory_mib, "cores_percent": size.cores_percent}


def lines(name: str, reply: ResizeReply) -> list[str]:
    """Describe the new size."""
    after = reply.after or ShareSize(memory_mib=0, cores_percent=0)
    before = reply.before or after
    container = f"container {reply.container} of {name}"
    gpus = f"GPU {', '.join(map(str, reply.devices))} of node {reply.node}"
    if reply.outcome == "unchanged":
        first = f"{container} has {_size_text(after)} of {gpus} already"
    else:
        first = f"{container} has {_size_text(after)} of {gpus} now; it had {_size_text(before)}"
    return [
        first,
        *reply.notes,
        *(f"pending: {each}" for each in reply.pending),
    ]


def _size_text(size: ShareSize) -> str:
    cores = f"{size.cores_percent} %" if size.cores_percent else "any part"
    return f"{size.memory_mib} MiB and {cores} of the cores"


def refusal(name: str, reply: ResizeReply) -> str:
    """Describe why it was not resized, and what to try."""
    hint = f"; {reply.hint}" if reply.hint else ""
    return f"{name} was not resized: {reply.reason}{hint}"
