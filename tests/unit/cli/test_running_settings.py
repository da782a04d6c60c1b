"""The doctor's verdict on the settings that components run with."""

import pytest

from services.cli.doctor.cluster_checks import WorkloadSettings, settings
from shared.model.events.pod_events import Heartbeat
from shared.model.findings import Outcome
from shared.runtime.settings import settings_digests

NOW = {"LEASEHOLD_DRA": "conditions", "LEASEHOLD_LOG_LEVEL": "info"}
WANTED = {
    "watcher": WorkloadSettings(
        {**NOW, "LEASEHOLD_INSTANCE": ""}, frozenset({"LEASEHOLD_INSTANCE"})
    ),
    "binder": WorkloadSettings(NOW, frozenset()),
}


def heartbeat(service: str, **settings: str) -> Heartbeat:
    return Heartbeat(service=service, instance=f"{service}-0", settings=settings_digests(settings))


@pytest.mark.parametrize(
    ("replica", "outcome", "shown"),
    [
        (heartbeat("watcher", **NOW, LEASEHOLD_INSTANCE="watcher-0"), Outcome.OK, "1 components"),
        (
            heartbeat("watcher", LEASEHOLD_LOG_LEVEL="info"),
            Outcome.FAIL,
            "watcher-0 (LEASEHOLD_DRA)",
        ),
        (
            heartbeat("watcher", **NOW, LEASEHOLD_QUOTAS="x"),
            Outcome.FAIL,
            "watcher-0 (LEASEHOLD_QUOTAS)",
        ),
        (
            heartbeat("placer", **NOW | {"LEASEHOLD_DRA": "off"}),
            Outcome.FAIL,
            "placer-0 (LEASEHOLD_DRA)",
        ),
        (heartbeat("watcher"), Outcome.OK, "0 components"),
    ],
    ids=["same", "missing", "removed", "in the binder's process", "outside a pod"],
)
def test_components_with_other_settings_than_new_pods_are_named(
    replica: Heartbeat, outcome: Outcome, shown: str
) -> None:
    finding = settings(WANTED, [replica])

    assert finding.outcome is outcome
    assert shown in finding.text
    assert "off" not in finding.text


def test_digests_are_of_our_variables_and_do_not_show_values() -> None:
    digests = settings_digests({"LEASEHOLD_REDIS_URL": "redis://u:secret@r", "PATH": "/bin"})

    assert digests.keys() == {"LEASEHOLD_REDIS_URL"}
    assert "secret" not in digests["LEASEHOLD_REDIS_URL"]
