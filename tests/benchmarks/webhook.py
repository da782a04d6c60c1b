"""How long the webhook takes beside a running stack: `python -m tests.benchmarks.webhook`.

Method: `leasehold up` with one node; reviews of a GPU pod that must be completed are sent to the
webhook's own address over TLS, at a fixed rate whatever the answers take (open loop), over kept
connections as an API server's are. The time runs from when a review was due to its answer.
"""

import argparse
import asyncio
import base64
import json
import ssl
import time

import aiohttp

from services.webhook.registration import NAME
from services.webhook.wiring import CONFIGURATIONS
from tests.support.stack import stack

AIM_MS = 10.0
WARM_UP_S = 1.0
LIMITS = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000"}
CONTAINERS = [
    {"name": "main", "image": "app", "resources": {"limits": LIMITS, "requests": LIMITS}},
    {"name": "side", "image": "app", "env": [{"name": "A", "value": "b"}]},
]


def review(number):
    metadata = {"name": f"p-{number}", "annotations": {"a": "b"}}
    request = {
        "uid": f"u-{number}",
        "operation": "CREATE",
        "namespace": "default",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "object": {
            "metadata": metadata,
            "spec": {"schedulerName": "default-scheduler", "containers": CONTAINERS},
        },
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


async def measured(up, *, rate, seconds):
    hook, *_ = json.loads(await up.kube.read(f"{CONFIGURATIONS}/{NAME}"))["webhooks"]
    client = hook["clientConfig"]
    took = []
    context = ssl.create_default_context(cadata=base64.b64decode(client["caBundle"]).decode())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:

        async def send_review(number, due):
            async with session.post(client["url"], json=review(number)) as response:
                answer = (await response.json())["response"]
            assert answer["allowed"], answer
            assert answer["patch"], answer
            if due >= first + WARM_UP_S:
                took.append((time.perf_counter() - due) * 1e3)

        first = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(int(rate * (seconds + WARM_UP_S))):
                due = first + number / rate
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                group.create_task(send_review(number, due))
    return sorted(took)


async def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rate", type=float, default=200.0, help="reviews per second")
    flags.add_argument("--seconds", type=float, default=15.0)
    options = flags.parse_args()
    async with stack("--nodes", "1", "--gpus", "4xT4", webhook=True) as up:
        took = await measured(up, rate=options.rate, seconds=options.seconds)
    parts = [f"p{part} {took[len(took) * part // 100]:.2f}" for part in (50, 90, 99)]
    print(f"{len(took)} reviews at {options.rate:g}/s, milliseconds: {', '.join(parts)}, ", end="")
    print(f"max {took[-1]:.2f}; aim: p99 below {AIM_MS:g}")


if __name__ == "__main__":
    asyncio.run(main())
