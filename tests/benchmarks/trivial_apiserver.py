"""An API server that does nothing but answer: what the pipeline costs without a real one.

Plain HTTP/1.1 on loopback: lists of made-up nodes and of the pods, watches of pods that the
benchmark feeds, and bindings that are only counted and timed.
"""

import asyncio
import json
import time
from functools import cache
from itertools import islice
from urllib.parse import parse_qs, urlsplit

DEVICES = 8
SAMPLE = 987_654_321
"""The number of a pod whose watch line those of others are made from."""
OBJECT = b'"object": '
ALLOCATABLE = {"cpu": "128", "memory": "1024Gi", "ephemeral-storage": "1000Gi", "pods": "250"}
LIMITS = {
    "cpu": "10m",
    "memory": "16Mi",
    "volcano.sh/vgpu-number": "1",
    "volcano.sh/vgpu-memory": "2000",
    "volcano.sh/vgpu-cores": "10",
}
FILLER = [
    {"manager": "kubectl", "operation": "Update", "fieldsV1": {f"f:{n}": {} for n in range(90)}}
]


def node_object(number):
    name = f"node-{number}"
    zone = f"z{number % 3}"
    register = "".join(
        f"GPU-{number:05d}-{d},10,81920,NVIDIA A100-SXM4-80GB,true,hami-core:"
        for d in range(DEVICES)
    )
    return {
        "metadata": {
            "name": name,
            "uid": f"node-uid-{number}",
            "resourceVersion": "1",
            "labels": {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone},
            "annotations": {"volcano.sh/node-vgpu-register": register},
        },
        "status": {"allocatable": ALLOCATABLE | {"volcano.sh/vgpu-number": str(10 * DEVICES)}},
    }


def pod_object(number, run):
    """Return a pod as kubectl would have made it."""
    container = {"name": "c", "image": "x", "resources": {"limits": LIMITS, "requests": LIMITS}}
    return {
        "metadata": {
            "name": f"p-{run}-{number}",
            "namespace": "bench",
            "uid": f"{abs(hash(run)) % 16**8:08x}-0000-4000-8000-{number:012x}",
            "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "managedFields": FILLER,
        },
        "spec": {"schedulerName": "leasehold", "containers": [container]},
        "status": {"phase": "Pending"},
    }


def pod_event(number, run, version):
    """Return one watch line of about 2 kB."""
    name = b"p-%b-" % run.encode()
    line = _sample_line(run)
    line = line.replace(name + b"%d" % SAMPLE, name + b"%d" % number, 1)
    line = line.replace(b"%012x" % SAMPLE, b"%012x" % number, 1)
    return line.replace(b"@VERSION@", b"%d" % version, 1)


@cache
def _sample_line(run):
    """Encoded once, so that this process leaves the CPU to those that are measured."""
    pod = pod_object(SAMPLE, run)
    pod["metadata"]["resourceVersion"] = "@VERSION@"
    return json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n"


class TrivialApi:
    """State shared by all connections; a source of pods for `pace`."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.version = 10
        self.posts = 0
        self.pod_watchers = []
        self.node_watcher = None
        self.bound = {}
        self.pods = {}
        """The latest watch line of every pod, in the order of creation. A pod that a list lacks
        counts as deleted."""
        self.new_lines = []

    async def create_pods(self, run, numbers):
        """Write the pods' watch events at once."""
        lines = []
        for number in numbers:
            self.version += 1
            lines.append(pod_event(number, run, self.version))
            self.pods[f"p-{run}-{number}"] = lines[-1]
        self.send(*lines)

    def calls(self):
        """Bindings, Events, conditions."""
        return self.posts + len(self.bound)

    def bind(self, name, binding):
        """Note the time, and send the bound pod to the watch as an API server does."""
        if name not in self.pods or name in self.bound:
            return
        self.bound[name] = time.perf_counter()
        line = self.pods[name]
        sent = json.loads(binding)
        node = sent["target"]["name"]
        annotations = sent["metadata"]["annotations"]
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

    def write(self, path, body):
        """Do nothing about other writes."""

    @property
    def watcher(self):
        """Where lines of pods are fed, or None before the first watch."""
        return self if self.pod_watchers else None

    def feed(self, lines):
        for connection in self.pod_watchers:
            connection.feed(lines)

    def notify(self):
        if self.new_lines and self.watcher is not None:
            self.watcher.feed(b"".join(self.new_lines))
        self.new_lines.clear()

    def send(self, *lines):
        """Write watch lines at once, after those with lower versions that are not written yet."""
        self.notify()
        self.watcher.feed(b"".join(lines))

    def node(self, number):
        return node_object(number)

    def page(self, path, query):
        """Return one page of a list."""
        kind = path.rpartition("/")[2]
        total = {"nodes": self.nodes, "pods": len(self.pods)}.get(kind, 0)
        start = int(query.get("continue", ["0"])[0] or 0)
        end = min(total, start + int(query.get("limit", ["500"])[0]))
        meta = {"resourceVersion": str(self.version), "continue": str(end) if end < total else ""}
        if kind == "nodes":
            items = [json.dumps(self.node(number)).encode() for number in range(start, end)]
        else:
            items = map(object_in, islice(self.pods.values(), start, end))
        return b'{"metadata":%b,"items":[%b]}' % (json.dumps(meta).encode(), b",".join(items))


def object_in(line):
    return line[line.index(OBJECT) + len(OBJECT) : -2]


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, api):
        self.api = api
        self.buffer = b""
        self.transport = None

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, _):
        if self in self.api.pod_watchers:
            self.api.pod_watchers.remove(self)

    def data_received(self, data):
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 :][:length], self.buffer[end + 4 + length :]
            method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            self.answer(method, urlsplit(target), body)

    def answer(self, method, url, body):
        query = parse_qs(url.query)
        name = url.path.rpartition("/")[2]
        if method == "POST" and name == "binding":
            self.api.bind(url.path.split("/")[-2], body)
            self.respond(b'{"kind":"Status","status":"Success"}', status=b"201 Created")
        elif method == "GET" and "watch" in query:
            self.transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            if name == "pods":
                self.api.pod_watchers.append(self)
            elif name == "nodes":
                self.api.node_watcher = self
        elif method == "GET" and (line := self.api.pods.get(name)):
            self.respond(object_in(line))
        elif method == "GET":
            self.respond(self.api.page(url.path, query))
        else:
            self.api.posts += 1
            self.api.write(url.path, body)
            self.respond(b"{}", status=b"201 Created")

    def respond(self, body, *, status=b"200 OK"):
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)

    def feed(self, lines):
        self.transport.write(b"%x\r\n%s\r\n" % (len(lines), lines))
