"""Images of containers with static programs of this machine: none is pulled.

https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simcluster.gpu_driver import build

FIRST = Path(__file__).with_name("first_process.c")


def compile_static(compiler: str, target: Path, *sources: Path) -> Path:
    subprocess.run(
        [compiler, "-static", "-O1", "-std=gnu11", "-o", target, *sources],
        check=True,
        capture_output=True,
    )
    return target


def programs(folder: Path) -> dict[str, Path]:
    """Compile the programs of the image, and return them by their names in it."""
    compiler = build.compiler()
    assert compiler is not None
    driver = [build.SOURCES / name for name in build.PRODUCTS["gpu-control"]]
    return {
        "first-process": compile_static(compiler, folder / "first-process", FIRST),
        "gpu-control": compile_static(compiler, folder / "gpu-control", *driver),
    }


def write_image(target: Path, name: str, files: Mapping[str, Path]) -> Path:
    """Write an archive for `ctr images import`; the image runs `first-process`."""
    layer = _archive({path: file.read_bytes() for path, file in files.items()}, mode=0o755)
    packed = gzip.compress(layer, mtime=0)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/first-process"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
    }
    layers = [_described("application/vnd.oci.image.layer.v1.tar+gzip", packed)]
    encoded = json.dumps(config).encode()
    kind = "application/vnd.oci.image"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "config": _described(f"{kind}.config.v1+json", encoded),
            "layers": layers,
        }
    ).encode()
    named = _described(f"{kind}.manifest.v1+json", manifest) | {
        "annotations": {"io.containerd.image.name": name}
    }
    content = {
        "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [named]}).encode(),
    }
    content |= {f"blobs/sha256/{_digest(blob)}": blob for blob in (packed, encoded, manifest)}
    target.write_bytes(_archive(content))
    return target


def _described(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{_digest(blob)}", "size": len(blob)}


def _digest(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _archive(files: Mapping[str, bytes], *, mode: int = 0o644) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            entry.mode = mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
