"""Redis, copies of leases and checkpoints, decoded without the product's code; pure.

Records are those of `shared/ledger/records.py`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgpack

from tests.proof.observations import (
    AgentGrant,
    RawCharge,
    RawClaim,
    RawDevice,
    RawLease,
    RawLedger,
    RawPreemption,
    RawShare,
)

INIT = "first"
"""The name of init containers in campaigns. They share what `main` has, so they do not count."""
EXCLUSIVE = 1
"""The number of the sharing policy of a share that has its device to itself."""
BY_DEFAULT = "hami-core"
"""What holds a share, and the mode of its device: records leave that out."""
_HEALTHY = 1
_REFUSED = b"its agent's messages are refused"
_COPY_DEVICE = 1
_COPY_MIB = 5
"""Positions in a share of a lease's copy."""

Hash = Mapping[bytes, bytes]
Hashes = Mapping[str, Hash]


def decode(raw: Hashes, charges: Iterable[RawCharge] = (), **more: Any) -> RawLedger:
    """Decode hashes by their names; `facts:NODE` of each node."""
    return RawLedger(
        ready=raw["ledger"].get(b"ready") == b"1",
        generation=raw["ledger"].get(b"generation", b"").decode(),
        leases={pod.decode(): _lease(pod.decode(), value) for pod, value in raw["leases"].items()},
        devices={uuid.decode(): _device(value) for uuid, value in raw["devices"].items()},
        nodes=frozenset(name.decode() for name, value in raw["nodes"].items() if _is_known(value)),
        waiting=frozenset(uid.decode() for uid in raw["waiting"]),
        gone=frozenset(uid.decode() for uid in raw["gone"]),
        cordoned=frozenset(
            key.removeprefix("facts:")
            for key, value in raw.items()
            if b'"unschedulable":true' in value.get(b"facts", b"")
        ),
        distrusted=frozenset(
            node.decode()
            for node, reason in raw.get("cordons", {}).items()
            if reason.startswith(_REFUSED)
        ),
        claims={
            pod.decode(): _claim(pod.decode(), value)
            for pod, value in raw.get("claims", {}).items()
        },
        starts=frozenset(
            entry["pod"]
            for start in raw.get("starts", {}).values()
            for entry in json.loads(start)["wanted"]
        ),
        preemptions=tuple(map(_preemption, raw.get("preemptions", {}).values())),
        charges=tuple(charges),
        **more,
    )


def _preemption(value: bytes) -> RawPreemption:
    stored = json.loads(msgpack.unpackb(value)[1])
    gang = stored["gang"] or {"name": "", "min_member": 1}
    return RawPreemption(
        id=stored["id"],
        opened_at=stored["opened_at"],
        stage=stored["stage"],
        pods=tuple(wanted["pod"] for wanted in stored["wanted"]),
        gang=gang["name"],
        least=gang["min_member"],
        priority=stored["priority"],
        victims={victim["pod"]: victim["outcome"] for victim in stored["victims"]},
    )


def _lease(pod: str, value: bytes) -> RawLease:
    numbers, request, demand, shares, description = msgpack.unpackb(value)
    state, version, _, created_at, expires_at, activated_at, _, grants = numbers
    return RawLease(
        pod=pod,
        node=demand[0],
        gang=request[2],
        term=description.get("term", {}),
        waiting_mib=description.get("waiting_size", {}).get("memory_mib"),
        state=state,
        version=version,
        created_at=created_at,
        expires_at=expires_at,
        activated_at=activated_at,
        shares=tuple(
            _share(share, slot, fence)
            for share, slot, fence in zip(shares, grants[::2], grants[1::2], strict=True)
            if share["container"] != INIT
        ),
    )


def _claim(pod: str, value: bytes) -> RawClaim:
    node, _, devices, _, _, until = msgpack.unpackb(value)
    return RawClaim(pod=pod, node=node, devices=frozenset(devices), until=until)


def _share(share: Mapping[str, Any], slot: int, fence: int) -> RawShare:
    instance = share.get("mig")
    return RawShare(
        device=share["device"],
        mib=share["memory_mib"],
        cores=0 if instance else share["cores_percent"],  # nothing else uses those of an instance
        layout=instance["layout"] if instance else "",
        memory=share.get("memory", BY_DEFAULT),
        mode=share.get("mode", BY_DEFAULT),
        container=share["container"],
        slot=instance["position"] if instance else slot,
        fence=fence,
    )


def _device(value: bytes) -> RawDevice:
    mib, slots, status, _, used, cores, shares, fence, _, is_claimed, _, is_mig, *texts = (
        msgpack.unpackb(value)
    )
    uuid, node, _, _, layout, _, _ = texts
    return RawDevice(
        uuid=uuid,
        node=node,
        mib=mib,
        slots=slots,
        healthy=status == _HEALTHY,
        used_mib=used,
        used_cores=cores,
        shares=shares,
        fence=fence,
        is_claimed=is_claimed,
        in_mig_mode=is_mig,
        layout=layout,
    )


def _is_known(value: bytes) -> bool:
    """Whether the API server has reported the node, and not removed it."""
    _, status, *_ = msgpack.unpackb(value)
    return bool(status == 1)


def decode_charge(entry: Hash) -> RawCharge:
    """Decode an entry of a budget's stream."""
    values = json.loads(entry[b"e"])
    return RawCharge(
        lease=values.get("lease", ""),
        start_ms=values.get("from_ms", 0),
        end_ms=values.get("to_ms", 0),
        weight=values.get("weight", 0),
        units=values["units"],
        kind=values["kind"],
        window=values["window"],
        reason=values.get("reason", ""),
    )


def copied(text: str) -> dict[str, Any]:
    """Return the node, devices and memory of a lease's copy in an annotation, if there is one."""
    lease = json.loads(text or "{}")
    shares = [share for share in lease.get("shares", ()) if share[0] != INIT]
    return {
        "lease_node": lease.get("node", ""),
        "devices": tuple(share[_COPY_DEVICE] for share in shares),
        "copied_mib": tuple(share[_COPY_MIB] for share in shares),
    }


def checkpoint_grants(checkpoint: Mapping[str, Any]) -> Iterator[AgentGrant]:
    """Return what an agent's checkpoint records; a container with two resources counts once."""
    seen: set[tuple[str, str]] = set()
    for entry in checkpoint["entries"]:
        allocation = entry["allocation"]
        lowered = entry.get("lowered")
        key = (allocation["pod"], allocation["container"])
        lease = lowered["lease"] if lowered else allocation["lease"]
        for share in () if key in seen else lease["shares"]:
            if share["container"] != allocation["container"] or share["container"] == INIT:
                continue
            yield AgentGrant(
                pod=allocation["pod"],
                node=checkpoint["node"],
                container=allocation["container"],
                device=share["device"],
                mib=share["memory_mib"],
                cores=0 if share.get("mig") else share["cores_percent"],
                slot=share.get("slot"),
                fence=share["fence"],
                activated_at=allocation["activated_at"],
                exclusive=share.get("whole", False) or share.get("sharing") == EXCLUSIVE,
            )
        seen.add(key)
