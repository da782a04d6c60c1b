"""An API server that does nothing but answer: what the pipeline costs without a real one.

Plain HTTP/1.1 on loopback: lists of made-up nodes and of the pods, one watch of pods that the
benchmark feeds, and bindings that are only counted and timed.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any
from urllib.parse import parse_qs, urlsplit

DEVICES = 8
SAMPLE = 987_654_321
"""The number of a pod whose watch line those of others are made from."""
OBJECT = b'"object": '
FILLER = [
    {"manager": "kubectl", "operation": "Update", "fieldsV1": {f"f:{n}": {} for n in range(90)}}
]


def node_object(number: int) -> dict[str, Any]:
    register = "".join(
        f"GPU-{number:05d}-{d},10,81920,NVIDIA-NVIDIA A100-SXM4-80GB,true,hami-core:"
        for d in range(DEVICES)
    )
    name = f"node-{number}"
    return {
        "metadata": {
            "name": name,
            "uid": f"node-uid-{number}",
            "resourceVersion": "1",
            "labels": {
                "kubernetes.io/hostname": name,
                "topology.kubernetes.io/zone": f"z{number % 3}",
            },
            "annotations": {"volcano.sh/node-vgpu-register": register},
        },
        "status": {
            "allocatable": {
                "cpu": "128",
                "memory": "1024Gi",
                "ephemeral-storage": "1000Gi",
                "pods": "250",
                "volcano.sh/vgpu-number": str(10 * DEVICES),
            }
        },
    }


def pod_object(number: int, run: str) -> dict[str, Any]:
    """A pod as kubectl would have made it."""
    limits = {
        "cpu": "10m",
        "memory": "16Mi",
        "volcano.sh/vgpu-number": "1",
        "volcano.sh/vgpu-memory": "2000",
        "volcano.sh/vgpu-cores": "10",
    }
    return {
        "metadata": {
            "name": f"p-{run}-{number}",
            "namespace": "bench",
            "uid": f"{abs(hash(run)) % 16**8:08x}-0000-4000-8000-{number:012x}",
            "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "managedFields": FILLER,
        },
        "spec": {
            "schedulerName": "leasehold",
            "containers": [
                {"name": "c", "image": "x", "resources": {"limits": limits, "requests": limits}}
            ],
        },
        "status": {"phase": "Pending"},
    }


def pod_event(number: int, run: str, version: int) -> bytes:
    """One watch line of about 2 kB."""
    line = _sample_line(run).replace(
        b"p-%b-%d" % (run.encode(), SAMPLE), b"p-%b-%d" % (run.encode(), number), 1
    )
    line = line.replace(b"%012x" % SAMPLE, b"%012x" % number, 1)
    return line.replace(b"@VERSION@", b"%d" % version, 1)


@cache
def _sample_line(run: str) -> bytes:
    """Encoded once, so that this process leaves the CPU to those that are measured."""
    pod = pod_object(SAMPLE, run)
    pod["metadata"]["resourceVersion"] = "@VERSION@"
    return json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n"


@dataclass(slots=True)
class TrivialApi:
    """State shared by all connections."""

    nodes: int
    watcher: "Connection | None" = None
    node_watcher: "Connection | None" = None
    version: int = 10
    bound: dict[str, float] = field(default_factory=dict)
    posts: int = 0
    pods: dict[str, bytes] = field(default_factory=dict)
    """The latest watch line of every pod, in the order of creation. A pod that a list lacks counts
    as deleted."""
    new_lines: list[bytes] = field(default_factory=list)
    lists: dict[str, bytes] = field(default_factory=dict)

    def create(self, number: int, run: str) -> bytes:
        self.version += 1
        line = pod_event(number, run, self.version)
        self.pods[f"p-{run}-{number}"] = line
        return line

    def bind(self, name: str, binding: bytes) -> None:
        """Note the time, and send the bound pod to the watch as an API server does."""
        if name not in self.pods or name in self.bound:
            return
        self.bound[name] = time.perf_counter()
        line, sent = self.pods[name], json.loads(binding)
        node, annotations = sent["target"]["name"], sent["metadata"]["annotations"]
        self.version += 1
        old = b'"resourceVersion": "'
        at = line.index(old) + len(old)
        line = line[:at] + b"%d" % self.version + line[line.index(b'"', at) :]
        line = line.replace(b'"ADDED"', b'"MODIFIED"', 1)
        line = line.replace(b'"spec": {', b'"spec": {"nodeName": "%b", ' % node.encode(), 1)
        copied = b'"metadata": {"annotations": %b, ' % json.dumps(annotations).encode()
        line = line.replace(b'"metadata": {', copied, 1)
        if not self.new_lines:
            asyncio.get_running_loop().call_later(0.002, self.notify)
        self.pods[name] = line
        self.new_lines.append(line)

    def notify(self) -> None:
        if self.watcher is not None:
            self.watcher.feed(b"".join(self.new_lines))
        self.new_lines.clear()

    def page(self, path: str, query: dict[str, list[str]]) -> bytes:
        """Return one page of a list."""
        kind = path.rpartition("/")[2]
        total = {"nodes": self.nodes, "pods": len(self.pods)}.get(kind, 0)
        start = int(query.get("continue", ["0"])[0] or 0)
        end = min(total, start + int(query.get("limit", ["500"])[0]))
        meta = {"resourceVersion": str(self.version)}
        if end < total:
            meta["continue"] = str(end)
        if kind == "nodes":
            items = [json.dumps(node_object(number)).encode() for number in range(start, end)]
        else:
            lines = islice(self.pods.values(), start, end)
            items = [object_in(line) for line in lines]
        return b'{"metadata":%b,"items":[%b]}' % (json.dumps(meta).encode(), b",".join(items))


def object_in(line: bytes) -> bytes:
    return line[line.index(OBJECT) + len(OBJECT) : -2]


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, api: TrivialApi) -> None:
        self.api = api
        self.buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 :][:length], self.buffer[end + 4 + length :]
            method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            self.answer(method, target, body)

    def answer(self, method: str, target: str, body: bytes) -> None:
        url = urlsplit(target)
        query = parse_qs(url.query)
        if method == "POST" and url.path.endswith("/binding"):
            self.api.bind(url.path.split("/")[-2], body)
            self.respond(b'{"kind":"Status","status":"Success"}', status=b"201 Created")
        elif method == "GET" and "watch" in query:
            self.stream(url.path)
        elif method == "GET" and (line := self.api.pods.get(url.path.rpartition("/")[2])):
            self.respond(object_in(line))
        elif method == "GET":
            self.respond(self.api.page(url.path, query))
        else:
            self.api.posts += 1
            self.respond(b"{}", status=b"201 Created")

    def respond(self, body: bytes, *, status: bytes = b"200 OK") -> None:
        assert self.transport is not None
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)

    def stream(self, path: str) -> None:
        assert self.transport is not None
        self.transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        if path.endswith("/pods"):
            self.api.watcher = self
        elif path.endswith("/nodes"):
            self.api.node_watcher = self

    def feed(self, lines: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b"%x\r\n%s\r\n" % (len(lines), lines))
