"""`leasehold up`: plans, locks the state directory, starts, supervises and stops."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from services.cli import credentials
from services.cli.commands import Up
from services.cli.credentials import CredentialFiles
from services.cli.simulated_nodes import load_simulated_nodes
from services.cli.state_dir import (
    ComponentState,
    State,
    StateDir,
    load_state,
    locked,
    save_state,
    short_root,
    wipe,
    write_supervisor_pid,
)
from services.cli.terminal import program
from services.cli.up import servers
from services.cli.up.components import Component, components_of, with_credentials
from services.cli.up.down import kill_leftovers
from services.cli.up.installation import installation
from services.cli.up.plan import Plan, layouts_of, plan_of
from services.cli.up.supervisor import Supervisor
from services.extender.scheduler_configuration import SchedulerTls, scheduler_configuration
from shared.model.errors import LeaseholdError
from shared.model.names import NodeName

_READY = b"\0"


def run_in_background(run: Callable[[Callable[[str], None]], int], directory: StateDir) -> int:
    """Run in a process of its own, and print what it reports until it is ready or exits.

    Later reports go to its log. Returns 0 when it is ready, 1 when it exited before.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(_detached(run, directory, writer))
    os.close(writer)
    try:
        return 0 if _print_until_ready(reader) else 1
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        return 130
    finally:
        os.close(reader)


def _print_until_ready(reader: int) -> bool:
    """Print the lines from the pipe until it closes; return whether the last one is readiness."""
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
        print(text, flush=True)
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


def write_scheduler_configuration(plan: Plan, directory: StateDir, files: CredentialFiles) -> None:
    """Write the KubeSchedulerConfiguration."""
    tls = SchedulerTls(
        ca=str(files.authority),
        certificate=str(files.scheduler_certificate),
        key=str(files.scheduler_key),
    )
    configuration = scheduler_configuration(f"https://{plan.extender_address}", tls)
    directory.scheduler_configuration.write_text(yaml.safe_dump(configuration, sort_keys=False))


def forget_devices(
    directory: StateDir, before: Mapping[str, str], layouts: Mapping[str, str]
) -> None:
    """Let the agents of nodes whose layout differs from the last run forget their devices."""
    for node, layout in layouts.items():
        file = directory.agent(node) / "checkpoint.json"
        if before.get(node) != layout and file.exists():
            content = json.loads(file.read_text())
            content.pop("devices", None)
            file.write_text(json.dumps(content))


Report = Callable[[str], None]
EXAMPLE = """\
apiVersion: v1
kind: Pod
metadata: {name: first}
spec:
  schedulerName: volcano
  containers:
  - name: main
    image: busybox
    command: [sleep, "3600"]
    resources:
      limits:
        volcano.sh/vgpu-number: 1
        volcano.sh/vgpu-memory: 3000
        volcano.sh/vgpu-cores: 30"""


def up(settings: Up) -> int:
    """Run until a signal, or with `headless` until ready; return the exit code."""
    if settings.budgets is not None:
        from services.timekeeper.config.budget_sources import load_file

        load_file(settings.budgets)
    if settings.quotas is not None:
        from services.watcher.quota_sources import load_file as load_quotas

        load_quotas(settings.quotas)
    if settings.volcano_conf is not None:
        from shared.runtime.request_settings import RequestSettings, load_rules

        load_rules(RequestSettings(volcano_conf=settings.volcano_conf))
    directory = StateDir.at(settings.state)
    before = load_state(directory)
    nodes = layouts_of(
        settings.gpus,
        settings.nodes,
        before=before.nodes if before and not settings.fresh else {},
        check=load_simulated_nodes().parse_layout,
    )
    plan = plan_of(settings, nodes, before)
    directory.make()
    with locked(directory):
        killed = kill_leftovers(directory)
        if killed:
            _print(f"{killed} processes of an earlier run were left over and are killed now")
        if settings.fresh:
            wipe(directory)
            directory.make()
        forget_devices(directory, before.nodes if before else {}, plan.nodes)
        if settings.headless:
            return run_in_background(
                lambda report: _run(settings, plan, directory, report), directory
            )
        return _run(settings, plan, directory, _print)


def _run(settings: Up, plan: Plan, directory: StateDir, report: Report) -> int:
    write_supervisor_pid(directory)
    started_at_s = time.monotonic()
    with short_root(directory) as short:
        if short != directory:
            report(f"  sockets are reached through {short.root}: {directory.root} is too long")
        components = [
            each for each in components_of(plan, short) if each.name not in settings.without
        ]
        components = _add_credentials(components, plan, directory)
        _write_installation(components, plan, directory)
        _rotate_logs(components, directory)
        asyncio.run(_supervise(components, plan, directory, report, started_at_s))
    kill_leftovers(directory)
    report("stopped; nothing is left running")
    return 0


def _add_credentials(
    components: Sequence[Component], plan: Plan, directory: StateDir
) -> list[Component]:
    """Add users to the servers that `up` starts, and each component's secret."""
    nats, redis = bool(plan.nats_program), bool(plan.redis_program)
    nodes = [NodeName(node) for node in plan.nodes]
    files = credentials.write(
        directory.credentials, nodes, nats=nats, redis=redis, names=servers.NAMES
    )
    if plan.settings.kube_scheduler:
        write_scheduler_configuration(plan, directory, files)
    return with_credentials(components, files, nats=nats, redis=redis)


def _write_installation(components: Sequence[Component], plan: Plan, directory: StateDir) -> None:
    """Write what the simulated cluster installs: without a webhook no pod passes our admission."""
    policies = any(component.name == "webhook" for component in components)
    found = installation(
        str(directory.accounts), plan.nodes, policies=policies, page_port=plan.ports["page"]
    )
    directory.installation.write_text(json.dumps(found, indent=2))


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

    def save(states: tuple[ComponentState, ...], ready: bool) -> None:
        state = _state(plan, directory, states, ready=ready, started_at=started_at)
        try:
            save_state(directory, state)
        except OSError as error:
            report(f"  {directory.state} could not be written ({error.strerror}); continuing")

    def on_ready() -> None:
        has_page = any(component.name == "api" for component in components)
        steps = next_steps(directory, plan.page_url if has_page else "")
        report(f"ready in {time.monotonic() - started_at_s:.1f} s\n\n{steps}")

    report(f"{len(components)} components start in {directory.root}")
    await Supervisor(components, directory, report=report, save=save).run(stop, on_ready)


def _state(
    plan: Plan,
    directory: StateDir,
    components: tuple[ComponentState, ...],
    *,
    ready: bool,
    started_at: float,
) -> State:
    files = credentials.CredentialFiles(directory.credentials)
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


def load_line() -> str:
    """Return a command that uses the share of the first pod."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "  # no C compiler is on PATH: with one, programs can use the simulated GPUs"
    return (
        "  kubectl exec first -- gpu-load 'alloc 2g' 'alloc 1g' 'burn 9s'   # 3g exceed its share"
    )


def next_steps(directory: StateDir, page: str = "") -> str:
    """Return commands for a first pod, as they can be pasted into a shell."""
    page_line = f"\n  open {page}   # all of this, live" if page else ""
    is_default = directory == StateDir.at(Path(".leasehold"))
    flag = "" if is_default else f" --state {shlex.quote(str(directory.root))}"
    command = program()
    note = "" if shutil.which("kubectl") else "   # install kubectl first: none is on PATH"
    return f"""Try next:
  export KUBECONFIG={shlex.quote(str(directory.kubeconfig))}{note}
  kubectl apply -f - <<'EOF'
{EXAMPLE}
EOF
  kubectl exec first -- env       # the limits of its share
{load_line()}
  {command} gpus{flag}            # every device and its leases
  {command} explain first{flag}   # why it runs where it runs
  {command} trace first{flag}     # how long each step took{page_line}
  {command} down{flag}            # stops it, as Ctrl-C does without --headless"""
