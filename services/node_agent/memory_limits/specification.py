"""Variables of a container that would set limits beside its lease, from its OCI specification.

A variable of the image reaches neither the API server nor the kubelet.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from shared.dialects.reserved import MPS_PREFIX
from shared.model.errors import UNDECODABLE, RequestError, UnavailableError

MOST_BYTES = 16 << 20
REQUEST = "NVIDIA_GPU_MEMORY_REQUEST"
LIMIT = "NVIDIA_GPU_MEMORY_LIMIT"
"""With both, in MiB, NVIDIA's own hook limits every GPU of the container alike."""


class _Process(msgspec.Struct, frozen=True, gc=False):
    env: tuple[str, ...] | None = None


class _Specification(msgspec.Struct, frozen=True, gc=False):
    process: _Process | None = None


_decode = msgspec.json.Decoder(_Specification).decode


def read_variables(directories: Iterable[Path], container_id: str) -> dict[str, str]:
    """Raises UnavailableError if the runtime has made no bundle, RequestError for another form."""
    for directory in directories:
        for path in (directory / container_id, directory / container_id / "userdata"):
            file = path / "config.json"
            if file.is_file():
                return _variables_in(file)
    raise UnavailableError(
        f"the OCI specification of container {container_id} is in none of "
        f"{', '.join(map(str, directories))}: set --bundle-dir"
    )


def _variables_in(file: Path) -> dict[str, str]:
    try:
        with file.open("rb") as opened:
            specification = _decode(opened.read(MOST_BYTES))
    except (OSError, *UNDECODABLE) as error:
        raise RequestError(f"{file} is not an OCI specification: {error}") from error
    entries = specification.process.env or () if specification.process else ()
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def check_variables(
    variables: dict[str, str], amounts_mib: Iterable[int], given: Mapping[str, str]
) -> None:
    """Raise RequestError for variables that set other limits than these amounts.

    `given` are variables that the agent itself sets.
    """
    amounts = {str(amount) for amount in amounts_mib}
    for name in (REQUEST, LIMIT):
        other = {REQUEST, LIMIT} - {name}
        if name in variables and not (other <= variables.keys() and {variables[name]} == amounts):
            raise RequestError(
                f"the container's variable {name}={variables[name][:40]} would set another limit "
                f"than its lease of {', '.join(sorted(amounts))} MiB: remove it and "
                f"{other.pop()} from the image or the pod"
            )
    others = variables.items() - given.items()
    mps = next((name for name, _ in sorted(others) if name.startswith(MPS_PREFIX)), None)
    if mps is not None:
        raise RequestError(
            f"the container's variable {mps[:60]} would have it use MPS, which its lease does not "
            "include: remove it from the image or the pod"
        )
