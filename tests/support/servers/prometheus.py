"""A real Prometheus with samples that a test writes.

Its programs are `cmd/prometheus` and `cmd/promtool` of github.com/prometheus/prometheus.
"""

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path

import aiohttp
from prometheus_client import Metric

from tests.support.servers.nats import free_port
from tests.support.waiting import until

PROGRAM = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
MISSING = (
    "no Prometheus: put its programs `prometheus` and `promtool` on PATH (docs/versions.md says "
    "how to build them)"
)


def sample_lines(
    metrics: Iterable[Metric], at: float, labels: Mapping[str, str], *, honored: bool = True
) -> Iterator[str]:
    """Yield the samples as they are stored, with the labels of a target in Prometheus.

    Unless labels are honored, those of a sample with the same names are renamed.
    """
    for metric in metrics:
        for sample in metric.samples:
            own = {
                f"exported_{name}" if not honored and name in labels else name: text
                for name, text in sample.labels.items()
            }
            pairs = ",".join(
                f"{name}={json.dumps(text)}" for name, text in {**labels, **own}.items()
            )
            yield f"{sample.name}{{{pairs}}} {sample.value} {at:.3f}"


@contextlib.asynccontextmanager
async def prometheus(lines: Iterable[str], folder: Path) -> AsyncIterator[str]:
    """Run a Prometheus that has these lines of OpenMetrics, and yield its URL."""
    samples = folder / "samples"
    data = folder / "data"
    config = folder / "prometheus.yaml"
    samples.write_text("\n".join([*sorted(lines), "# EOF", ""]))
    config.write_text("global: {}\n")
    create = [str(PROMTOOL), "tsdb", "create-blocks-from", "openmetrics", str(samples), str(data)]
    done = await asyncio.to_thread(subprocess.run, create, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    address = f"127.0.0.1:{free_port()}"
    log = folder / "prometheus.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            str(PROGRAM),
            f"--config.file={config}",
            f"--storage.tsdb.path={data}",
            f"--web.listen-address={address}",
            stdout=file,
            stderr=subprocess.STDOUT,
        )

    async def is_ready() -> bool:
        assert process.returncode is None, log.read_text()
        async with aiohttp.ClientSession() as session:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://{address}/-/ready") as response:
                    return response.status == 200
        return False

    try:
        await until(is_ready)
        yield f"http://{address}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
