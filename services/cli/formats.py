"""Formats of durations, instants and usage in the commands' output; pure."""

from datetime import UTC, datetime

from shared.model.usage import ShareMeasurement


def age(seconds: float) -> str:
    """Format a duration as kubectl does: 12s, 5m, 3h, 2d."""
    whole = max(int(seconds), 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def timestamp(at_s: float) -> str:
    """Format Unix seconds as Kubernetes does, to the second."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def used_texts(measured: ShareMeasurement | None) -> tuple[str, str]:
    """Format the memory in MiB and the percent of the cores in use; `-`: it is not known."""
    memory, cores = (measured.memory_mib, measured.cores_percent) if measured else (None, None)
    return "-" if memory is None else str(memory), "-" if cores is None else f"{cores}%"


def measured_text(measured: ShareMeasurement, now: float) -> str:
    """Describe the usage of a share."""
    memory, cores = used_texts(measured)
    idle = "" if measured.idle_since is None else f", idle for {age(now - measured.idle_since)}"
    return f"uses {memory} MiB and {cores} of the cores; processes: {measured.processes}{idle}"
