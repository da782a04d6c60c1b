"""The commands cordon and uncordon: close a GPU to new pods, and open it again."""

from urllib.parse import quote

from services.cli.api_client import ApiClient, NothingFoundError, locate
from services.cli.commands import Cordon, GpuArguments, Uncordon
from services.cli.terminal import program
from shared.kubernetes.errors import ForbiddenError
from shared.model.errors import RequestError
from shared.model.node import DEVICE_CORDON_PREFIX
from shared.model.views import DeviceView, GpusView

MERGE = {"Content-Type": "application/merge-patch+json"}


def cordon(flags: Cordon) -> int:
    """Close a GPU, and print which pods stay on it."""
    api = ApiClient(locate(flags))
    device = _find(api, flags)
    _annotate(api, device, flags.reason)
    pods = len({share.pod for share in device.shares})
    kept = f"; pods that keep their shares of it: {pods}" if pods else ""
    print(f"GPU {device.index} of {device.node} gets no new pods{kept}")
    return 0


def uncordon(flags: Uncordon) -> int:
    """Open a GPU, and print what else closes it."""
    api = ApiClient(locate(flags))
    device = _find(api, flags)
    _annotate(api, device, None)
    left = "" if device.excluded.startswith("cordoned") else device.excluded or device.fault
    where = f"GPU {device.index} of {device.node}"
    print(f"{where} is still closed: {left}" if left else f"{where} gets new pods")
    return 1 if left else 0


def _find(api: ApiClient, flags: GpuArguments) -> DeviceView:
    node, separator, gpu = flags.gpu.rpartition("/")
    if not separator:
        raise RequestError(f"{flags.gpu!r} is not NODE/GPU; `{program()} gpus -o name` lists them")
    devices = {
        name: device
        for each in api.get("/api/v1/gpus", GpusView).nodes
        if each.node == node
        for device in each.devices
        for name in (str(device.index), device.uuid)
    }
    if gpu not in devices:
        raise NothingFoundError(
            f"node {node} has no GPU {gpu}; `{program()} gpus -o name` lists those of all nodes"
        )
    return devices[gpu]


def _annotate(api: ApiClient, device: DeviceView, reason: str | None) -> None:
    change = {"metadata": {"annotations": {f"{DEVICE_CORDON_PREFIX}{device.index}": reason}}}
    try:
        api.server.send("PATCH", f"/api/v1/nodes/{quote(device.node, safe='')}", change, MERGE)
    except ForbiddenError as error:
        raise RequestError(
            f"your account may not patch nodes: an administrator can cordon GPUs ({error.response})"
        ) from error
