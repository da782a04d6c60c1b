"""ResourceClaims of a manifest: the GPUs they request, and what their parameters ask for; pure."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs
from rich.text import Text

from shared.dialects.nvidia.dra_parameters import (
    NVIDIA_CLASSES,
    NVIDIA_DRIVER,
    Effects,
    read_parameters,
)
from shared.kubernetes.manifest_claims import ManifestClaim
from shared.kubernetes.resource_claims import RequestedDevice, is_for
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedDevice
from shared.model.leases.lease import MIB
from shared.model.quantity import parse_count
from shared.model.requests.claim import CORES, DEMANDED_MODES, DRIVER, MEMORY, demanded_mode
from shared.model.views.view import View

OWN = ".leasehold.dev"


class ClaimedShare(View, frozen=True, kw_only=True):
    request: str
    device_class: str
    text: str


class ClaimReport(View, frozen=True, kw_only=True):
    origin: str
    fault: str = ""
    changes: tuple[str, ...] = ()
    """As it is, another driver serves the claim."""
    warnings: tuple[str, ...] = ()
    shares: tuple[ClaimedShare, ...] = ()


def report_of_claim(claim: ManifestClaim) -> ClaimReport:
    report = ClaimReport(origin=claim.origin, changes=tuple(dict.fromkeys(_changes(claim))))
    served = {name: device for name, device in claim.devices if _class(device)}
    try:
        devices = {name: _device(name, device) for name, device in served.items()}
        effects = list(_effects(claim, devices.values()))
    except RequestError as error:
        return structs.replace(report, fault=str(error))
    intervals = {device.request: effect.interval for effect, own in effects for device in own}
    shares = tuple(
        ClaimedShare(
            request=name,
            device_class=_class(served[name]),
            text=_text(device, _class(served[name]), intervals.get(name)),
        )
        for name, device in devices.items()
    )
    warnings = tuple(effect.warning for effect, _ in effects if effect.warning)
    return structs.replace(report, shares=shares, warnings=warnings)


def _effects(
    claim: ManifestClaim, devices: Iterable[AllocatedDevice]
) -> Iterator[tuple[Effects, Sequence[AllocatedDevice]]]:
    for config in claim.devices.config:
        if config.opaque is not None and config.opaque.driver in {DRIVER, NVIDIA_DRIVER}:
            own = [device for device in devices if is_for(config, device.request)]
            yield read_parameters(bytes(config.opaque.parameters), own), own


def _class(device: RequestedDevice) -> str:
    written = device.device_class_name
    return NVIDIA_CLASSES.get(written, written if written.endswith(OWN) else "")


def _device(name: str, device: RequestedDevice) -> AllocatedDevice:
    mode = _class(device).removesuffix(OWN)
    requested = device.capacity.requests if device.capacity else {}
    memory = requested.get(MEMORY)
    return AllocatedDevice(
        request=name,
        device=f"gpu-{mode}" if mode in DEMANDED_MODES else "gpu",
        memory_mib=None if memory is None else -(-parse_count(memory) // MIB),
        cores_percent=parse_count(requested.get(CORES, 0)),
    )


def _changes(claim: ManifestClaim) -> Iterator[str]:
    for name, device in claim.devices:
        if device.device_class_name in NVIDIA_CLASSES:
            yield (
                f"deviceClassName {device.device_class_name} of request {name} is of NVIDIA's "
                f"driver: write {_class(device)}"
            )
    for config in claim.devices.config:
        if config.opaque is not None and config.opaque.driver == NVIDIA_DRIVER:
            yield f"parameters for driver {NVIDIA_DRIVER} are NVIDIA's: write driver: {DRIVER}"


def _text(device: AllocatedDevice, device_class: str, interval: str | None) -> str:
    if device_class.startswith("mig."):
        return "an instance of a GPU in MIG mode"
    slices = f"; the GPU's time slices have the length {interval}" if interval else ""
    cores = f"{device.cores_percent} % of the cores" if device.cores_percent else "any cores"
    if device.memory_mib is None:
        mode = demanded_mode(device.device)
        return (f"all memory of a GPU, {cores}" if mode else "a whole GPU") + slices
    return f"{device.memory_mib} MiB of a GPU, {cores}{slices}"


def claim_lines(report: ClaimReport) -> Iterable[Text]:
    yield Text(report.origin, style="bold")
    for change in report.changes:
        yield Text(f"  change      {change}", style="yellow")
    if report.fault:
        yield Text(f"  refused     {report.fault}", style="red")
        return
    for warning in report.warnings:
        yield Text(f"  warning     {warning}", style="yellow")
    if not report.shares:
        yield Text("  requests no GPU of a DeviceClass that Leasehold has")
    for share in report.shares:
        yield Text(f"  request     {share.request}: {share.text} ({share.device_class})")
