"""`leasehold up`: plans, locks the state directory, starts, supervises and stops."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from services.cli import credentials
from services.cli.credentials import CredentialFiles
from services.cli.local_commands import Up
from services.cli.simulated_nodes import load_simulated_nodes
from services.cli.state_dir import (
    AlreadyRunningError,
    ComponentState,
    State,
    StateDir,
    load_state,
    locked,
    read_object,
    save_state,
    short_root,
    supervisor_pid,
    wipe,
    write_supervisor_pid,
)
from services.cli.up import servers
from services.cli.up.components import Component, components_of
from services.cli.up.down import kill_leftovers
from services.cli.up.installation import CLAIMS, COMBINED, KUBE_SCHEDULER, installation
from services.cli.up.plan import AGGREGATED, Plan, layouts_of, plan_of, with_library
from services.cli.up.status import EXAMPLE, SIZE_LINES, faults_of, has_shares, summary, text_of
from services.cli.up.supervisor import StartError, SupervisionTiming, Supervisor
from services.extender.scheduler_configuration import SchedulerTls, scheduler_configuration
from services.timekeeper.config import budget_sources
from services.watcher import quota_sources
from shared.kubernetes.kinds.gpu_prices import load_prices
from shared.model.errors import LeaseholdError, RequestError
from shared.model.names import NodeName
from shared.model.requests.claim import DraMode
from shared.runtime.request_settings import RequestSettings, load_rules

_READY = b"\0"


def run_in_background(run: Callable[[Callable[[str], None]], int], directory: StateDir) -> int:
    """Print what the process reports until it is ready or exits."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(_detached(run, directory, writer))
    os.close(writer)
    try:
        if _print_until_ready(reader):
            return 0
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        return 130
    finally:
        os.close(reader)
    _print(f"leasehold up: it did not start; {directory.log('supervisor')} has more")
    return 1


def _print_until_ready(reader: int) -> bool:
    while received := os.read(reader, 65536):
        text, mark, _ = received.partition(_READY)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        if mark:
            return True
    return False


def _detached(run: Callable[[Callable[[str], None]], int], directory: StateDir, writer: int) -> int:
    os.setsid()
    sys.excepthook = sys.__excepthook__  # a bug's traceback goes to the log
    _redirect_output(directory.log("supervisor"))
    pipe: int | None = writer

    def report(text: str) -> None:
        nonlocal pipe
        _print(text)
        if pipe is None:
            return
        done = text.startswith("ready in ")
        try:
            os.write(pipe, f"{text}\n".encode() + (_READY if done else b""))
        except OSError:
            done = True
        if done:
            os.close(pipe)
            pipe = None

    try:
        return run(report)
    except LeaseholdError as error:
        report(f"leasehold up: {error}")
        return 1


def _redirect_output(path: Path) -> None:
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(devnull)


def forget_devices(
    directory: StateDir, before: Mapping[str, str], layouts: Mapping[str, str]
) -> None:
    for node in before.keys() - layouts.keys():
        for folder in (directory.agent(node), directory.node(node)):
            shutil.rmtree(folder, ignore_errors=True)
    for node, layout in layouts.items():
        file = directory.agent(node) / "checkpoint.json"
        if before.get(node) != layout and (content := read_object(file)):
            content.pop("devices", None)
            file.write_text(json.dumps(content))


Report = Callable[[str], None]
READY_S = 60.0
"""The longest pause without another component being ready, apart from `READY_EACH_S`."""
READY_EACH_S = 3.0
"""The longest pause without another component being ready, more for each component: all agents
start at once, and on a slow machine none is ready before most are."""
FREE_MB = 100
"""Otherwise the ledger and the logs could not be written."""


def up(settings: Up) -> int:
    checks: tuple[tuple[Path | None, Callable[[Path], object]], ...] = (
        (settings.budgets, budget_sources.load_file),
        (settings.quotas, quota_sources.load_file),
        (settings.prices, load_prices),
        (settings.volcano_conf, lambda path: load_rules(RequestSettings(volcano_conf=path))),
    )
    for file, check in checks:
        if file is not None:
            check(file)
    _check_names(settings)
    directory = StateDir.at(settings.state)
    before = load_state(directory)
    if before is not None and supervisor_pid(directory) is not None:
        return _already_running(settings, directory, before)
    nodes = layouts_of(
        settings.gpus,
        settings.nodes,
        before=before.nodes if before and not settings.fresh else {},
        check=load_simulated_nodes().check_layout,
    )
    settings = with_library(settings, nodes, before)
    plan = plan_of(settings, nodes, before)
    component_names = [component.name for component in components_of(plan, directory)]
    if unknown := [name for name in settings.without if name not in component_names]:
        raise RequestError(
            f"--without {unknown[0]}: the components are {', '.join(component_names)}"
        )
    for flag, url in (("--nats-url", settings.nats_url), ("--redis-url", settings.redis_url)):
        servers.check_responds(flag, url)
    directory.make()
    _check_disk(directory)
    with locked(directory):
        killed = kill_leftovers(directory)
        if killed:
            _print(f"{killed} processes of an earlier run were left over and are killed now")
        if settings.fresh:
            wipe(directory)
            directory.make()
        forget_devices(directory, before.nodes if before else {}, plan.nodes)
        if settings.headless:
            return run_in_background(lambda report: _run(plan, directory, report), directory)
        return _run(plan, directory, _print)


def _check_names(settings: Up) -> None:
    library = settings.library_source
    if library is not None and not library.exists():
        raise RequestError(
            f"--library-source {library} does not exist: name HAMi-core's libvgpu.so"
        )
    if unknown := [name for name in settings.programs if shutil.which(name) is None]:
        raise RequestError(f"--programs {unknown[0]}: no program of this name is on PATH")


def _already_running(settings: Up, directory: StateDir, state: State) -> int:
    """Raises AlreadyRunningError unless the settings request what runs."""
    same = replace(settings, headless=False, nodes=None, gpus="") == Up(state=settings.state)
    if same and state.nodes == layouts_of(
        settings.gpus, settings.nodes, before=state.nodes, check=str
    ):
        faults = faults_of(directory, state)
        _print(text_of(directory, state, faults))
        return int(bool(faults))
    with locked(directory):
        raise AlreadyRunningError(f"{directory.root} was in use until now: try again")


def _check_disk(directory: StateDir) -> None:
    free_mb = shutil.disk_usage(directory.root).free // 1_000_000
    if free_mb < FREE_MB:
        raise RequestError(
            f"{directory.root} has {free_mb} MB of free disk, and {FREE_MB} MB are needed: free "
            "some, or choose another --state"
        )


def _run(plan: Plan, directory: StateDir, report: Report) -> int:
    write_supervisor_pid(directory)
    started_at_s = time.monotonic()
    with short_root(directory) as short:
        if short is not directory:
            report(f"  sockets are reached through {short.root}: {directory.root} is too long")
        without = plan.settings.without
        components = [
            component for component in components_of(plan, short) if component.name not in without
        ]
        _write_files(components, plan, directory)
        _rotate_logs(components, directory)
        try:
            asyncio.run(_supervise(components, plan, directory, report, started_at_s))
        except StartError:
            _check_disk(directory)  # it explains any failure
            raise
    kill_leftovers(directory)
    report("stopped; nothing is left running")
    return 0


def _write_files(components: Sequence[Component], plan: Plan, directory: StateDir) -> None:
    files = credentials.write(
        directory.credentials,
        [NodeName(node) for node in plan.nodes],
        nats=bool(plan.nats_program),
        redis=bool(plan.redis_program),
        names=servers.NAMES,
    )
    if plan.settings.kube_scheduler:
        tls = SchedulerTls(
            ca=str(files.authority),
            certificate=str(files.scheduler_certificate),
            key=str(files.scheduler_key),
        )
        configuration = scheduler_configuration(f"https://{plan.extender_address}", tls)
        directory.scheduler_configuration.write_text(yaml.safe_dump(configuration, sort_keys=False))
    # Without a webhook no pod passes our admission.
    installed = installation(
        str(directory.accounts),
        plan.nodes,
        policies=any(component.name == "webhook" for component in components),
        aggregated=f"{servers.HOST}:{plan.ports[AGGREGATED]}",
        components=tuple(_parts(plan.settings)),
    )
    directory.installation.write_text(json.dumps(installed, indent=2))
    shares = has_shares(local=plan.local, library=plan.settings.library_source)
    lines = EXAMPLE.splitlines(keepends=True)
    directory.first_pod.write_text("".join(lines if shares else lines[:-SIZE_LINES]))


def _parts(settings: Up) -> Iterator[str]:
    if settings.combined:
        yield COMBINED
    if settings.kube_scheduler:
        yield KUBE_SCHEDULER
    if os.environ.get("LEASEHOLD_DRA", DraMode.OFF) != DraMode.OFF:
        yield CLAIMS


async def _supervise(
    components: Sequence[Component],
    plan: Plan,
    directory: StateDir,
    report: Report,
    started_at_s: float,
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    started_at = time.time()
    is_saved = True

    def state(components: tuple[ComponentState, ...], *, ready: bool) -> State:
        return state_of(plan, directory, components, ready=ready, started_at=started_at)

    def save(states: tuple[ComponentState, ...], ready: bool) -> None:
        nonlocal is_saved
        try:
            save_state(directory, state(states, ready=ready))
            is_saved = True
        except OSError as error:
            if is_saved:
                report(f"  {directory.state} cannot be written ({error.strerror}); continuing")
            is_saved = False

    def on_ready() -> None:
        took_s = time.monotonic() - started_at_s
        shown = summary(directory, state(supervisor.states(), ready=True))
        report(f"ready in {took_s:.1f} s\n\n{shown}")

    report(f"{len(components)} components start in {directory.root}")
    timing = SupervisionTiming(ready_s=READY_S + READY_EACH_S * len(components))
    supervisor = Supervisor(components, directory, report=report, save=save, timing=timing)
    await supervisor.run(stop, on_ready)


def state_of(
    plan: Plan,
    directory: StateDir,
    components: tuple[ComponentState, ...],
    *,
    ready: bool,
    started_at: float,
) -> State:
    files = CredentialFiles(directory.credentials)
    return State(
        pid=os.getpid(),
        started_at=started_at,
        ready=ready,
        nats_url=plan.nats_url,
        redis_url=plan.redis_url,
        nats_credentials=str(files.nats("operator")) if plan.nats_program else "",
        nats_ca=str(files.authority) if plan.nats_program else "",
        redis_credentials=str(files.redis("operator")) if plan.redis_program else "",
        library_source=str(plan.settings.library_source or ""),
        kubeconfig=str(directory.kubeconfig),
        nodes=plan.nodes,
        ports=plan.ports,
        components=components,
    )


def _rotate_logs(components: Sequence[Component], directory: StateDir) -> None:
    for component in components:
        log = directory.log(component.name)
        if log.exists():
            log.replace(log.with_suffix(".log.1"))


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # the reader is gone; the components continue
        print(text, flush=True)
