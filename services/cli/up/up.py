"""`leasehold up`: plan, lock, start, keep, stop."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.cli.advice import next_steps
from services.cli.state_dir import (
    PartState,
    State,
    StateDir,
    load_state,
    locked,
    save_state,
    wipe,
    write_holder,
)
from services.cli.up import servers
from services.cli.up.background import in_background
from services.cli.up.node_layouts import layouts_of
from services.cli.up.orphans import end_leftovers
from services.cli.up.parts import Part, Plan, parts_of
from services.cli.up.short_path import short_root
from services.cli.up.supervisor import Supervisor
from shared.model.errors import RequestError
from shared.model.names import NodeName

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What the flags of `up` say."""

    state: Path
    nodes: int | None
    gpus: str
    placers: int
    budgets: Path | None
    quotas: Path | None
    headless: bool
    fresh: bool
    nats_url: str
    redis_url: str
    nats_port: int
    redis_port: int
    api_port: int
    page_port: int
    scheduler_metrics: str
    log_level: str
    otlp_endpoint: str
    without: tuple[str, ...]


def settings_of(flags: argparse.Namespace) -> UpSettings:
    """Read the flags. Raises RequestError for what argparse could not see."""
    values = vars(flags) | {
        "without": tuple(name for name in flags.without.split(",") if name),
        "state": Path(flags.state),
        "budgets": Path(flags.budgets).absolute() if flags.budgets else None,
        "quotas": Path(flags.quotas).absolute() if flags.quotas else None,
    }
    if not 1 <= flags.placers <= 64:
        raise RequestError(f"--placers {flags.placers}: 1 to 64 can be started")
    return UpSettings(**{name: values[name] for name in UpSettings.__dataclass_fields__})


def up(settings: UpSettings) -> int:
    """Run until told to stop, or with `headless` until ready; return the exit code."""
    from services.node_agent.gpus.simulated.gpus import parse_layout

    if settings.budgets is not None:
        from services.timekeeper.config.sources import load_file

        load_file(settings.budgets)
    if settings.quotas is not None:
        from services.watcher.quota_sources import load_file as load_quotas

        load_quotas(settings.quotas)
    directory = StateDir.at(settings.state)
    before = load_state(directory)
    nodes = layouts_of(
        settings.gpus,
        settings.nodes,
        before=before.nodes if before and not settings.fresh else {},
        check=parse_layout,
    )
    plan = plan_of(settings, nodes, before)
    directory.make()
    with locked(directory):
        ended = end_leftovers(directory)
        if ended:
            _print(f"{ended} processes of an earlier run were left over and are ended now")
        if settings.fresh:
            wipe(directory)
            directory.make()
        if settings.headless:
            return in_background(lambda say: _run(settings, plan, directory, say), directory)
        return _run(settings, plan, directory, _print)


def plan_of(settings: UpSettings, nodes: dict[str, str], before: State | None) -> Plan:
    """Choose ports and programs: those asked for, else those of the last time, else free ones."""
    ports: dict[str, int] = {}
    for name, wanted in (
        ("nats", settings.nats_port),
        ("redis", settings.redis_port),
        ("api", settings.api_port),
        ("page", settings.page_port),
    ):
        if wanted and not servers.is_free(wanted):
            raise RequestError(f"--{name}-port {wanted} is taken; give a free one, or none")
        last = before.ports.get(name, 0) if before else 0
        ports[name] = servers.choose_port(wanted or last, taken=tuple(ports.values()))
    nats_program = "" if settings.nats_url else servers.nats_program()
    redis_program = "" if settings.redis_url else servers.valkey_program()
    return Plan(
        nodes=nodes,
        placers=settings.placers,
        ports=ports,
        nats_program=nats_program,
        redis_program=redis_program,
        nats_url=settings.nats_url or f"nats://{servers.HOST}:{ports['nats']}",
        redis_url=settings.redis_url or f"redis://{servers.HOST}:{ports['redis']}/0",
        python=(sys.executable, "-P", "-m"),
        log_level=settings.log_level,
        otlp_endpoint=settings.otlp_endpoint,
        budgets=settings.budgets,
        quotas=settings.quotas,
        scheduler_metrics=settings.scheduler_metrics,
    )


def _run(settings: UpSettings, plan: Plan, directory: StateDir, say: Say) -> int:
    write_holder(directory)
    began = time.monotonic()
    with short_root(directory) as short:
        if short != directory:
            say(f"  sockets are reached through {short.root}: {directory.root} is too long a path")
        parts = [part for part in parts_of(plan, short) if part.name not in settings.without]
        parts = _guarded(parts, plan, directory)
        _rotate(parts, directory)
        asyncio.run(_supervise(parts, plan, directory, say, began))
    end_leftovers(directory)
    say("stopped; nothing is left running")
    return 0


def _guarded(parts: list[Part], plan: Plan, directory: StateDir) -> list[Part]:
    """Give the servers we start users, and each part its secret."""
    from services.cli.admin import credentials
    from services.cli.up import part_credentials

    nats, redis = bool(plan.nats_program), bool(plan.redis_program)
    nodes = [NodeName(node) for node in plan.nodes]
    written = credentials.write(directory.doors, nodes, nats=nats, redis=redis, names=servers.NAMES)
    return part_credentials.guarded(parts, written, nats=nats, redis=redis)


async def _supervise(
    parts: list[Part], plan: Plan, directory: StateDir, say: Say, began: float
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    started_at = time.time()

    def save(states: tuple[PartState, ...], ready: bool) -> None:
        state = _state(plan, directory, states, ready=ready, started_at=started_at)
        try:
            save_state(directory, state)
        except OSError as error:
            say(f"  {directory.state} could not be written ({error.strerror}); the parts go on")

    def on_ready() -> None:
        steps = next_steps(directory, _page(parts, plan))
        say(f"ready in {time.monotonic() - began:.1f} s\n\n{steps}")

    say(f"{len(parts)} parts start in {directory.root}")
    await Supervisor(parts, directory, say=say, save=save).run(stop, on_ready)


def _page(parts: list[Part], plan: Plan) -> str:
    return plan.page_url if any(part.name == "dashboard" for part in parts) else ""


def _state(
    plan: Plan,
    directory: StateDir,
    states: tuple[PartState, ...],
    *,
    ready: bool,
    started_at: float,
) -> State:
    return State(
        pid=os.getpid(),
        started_at=started_at,
        ready=ready,
        nats_url=plan.nats_url,
        redis_url=plan.redis_url,
        nats_credentials=str(directory.doors / "nats" / "operator") if plan.nats_program else "",
        nats_ca=str(directory.doors / "ca.crt") if plan.nats_program else "",
        redis_credentials=str(directory.doors / "redis" / "operator") if plan.redis_program else "",
        kubeconfig=str(directory.kubeconfig),
        nodes=plan.nodes,
        ports=plan.ports,
        parts=states,
    )


def _rotate(parts: list[Part], directory: StateDir) -> None:
    for part in parts:
        log = directory.log(part.name)
        if log.exists():
            log.replace(log.with_suffix(".log.1"))


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more; the parts go on
        print(text, flush=True)
