"""Settings, roles and telemetry of the runtime."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, strategies
from opentelemetry.trace import SpanKind

from shared.model.clock import end
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.event import Event, is_traceparent
from shared.model.events.pod_events import LedgerRebuilt, PodQueued, PodTerminated, ResyncRequested
from shared.model.events.request_reply import TerminationReply, TerminationRequest
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import PodRequest
from shared.nats.bus import Bus
from shared.runtime import telemetry
from shared.runtime.runner import STEADY_S, Runner, WaitReasons, run_loop
from shared.runtime.service import Role, answers, emits, handles, loops, roles_of
from shared.runtime.settings import ServiceSettings, load, setting
from shared.runtime.shared_process import open_process
from shared.runtime.span_attributes import pod_attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(ServiceSettings):
    names: tuple[str, ...] = setting(("a",), "some names")
    limit: int = setting(3, "a number")
    ratio: float | None = setting(None, "maybe a number")
    strict: bool = setting(True, "yes or no")
    path: Path | None = setting(None, "a file")


def read(*argv: str, **environ: str) -> Example:
    return load(
        Example, "example", about="x", examples=("example --limit 4",), argv=argv, environ=environ
    )


def test_flags_override_the_environment_and_the_environment_overrides_defaults() -> None:
    settings = read("--limit", "5", LEASEHOLD_LIMIT="4", LEASEHOLD_NAMES="x, y,")

    assert (settings.limit, settings.names, settings.strict) == (5, ("x", "y"), True)


def test_settings_are_parsed_by_the_types_of_their_fields() -> None:
    settings = read("--ratio", "0.5", "--no-strict", "--path", "/x")

    assert (settings.ratio, settings.strict, settings.path) == (0.5, False, Path("/x"))


def test_help_names_every_variable_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")

    text = capsys.readouterr().out
    assert "LEASEHOLD_NATS_URL" in text
    assert "example --limit 4" in text


class ExampleService:
    @handles
    async def consume(
        self, events: Sequence[ResyncRequested | LedgerRebuilt]
    ) -> list[PodTerminated]:
        return []

    @handles(concurrency=4)
    async def consume_more(
        self, events: Sequence[PodTerminated]
    ) -> list[LedgerRebuilt | ResyncRequested]:
        return []

    @emits
    async def report(self) -> AsyncIterator[Sequence[PodTerminated | LedgerRebuilt]]:
        yield []

    @answers
    async def reply(self, event: TerminationRequest) -> TerminationReply:
        return TerminationReply(terminated=True)

    @loops(every_s=2.0, waits_first=True)
    async def step(self) -> list[LedgerRebuilt]:
        return []

    @loops
    async def turn(self) -> None: ...

    async def neither(self) -> None: ...


@dataclass
class ComposedService:
    part: ExampleService
    limit: int = 3

    @handles
    async def also(self, events: Sequence[LedgerRebuilt]) -> None: ...


def test_methods_of_a_service_s_parts_are_its_own() -> None:
    service = ComposedService(ExampleService())
    roles = {role.method: role for role in roles_of(service)}

    assert roles.keys() == {"also", *(role.method for role in roles_of(ExampleService))}
    assert roles["also"].bound() == service.also
    assert roles["consume"].bound() == service.part.consume
    assert roles["step"].owner() is service.part


def test_the_signature_of_a_handler_declares_what_it_consumes_and_publishes() -> None:
    assert roles_of(ExampleService) == (
        Role(
            kind="handles",
            method="consume",
            consumes=(ResyncRequested, LedgerRebuilt),
            publishes=(PodTerminated,),
        ),
        Role(
            kind="handles",
            method="consume_more",
            consumes=(PodTerminated,),
            publishes=(LedgerRebuilt, ResyncRequested),
            concurrency=4,
        ),
        Role(
            kind="answers",
            method="reply",
            consumes=(TerminationRequest,),
            publishes=(TerminationReply,),
        ),
        Role(kind="emits", method="report", publishes=(PodTerminated, LedgerRebuilt)),
        Role(
            kind="loops",
            method="step",
            publishes=(LedgerRebuilt,),
            every_s=2.0,
            waits_first=True,
        ),
        Role(kind="loops", method="turn"),
    )


class Stepping:
    """Takes its steps at once; the next pause after the last result raises."""

    def __init__(self, *results: list[Event] | None) -> None:
        self.results = list(results)

    async def pause(self) -> None:
        if not self.results:
            raise RequestError("no more steps")

    @loops(wait=lambda service: service.pause())
    async def step(self) -> list[Event] | None:
        return self.results.pop(0)


async def test_what_the_steps_of_a_loop_return_is_published() -> None:
    [role] = roles_of(Stepping([GONE], None, [], [QUEUED]))
    published = list[Event]()

    async def publish(events: Sequence[Event]) -> None:
        published.extend(events)

    with pytest.raises(RequestError):
        await run_loop(role, publish)

    assert published == [GONE, QUEUED]


async def test_a_loop_goes_on_without_nats_and_a_resync_follows() -> None:
    class Away:
        has_lost_work = asyncio.Event()

        async def publish(self, events: Sequence[Event]) -> None:
            raise UnavailableError("NATS is away")

    bus = Away()
    stepping = Stepping([GONE], [QUEUED])
    runner = Runner("test", stepping, cast(Bus, bus), telemetry.Tracing("test", None))

    with pytest.raises(RequestError):
        await runner._loop(roles_of(stepping)[0])

    assert stepping.results == []
    assert bus.has_lost_work.is_set()


GONE = PodTerminated(
    pod=PodUid("7f7c2c5e-57a5-4d3c-9d0e-0d7e6c1f2a3b"),
    namespace=Namespace("ns"),
    name="p",
    node=NodeName("n"),
    phase="Failed",
)


QUEUED = PodQueued(
    pod=GONE.pod,
    namespace=GONE.namespace,
    name=GONE.name,
    resource_version="1",
    request=PodRequest(),
)


def written(directory: Path) -> list[dict[str, Any]]:
    """Read the spans of all files."""
    files = directory.rglob("*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_pods_trace_id_is_its_uid_and_the_next_span_is_its_child(tmp_path: Path) -> None:
    tracing = telemetry.open_tracing("test", ServiceSettings(trace_dir=tmp_path))

    (inside,), first = tracing.start("one", [GONE], kind=SpanKind.PRODUCER)
    (_, second) = tracing.start("two", [inside], kind=SpanKind.CONSUMER)
    telemetry.end(second, ValueError("no"))
    telemetry.end(first)
    tracing.close()

    two, one = written(tmp_path)
    assert one["trace"] == two["trace"] == "7f7c2c5e57a54d3c9d0e0d7e6c1f2a3b"
    assert two["parent"] == one["span"]
    assert (two["ok"], two["text"]) == (False, "no")
    assert one["attributes"]["k8s.pod.name"] == "p"


def test_spans_are_written_soon_by_a_thread_that_ends(tmp_path: Path) -> None:
    tracing = telemetry.open_tracing("test", ServiceSettings(trace_dir=tmp_path))
    before = set(threading.enumerate())
    for name in ("one", "two"):
        telemetry.end(tracing.start(name, [GONE], kind=SpanKind.PRODUCER)[1])
    (writer,) = set(threading.enumerate()) - before
    writer.join(20)

    assert [span["name"] for span in written(tmp_path)] == ["one", "two"]
    assert not writer.is_alive()


def test_all_spans_of_a_pod_are_below_its_root_whoever_records_that(tmp_path: Path) -> None:
    facts = pod_attributes(QUEUED)
    for number in (1, 2):  # two watchers
        tracing = telemetry.open_tracing("watcher", ServiceSettings(trace_dir=tmp_path / "w"))
        tracing.record(telemetry.REVIEW, facts, 5, 7, service="webhook")
        tracing.record(telemetry.ROOT, facts, 5, 7)
        tracing.record("start pod", facts, 5, 20 + number)
        tracing.close()
    tracing = telemetry.open_tracing("placer", ServiceSettings(trace_dir=tmp_path / "p"))
    (seen,), first = tracing.start("", [QUEUED], kind=SpanKind.PRODUCER)
    again = dataclasses.replace(seen, requeue_number=3)
    (_, second) = tracing.start("place pods", [again], kind=SpanKind.CONSUMER)
    telemetry.end([*first, *second])
    tracing.close()

    spans = written(tmp_path)
    roots = {span["span"] for span in spans if span["name"] == telemetry.ROOT}
    assert len(roots) == 1
    assert {span["parent"] for span in spans} == {"", *roots}
    assert {span["trace"] for span in spans} == {telemetry.trace_id_of(QUEUED.pod)}
    assert {(span["service"], span["name"]) for span in spans} == {
        ("leasehold-webhook", "review pod"),
        ("leasehold-watcher", "create pod"),
        ("leasehold-watcher", "start pod"),
        ("leasehold-placer", "publish pod.queued"),
        ("leasehold-placer", "place pods"),
    }


@given(
    strategies.text() | strategies.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-.{16}-..", fullmatch=True)
)
def test_any_text_is_parsed_as_a_trace_context_or_none(text: str) -> None:
    context = telemetry.parse_traceparent(text)

    assert (context is not None) == is_traceparent(text)
    assert context is None or f"{context.trace_id:032x}-{context.span_id:016x}" in text


def test_without_an_exporter_events_are_unchanged() -> None:
    tracing = telemetry.open_tracing("test", ServiceSettings())

    assert tracing.start("one", [GONE], kind=SpanKind.PRODUCER) == ([GONE], [])


@pytest.mark.parametrize(
    "text", ["", "00-0-0-0", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "x" * 55]
)
def test_an_invalid_traceparent_is_none(text: str) -> None:
    assert telemetry.parse_traceparent(text) is None


def test_logs_are_json_lines_that_carry_pod_and_trace() -> None:
    record = logging.makeLogRecord({"msg": "said %s", "args": ("it",), "pod": "u1", "trace": "t1"})

    line = json.loads(telemetry.JsonLines("placer").format(record))

    assert (line["text"], line["pod"], line["trace"], line["service"]) == (
        "said it",
        "u1",
        "t1",
        "placer",
    )


def test_an_unready_reason_is_logged_once_until_it_has_cleared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    reasons = WaitReasons(lambda: now)
    for _ in range(100):
        reasons.report("place_pods", "Redis is away")
        reasons.report("follow", "Redis is away")
        now += 1.0
    reasons.report("follow", "NATS is away")
    now += STEADY_S
    reasons.report("follow", "Redis is away")

    assert caplog.messages == [
        "place_pods waits: Redis is away",
        "follow waits: NATS is away",
        "follow waits: Redis is away",
    ]


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    started = asyncio.Event()

    async def deaf() -> None:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        await asyncio.sleep(3600)

    async def parent() -> None:
        async with asyncio.TaskGroup() as tasks:
            children.append(tasks.create_task(deaf()))

    children: list[asyncio.Task[None]] = []
    task = asyncio.create_task(parent())
    await started.wait()

    async with asyncio.timeout(30):
        await end(task, children)

    assert task.cancelled()


DEEP_OBJECT = """
import msgspec
from shared.kubernetes.resource_claims import ApiResourceClaim

async def read():
    deep = b"[" * 9_990 + b"]" * 9_990
    claim = b'{"metadata": {"name": "a"}, "spec": {"config": ' + deep + b"}}"
    print(msgspec.json.decode(claim, type=ApiResourceClaim).metadata.name)

"""
SERVICE = """
from shared.runtime.run import run
run(read, service="test", log_level="info")
"""
COMMAND = """
import asyncio, contextlib, io, sys
from services.cli.__main__ import main
sys.argv[1:] = ["__complete"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
asyncio.run(read())
"""


@pytest.mark.parametrize("program", [SERVICE, COMMAND])
def test_objects_are_read_that_are_as_deep_as_api_servers_store_them(program: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", DEEP_OBJECT + program], capture_output=True, text=True, check=False
    )

    assert (found.stdout, found.returncode) == ("a\n", 0), found.stderr


def test_a_directory_of_spans_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(RequestError, match=r"--trace-dir .*/file/spans cannot be created"):
        telemetry.open_tracing("test", ServiceSettings(trace_dir=tmp_path / "file" / "spans"))


async def test_a_run_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = ServiceSettings(run_file=tmp_path / "file" / "run.json")

    async def run() -> None:
        async with open_process(["test"], settings) as process:
            process.add("test", {}).set()
            await process.stop.wait()

    with pytest.raises(RequestError, match=r"--run-file .*/file/run.json cannot be written"):
        await run()
