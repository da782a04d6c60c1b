"""Requests recorded from a real kube-scheduler get the recorded replies."""

import json
from pathlib import Path

import msgspec

from services.extender.scheduler_api import ExtenderArgs, ExtenderBindingArgs
from tests.support.extender import ExtenderWorld

RECORDED = json.loads(Path(__file__).with_name("kube_scheduler_requests.json").read_text())


async def test_recorded_requests_get_the_recorded_replies() -> None:
    world = ExtenderWorld()
    for exchange in RECORDED["exchanges"]:
        body = msgspec.json.encode(exchange["request"])
        reply: object
        if exchange["verb"] == "bind":
            binding = msgspec.json.decode(body, type=ExtenderBindingArgs)
            reply = await world.extender.bind(binding)
        else:
            args = msgspec.json.decode(body, type=ExtenderArgs)
            reply = getattr(world.extender, exchange["verb"])(args)

        assert json.loads(msgspec.json.encode(reply)) == exchange["reply"]
    [request] = world.binders.requests
    assert (request.queued.name, request.placement.node) == ("rec", "n0")
