"""The command `sim`: makes a simulated GPU of `leasehold up` sick, and heals it."""

import json
from pathlib import Path

from services.cli.local_commands import Sim
from services.cli.state_dir import LOCAL, StateDir, load_state, supervisor_pid
from services.cli.terminal import program
from shared.model.errors import RequestError, UnavailableError

NOTICED_S = 5
"""Interval at which a node agent reads the faults of its GPUs, seconds."""
STUCK = "stuck"


def sim(flags: Sim) -> int:
    directory = StateDir.found(flags.state)
    node, _, index = flags.device.partition("/")
    file = directory.faults(node)
    _check(directory, node, index, flags.device)
    faults = _faults(file)
    if flags.action == "break":
        fault = flags.fault if flags.xid is None else f"xid-{flags.xid}"
        faults[index] = fault
        what = f"has the fault {fault} until `{program()} sim heal {flags.device}`"
        then = (
            f"the processes of a container stay in `{directory.node(node)}/proc` when it is stopped"
            if fault == STUCK
            else f"its agent notices within {NOTICED_S} s: see `{program()} gpus`"
        )
    elif (fault := faults.pop(index, "")) == "":
        print(f"GPU {index} of {node} has no simulated fault")
        return 0
    else:
        what = "has no fault any more"
        then = (
            "processes that stayed end within a second"
            if fault == STUCK
            else "its agent opens it after 30 s, or longer if it was sick before, and three "
            f"successful probes: see `{program()} gpus`"
        )
    scratch = file.with_suffix(".new")
    scratch.write_text(json.dumps(faults))
    scratch.replace(file)
    print(f"GPU {index} of {node} {what}; {then}")
    return 0


def _check(directory: StateDir, node: str, index: str, device: str) -> None:
    state = load_state(directory)
    if state is None or supervisor_pid(directory) is None:
        raise UnavailableError(
            f"no simulated cluster runs in {directory.root}: start one with `{program()} up`, "
            "or name its directory with --state"
        )
    layout = state.nodes.get(node)
    if layout == LOCAL:
        raise RequestError(f"the GPUs of {node} are this machine's own: only simulated ones break")
    if layout is None or not index.isdecimal():
        raise RequestError(
            f"{device} is not NODE/GPU, such as {next(iter(state.nodes), 'node-0')}/0: the nodes "
            f"are {', '.join(state.nodes)}, and `{program()} gpus` shows the numbers of their GPUs"
        )
    count = sum(int(part.partition("x")[0]) for part in layout.split("+"))
    if int(index) >= count:
        raise RequestError(f"{node} has {count} GPUs, 0 to {count - 1}: there is no GPU {index}")


def _faults(file: Path) -> dict[str, str]:
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return dict(document) if isinstance(document, dict) else {}
