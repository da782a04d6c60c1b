"""How many pods no placer has decided on, read from a watcher as KEDA's scaler reads it."""

import re
from pathlib import Path

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from services.topology import published
from services.watcher.service import Watcher
from shared.model.events.pod_events import PodQueued
from shared.nats.bus import Bus
from shared.runtime import health
from shared.runtime.service import roles_of
from tests.integration.nats.test_bus import queued
from tests.support.servers.nats import nats_server
from tests.support.waiting import until

SCALED = Path(__file__).parents[3] / "k8s" / "components" / "keda" / "placer-queue.yaml"
SCALED_OBJECT = next(yaml.safe_load_all(SCALED.read_text()))
TRIGGER: dict[str, str] = SCALED_OBJECT["spec"]["triggers"][0]["metadata"]


def selected(page: str, selector: str) -> list[float]:
    """Return the samples that a selector of PromQL with equal labels selects."""
    name, _, labels = selector.partition("{")
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and sample.labels == wanted
    ]


async def waiting(address: str) -> list[float]:
    async with aiohttp.ClientSession() as client, client.get(f"http://{address}/metrics") as page:
        return selected(await page.text(), TRIGGER["valueLocation"])


async def test_the_pods_without_a_decision_are_counted_before_during_and_after_it() -> None:
    async with (
        nats_server() as server,
        Bus.connect(server.url, name="watcher") as bus,
        health.served(health.application({}), "127.0.0.1:0") as address,
    ):
        bus.announce(sorted(published(roles_of(Watcher)), key=lambda kind: kind.subject))
        depths = [await waiting(address)]
        await bus.publish([queued(number) for number in range(3)])
        depths.append(await waiting(address))
        inbox = await bus.subscribe([PodQueued], group="placer-place-pods")
        [delivered] = await inbox.batch()
        depths.append(await waiting(address))
        delivered.confirm()

        await until(lambda: waiting(address), lambda found: found == [0])

    assert depths == [[0], [3], [3]]
