"""The commands cordon and uncordon: close a GPU to new pods, and open it again."""

import time
from urllib.parse import quote

from services.cli.api_client import ApiClient, NothingFoundError
from services.cli.commands import Cordon, GpuArguments, Uncordon
from services.cli.terminal import NAME, program
from shared.kubernetes.errors import ForbiddenError
from shared.kubernetes.paths import node_path
from shared.model.devices.node import CORDON_MANAGER, CORDONED, DEVICE_CORDON_PREFIX
from shared.model.errors import RequestError, UnavailableError
from shared.model.views.gpus import DeviceView, GpusView
from shared.model.views.orders import VersionView

SETTLE_S = 15.0
"""How long the command waits for the agent, which reports its devices every 10 s."""
MOST_MANAGER = 128
"""The API server rejects longer names of field managers."""
MERGE = {"Accept": "application/json", "Content-Type": "application/merge-patch+json"}


def cordon(flags: Cordon) -> int:
    api = ApiClient(flags)
    device = _find(api, flags)
    _annotate(api, device, flags.reason)
    device = _settled(api, flags, closed=True)
    pods = len({share.pod for share in device.shares})
    kept = f"; pods that keep their shares of it: {pods}" if pods else ""
    print(f"GPU {device.index} of {device.node} gets no new pods{kept}")
    return 0


def uncordon(flags: Uncordon) -> int:
    api = ApiClient(flags)
    _annotate(api, _find(api, flags), None)
    device = _settled(api, flags, closed=False)
    left = device.excluded or device.fault
    then = "" if device.excluded else "; its agent opens it once it is healthy"
    where = f"GPU {device.index} of {device.node}"
    print(f"{where} is still closed: {left}{then}" if left else f"{where} gets new pods")
    return 1 if left else 0


def _settled(api: ApiClient, flags: GpuArguments, *, closed: bool) -> DeviceView:
    """Raises UnavailableError after `SETTLE_S`."""
    end = time.monotonic() + SETTLE_S
    while True:
        device = _find(api, flags)
        if device.excluded.startswith(CORDONED) == closed:
            return device
        if time.monotonic() > end:
            raise UnavailableError(
                f"the node is annotated, and after {SETTLE_S:g} s nothing has changed: does the "
                "watcher run? See `kubectl -n leasehold-system get pods`"
            )
        time.sleep(0.1)


def _find(api: ApiClient, flags: GpuArguments) -> DeviceView:
    node, separator, gpu = flags.gpu.rpartition("/")
    if not separator:
        raise RequestError(f"{flags.gpu!r} is not NODE/GPU; `{program()} gpus -o name` lists them")
    devices = {
        name: device
        for gpus in api.get("/api/v1/gpus", GpusView).nodes
        if gpus.node == node
        for device in gpus.devices
        for name in (str(device.index), device.uuid)
    }
    if gpu not in devices:
        raise NothingFoundError(
            f"node {node} has no GPU {gpu}; `{program()} gpus -o name` lists those of all nodes"
        )
    return devices[gpu]


def _annotate(api: ApiClient, device: DeviceView, reason: str | None) -> None:
    change = {"metadata": {"annotations": {f"{DEVICE_CORDON_PREFIX}{device.index}": reason}}}
    user = api.get("/api/v1/version", VersionView).user
    manager = f"{CORDON_MANAGER}{user}" if user else NAME
    path = f"{node_path(device.node)}?fieldManager={quote(manager[:MOST_MANAGER], safe='')}"
    try:
        api.server.send("PATCH", path, change, MERGE)
    except ForbiddenError as error:
        raise RequestError(
            f"your account may not patch nodes: an administrator can cordon GPUs ({error.response})"
        ) from error
