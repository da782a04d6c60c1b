"""The command that resizes: finds the pod, asks a binder, and says what came of it.

With `--json`: {"outcome": "resized" | "unchanged" | "refused" | "unavailable", "pod", "namespace",
"name", "container", "node", "devices": [index], "before" and "after": {"memory_mib",
"cores_percent"} or null, "pending": [what follows by itself], "notes", "reason", "hint"}.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.cli.state_dir import StateDir, load_state
from services.topology import OPERATOR
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.credentials.tls import TlsFiles
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
ANSWER_S = 20.0
"""A binder asks the node twice and writes to the pod before it answers."""
CODES = {"resized": 0, "unchanged": 0, "refused": 1, "unavailable": 3}


class _Pod(msgspec.Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Whom to ask."""

    nats_url: str
    nats_keys: ClientCredentials
    kubeconfig: Path | None


def resize(flags: argparse.Namespace) -> int:
    """Resize, and say what came of it."""
    wanted = _memory_mib(flags.memory), flags.cores
    if wanted == (None, None):
        raise RequestError("say what is to change: --memory 6Gi, --cores 30, or both")
    where = _where(flags)

    async def asking() -> tuple[PodUid, ResizeReply] | None:
        pod = await _uid_of(where, flags.namespace, flags.pod)
        if pod is None:
            return None
        asked = ResizeRequest(
            pod=pod, container=flags.container, memory_mib=wanted[0], cores_percent=wanted[1]
        )
        return pod, await _ask(where, asked)

    found = asyncio.run(asking())
    name = f"{flags.namespace}/{flags.pod}"
    if found is None:
        print(
            f"leasehold resize: there is no pod {name}; `kubectl get pods -A` lists them, -n names "
            "another namespace",
            file=sys.stderr,
        )
        return 1
    pod, told = found
    if flags.json:
        print(json.dumps(shape(pod, flags.namespace, flags.pod, told), indent=1))
    elif told.outcome in {"resized", "unchanged"}:
        print("\n".join(lines(name, told)))
    else:
        print(f"leasehold resize: {refusal(name, told)}", file=sys.stderr)
    return CODES.get(told.outcome, 1)


def _memory_mib(text: str) -> int | None:
    if not text:
        return None
    amount = parse_quantity(text) / MIB
    if amount.denominator != 1 or amount < 1:
        raise RequestError(f"--memory {text} is no whole number of MiB; write it as 6Gi or 6144Mi")
    return int(amount)


def _where(flags: argparse.Namespace) -> Where:
    directory = StateDir.at(Path(flags.state))
    saved = None if flags.nats_url else load_state(directory)
    if saved is None and not flags.nats_url:
        raise UnavailableError(
            f"nothing was ever started in {directory.root}: run `leasehold up`, or give --state, "
            "or --nats-url and --kubeconfig of a cluster"
        )
    config = flags.kubeconfig or (saved.kubeconfig if saved else "")
    return Where(
        nats_url=flags.nats_url or (saved.nats_url if saved else ""),
        nats_keys=_given(flags) or (saved.nats_keys if saved else NO_CREDENTIALS),
        kubeconfig=Path(config) if config else None,
    )


def _given(flags: argparse.Namespace) -> ClientCredentials | None:
    """Return what the flags say is to be shown to NATS; None: nothing."""
    login, token, authority = (
        Path(text) if text else None
        for text in (flags.nats_credentials, flags.nats_token_file, flags.nats_ca_file)
    )
    if not (login or token or authority):
        return None
    return ClientCredentials(
        credentials=login, token=token, user=OPERATOR.name, tls=TlsFiles(ca=authority)
    )


async def _uid_of(where: Where, namespace: str, name: str) -> PodUid | None:
    async with KubernetesClient(load_credentials(where.kubeconfig)) as kube:
        try:
            pod = await kube.read(pod_path(namespace, name), _Pod)
        except NotFoundError:
            return None
    return PodUid(pod.metadata.uid)


async def _ask(where: Where, asked: ResizeRequest) -> ResizeReply:
    async with Bus.connect(
        where.nats_url,
        name="leasehold resize",
        keys=where.nats_keys,
        keeps_stream=False,
        patience_s=CONNECT_S,
    ) as bus:
        try:
            return await bus.request(asked, ResizeReply, timeout_s=ANSWER_S)
        except UnavailableError as error:
            raise UnavailableError(
                f"no binder answered ({error}); whether it was done is not known: see `leasehold "
                "ps`, or ask again, the same size is never granted twice"
            ) from error


def shape(pod: PodUid, namespace: str, name: str, told: ResizeReply) -> dict[str, Any]:
    """Return the JSON form."""
    return {
        "outcome": told.outcome,
        "pod": pod,
        "namespace": namespace,
        "name": name,
        "container": told.container,
        "node": told.node,
        "devices": list(told.devices),
        "before": _size(told.before),
        "after": _size(told.after),
        "pending": list(told.pending),
        "notes": list(told.notes),
        "reason": told.reason,
        "hint": told.hint,
    }


def _size(size: ShareSize | None) -> dict[str, int] | None:
    if size is None:
        return None
    return {"memory_mib": size.memory_mib, "cores_percent": size.cores_percent}


def lines(name: str, told: ResizeReply) -> list[str]:
    """Say what was done."""
    after = told.after or ShareSize(memory_mib=0, cores_percent=0)
    before = told.before or after
    where = f"container {told.container} of {name}"
    gpus = f"GPU {', '.join(map(str, told.devices))} of node {told.node}"
    if told.outcome == "unchanged":
        first = f"{where} has {_words(after)} of {gpus} already"
    else:
        first = f"{where} has {_words(after)} of {gpus} now; it had {_words(before)}"
    return [
        first,
        *told.notes,
        *(f"still to come, by itself: {each}" for each in told.pending),
    ]


def _words(size: ShareSize) -> str:
    cores = f"{size.cores_percent} %" if size.cores_percent else "any part"
    return f"{size.memory_mib} MiB and {cores} of the cores"


def refusal(name: str, told: ResizeReply) -> str:
    """Say why it was not done, and what to try."""
    hint = f"; {told.hint}" if told.hint else ""
    return f"{name} keeps its size: {told.reason}{hint}"
