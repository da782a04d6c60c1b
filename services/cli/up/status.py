"""`leasehold status`, and what `up` prints when it is ready: where it is, and what to try."""

import json
import shlex
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from services.cli.arguments import StateArguments
from services.cli.formats import age
from services.cli.local_commands import Status
from services.cli.state_dir import (
    LOCAL,
    ComponentState,
    State,
    StateDir,
    load_state,
    supervisor_pid,
)
from services.cli.terminal import print_document, program
from shared.dialects.reserved import LIBRARY_DIRECTORY
from shared.runtime.probe import OK, request_readiness

EXAMPLE = """\
apiVersion: v1
kind: Pod
metadata: {name: first}
spec:
  containers:
  - name: main
    image: nvidia/cuda:12.4.1-base-ubuntu22.04
    command: [sleep, infinity]
    resources:
      limits:
        nvidia.com/gpu: 1
        nvidia.com/gpumem: 3000
        nvidia.com/gpucores: 50
"""
SIZE_LINES = 2
"""Lines at the end of the manifest that make it a share of a GPU."""


def status(flags: Status) -> int:
    directory = StateDir.found(flags.state)
    pid = supervisor_pid(directory)
    state = load_state(directory)
    running = pid is not None and state is not None
    faults = faults_of(directory, state) if running and state else {}
    if flags.output:
        print_document(_document(state if running else None, faults), flags.output, "Status")
    elif running and state:
        print(text_of(directory, state, faults))
    else:
        what = f"nothing runs in {directory.root}"
        if not directory.root.is_dir():
            what = f"there is no {directory.root}"
        print(f"{what}: start it with `{program()} up{_flag(directory)}`")
    return int(not running or bool(faults))


def faults_of(directory: StateDir, state: State) -> dict[str, str]:
    faults = {component.name: _fault(directory, component) for component in state.components}
    return {name: fault for name, fault in faults.items() if fault}


def _fault(directory: StateDir, component: ComponentState) -> str:
    if not component.ready:
        if not (component.awaited or component.restarts):
            return ""  # it starts once the others are ready
        exits = f"exited {component.restarts} times; " if component.restarts else ""
        return f"starts; {exits}its log is {component.log}"
    try:
        run = json.loads(directory.run_file(component.name).read_text())
        code, text = request_readiness(run["http"])
    except FileNotFoundError:
        return ""  # a server: it replied to the supervisor
    except (OSError, ValueError, KeyError) as error:
        return f"does not respond: {error}"
    return "" if code == OK else " ".join(text.split())


def text_of(directory: StateDir, state: State, faults: dict[str, str]) -> str:
    count = len(state.components)
    since = age(time.time() - state.started_at)
    starting = [
        component.name
        for component in state.components
        if not component.ready and component.name not in faults
    ]
    ready = count - len(faults) - len(starting)
    lines = [
        f"running for {since}: {ready} of {count} components are ready",
        *(f"  {name}: {fault}" for name, fault in faults.items()),
        *(f"  {name}: starts" for name in starting),
        "",
        summary(directory, state),
    ]
    return "\n".join(lines)


def summary(directory: StateDir, state: State) -> str:
    command = program()
    flag = _flag(directory)
    kubeconfig = shlex.quote(state.kubeconfig)
    layouts = Counter(state.nodes.values()).items()
    nodes = (
        "this machine, with its own GPUs"
        if layout == LOCAL
        else f"{count} node{'s' * (count > 1)} with {layout}"
        for layout, count in layouts
    )
    page = any(component.name == "api" for component in state.components)
    pod = shlex.quote(str(directory.first_pod))
    missing = "" if shutil.which("kubectl") else "   # kubectl is not on PATH: install it first"
    uses = "nvidia-smi   # it sees its share of a GPU"
    local = LOCAL in state.nodes.values()
    if not local and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        uses = "env     # the limits of its share; nvidia-smi needs a C compiler on PATH"
    return f"""\
  page        {state.api_url if page else "none: the component api does not run"}
  kubeconfig  {state.kubeconfig}
  nodes       {", ".join(nodes)}
{local_notes(state) if local else ""}
Try next:
  export KUBECONFIG={kubeconfig}{missing}
  kubectl apply -f {pod}
  kubectl wait --for=condition=Ready pod/first
  kubectl exec first -- {uses}
  {command} explain first{flag}   # why it runs on its node

`{command} status{flag}` shows this again, `{command} down{flag}` stops it."""


def has_shares(*, local: bool, library: object) -> bool:
    return not local or bool(library) or Path(LIBRARY_DIRECTORY).exists()


def local_notes(state: State) -> str:
    lines = [
        "  pods        processes of this host: images are ignored, nothing but GPUs is limited"
    ]
    if not has_shares(local=True, library=state.library_source):
        lines.append(
            "  shares      need HAMi-core, --library-source PATH, or MPS, LEASEHOLD_MPS=private; "
            "others get whole GPUs"
        )
    return "\n".join((*lines, ""))


def _flag(directory: StateDir) -> str:
    is_default = directory.root == StateDir.at(StateArguments.state).root
    return "" if is_default else f" --state {shlex.quote(str(directory.root))}"


def _document(state: State | None, faults: dict[str, str]) -> dict[str, Any]:
    if state is None:
        return {"running": False}
    return {
        "running": True,
        "started_at": state.started_at,
        "page": state.api_url,
        "kubeconfig": state.kubeconfig,
        "nodes": dict(state.nodes),
        "components": [
            msgspec.to_builtins(component)
            | {"ready": component.name not in faults, "reason": faults.get(component.name, "")}
            for component in state.components
        ],
    }
