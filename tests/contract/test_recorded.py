"""What earlier versions wrote is understood today, and they would understand what is written today.

`tests/recorded` holds, per version, what it wrote while it ran and what its readers accept.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import msgspec
import pytest

from services.node_agent.records.checkpoint import Checkpoint, CheckpointFile
from shared.model.leases.lease_copy import dump_lease, load_lease
from shared.model.names import Namespace
from shared.nats import wire
from tests.support.recorded import Recorded, kinds, recorded, versions
from tests.support.samples import SAMPLES

VERSIONS = versions()
HEARD = [
    pytest.param(version, subject, id=f"{version}-{subject}")
    for version in VERSIONS
    for subject in sorted(recorded(version).messages)
]


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield what `before` has and `now` has not; `now` may have more."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            if key in now:
                yield from differences(value, now[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is gone"
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for at, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{where}[{at}]")
    elif before != now:
        yield f"{where}: {before!r} is now {now!r}"


def plain(value: Any) -> Any:
    """Return what a reader sees of `value`: maps, lists, texts and numbers."""
    return json.loads(msgspec.json.encode(value))


@cache
def of(version: str) -> Recorded:
    return recorded(version)


def refused(version: str, schema: dict[str, Any], value: Any) -> list[str]:
    """Return why that version's readers would not take `value`."""
    whole = {**schema, "$defs": of(version).accepts["$defs"]}
    errors = jsonschema.Draft202012Validator(whole).iter_errors(
        json.loads(msgspec.json.encode(value))
    )
    return [f"{error.json_path}: {error.message}" for error in errors]


@pytest.mark.parametrize(("version", "subject"), HEARD)
def test_recorded_values_are_read_without_loss(version: str, subject: str) -> None:
    for data in of(version).messages[subject]:
        events = wire.decode(data, kinds()[subject])

        before = msgpack.unpackb(data)["events"]
        assert list(differences(before, plain(events))) == []


@pytest.mark.parametrize(("version", "subject"), HEARD)
def test_earlier_versions_can_read_what_is_written_now(version: str, subject: str) -> None:
    schema = of(version).accepts["events"][subject]
    read = [
        event
        for data in of(version).messages[subject]
        for event in wire.decode(data, kinds()[subject])
    ]
    samples = [sample for sample in SAMPLES if sample.subject == subject]

    for event in (*read, *samples):
        assert refused(version, schema, event) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lease_is_read_from_the_annotation_of_a_pod(version: str) -> None:
    for name, text in of(version).copies.items():
        lease = load_lease(text, namespace=Namespace("default"), name=name)

        written = json.loads(dump_lease(lease))
        assert list(differences(json.loads(text), written)) == []
        assert [len(row) for row in written["shares"]] == [
            len(row) for row in json.loads(text)["shares"]
        ]


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_agent_reads_the_checkpoint_of_the_previous_version(
    version: str, tmp_path: Path
) -> None:
    for node, text in of(version).checkpoints.items():
        file = tmp_path / f"{node}.json"
        file.write_text(text)
        checkpoint = Checkpoint(file, node)

        await checkpoint.load()

        assert not checkpoint.lost
        before = json.loads(text)
        assert len(checkpoint.entries) == len(before["entries"]) > 0
        content = plain(msgspec.json.decode(text, type=CheckpointFile))
        assert list(differences(before, content)) == []
        assert refused(version, of(version).accepts["checkpoint"], content) == []
