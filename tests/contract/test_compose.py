"""The compose file starts what exists, with flags that exist, and holds no secret."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
OURS = {
    name: service
    for name, service in COMPOSE["services"].items()
    if str(service.get("command", [""])[0]).startswith("services.")
}
PINNED = re.compile(r"^\$\{REGISTRY:-\}[\w./-]+:[\w.-]*\d[\w.-]*$")


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_knows_its_flags(name: str) -> None:
    module, *flags = OURS[name]["command"]
    shown = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    ).stdout

    for flag in flags:
        assert re.search(rf"(?m)(^|\s){re.escape(flag.partition('=')[0])}\b", shown), flag


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_may_do_nothing_but_its_work(name: str) -> None:
    service = OURS[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["healthcheck"]["test"][0] == "CMD"


def test_other_images_are_pinned_and_come_from_a_registry_of_choice() -> None:
    others = [s["image"] for name, s in COMPOSE["services"].items() if name not in OURS]

    assert [image for image in others if not PINNED.match(image)] == []
    assert "latest" not in str(others)


def test_every_dependency_and_every_mounted_file_exists() -> None:
    services, volumes = COMPOSE["services"], COMPOSE["volumes"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in volumes


def test_the_file_holds_no_secret() -> None:
    text = (ROOT / "compose.yaml").read_text().lower()

    assert not re.search(r"(password|secret|token|private)\w*\s*[:=]", text)


def test_the_image_is_built_from_what_there_is_and_runs_as_nobody() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if re.match(r"COPY (?!--from)", line)]

    assert [path for paths in copied for path in paths if not (ROOT / path).exists()] == []
    assert "USER 65532:65532" in lines
    assert [line for line in lines if line.startswith("FROM")] == [
        "FROM ${REGISTRY}${BASE} AS build",
        "FROM ${REGISTRY}${BASE}",
    ]
