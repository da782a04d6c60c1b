"""The command `resize`: has a binder change the size of a running container."""

import sys
from fractions import Fraction

from services.cli import terminal
from services.cli.api_client import ApiClient, NothingFoundError, RefusedError
from services.cli.commands import Resize
from services.cli.formats import size_text
from services.cli.terminal import program, program_name
from shared.model.bounds import MOST_MIB, printable_lines
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, ShareSize
from shared.model.quantity import parse_quantity
from shared.model.views.orders import ResizeOrder, ResizeView

EXIT_CODES = {"resized": 0, "unchanged": 0, "waiting": 0, "refused": 1, "unavailable": 3}


def resize(flags: Resize) -> int:
    memory_mib = _memory_mib(flags.memory)
    order = ResizeOrder(container=flags.container, memory_mib=memory_mib, cores_percent=flags.cores)
    api = ApiClient(flags)
    pod = api.server.pod(flags.namespace, flags.pod)
    try:
        view = api.post(f"/api/v1/leases/{pod.pod}/resize", order, ResizeView)
    except RefusedError as error:
        if error.status != 404:
            raise
        raise NothingFoundError(
            f"pod {flags.namespace}/{flags.pod} holds no lease; `{program()} explain` shows its "
            "state"
        ) from error
    if flags.output:
        terminal.print_document(view, flags.output)
    elif EXIT_CODES.get(view.outcome) == 0:
        print(printable_lines("\n".join(lines(view))))
    else:
        text = f"{program_name()} resize: {refusal(view)}"
        print(printable_lines(text), file=sys.stderr)
    return EXIT_CODES.get(view.outcome, 1)


def _memory_mib(text: str) -> int | None:
    if not text:
        return None
    try:
        amount = parse_quantity(text) / MIB
    except RequestError:
        amount = Fraction(0)
    if amount.denominator != 1 or not 1 <= amount <= MOST_MIB:
        raise RequestError(
            f"--memory must be whole MiB, such as 6Gi or 6144Mi, at most 16Ti, got {text}"
        )
    return int(amount)


def lines(view: ResizeView) -> list[str]:
    after = view.after or ShareSize(memory_mib=0, cores_percent=0)
    before = view.before or after
    container = f"container {view.container} of {view.namespace}/{view.name}"
    gpus = f"GPU {', '.join(map(str, view.devices))} of node {view.node}"
    if view.outcome == "waiting":
        first = (
            f"{container} keeps {size_text(before)} of {gpus}, and gets its smaller size as soon "
            f"as no more than that is in use: {view.reason}"
        )
    elif view.outcome == "unchanged":
        first = f"{container} has {size_text(after)} of {gpus} already"
    else:
        first = f"{container} has {size_text(after)} of {gpus} now; it had {size_text(before)}"
    return [first, *view.notes, *(f"pending: {change}" for change in view.pending)]


def refusal(view: ResizeView) -> str:
    hint = f"; {view.hint}" if view.hint else ""
    return f"{view.namespace}/{view.name} was not resized: {view.reason}{hint}"
