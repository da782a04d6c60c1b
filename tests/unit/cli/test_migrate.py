"""`leasehold migrate FILE`: configurations of NVIDIA's device plugin are explained."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.request.command import load
from shared.model.errors import RequestError

CONFIG_MAP = """\
kind: ConfigMap
apiVersion: v1
metadata: {name: plugin-configs}
data:
  slices: |
    version: v1
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
  servers: |
    version: v1
    sharing:
      mps: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 10}]}
  instances: |
    version: v1
    sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}
"""
Migrated = Callable[..., tuple[int, str, str]]


@pytest.fixture
def migrated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Migrated:
    """Return a function that reads a configuration; it returns the exit code and the output."""

    def migrate(text: str, *flags: str) -> tuple[int, str, str]:
        file = tmp_path / "config.yaml"
        file.write_text(text)
        with pytest.raises(SystemExit) as left:
            main(["migrate", str(file), *flags])
        output = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, output.out, output.err

    return migrate


def test_words_22_each_configuration_shows_what_nodes_offer_and_what_to_write(
    migrated: Migrated,
) -> None:
    code, out, _ = migrated(CONFIG_MAP)

    slices, servers, instances = (out.partition(f"{name}\n")[2] for name in (
        "slices", "servers", "instances",
    ))  # fmt: skip
    assert code == 0
    assert "nvidia.com/gpu: 4 replicas by time-slicing" in slices
    assert "write       nvidia.com/gpumem-percentage: 25\n" in slices
    assert "memory, which it was not, is held to that part" in slices
    assert "offers      nvidia.com/gpu.shared" in servers
    assert "write       nvidia.com/gpucores: 10" in servers
    assert "nvidia.com/mig-1g.5gb: did you mean nvidia.com/gpu: 1 and" in instances
    assert "Nodes of Leasehold offer the same replicas, with the same labels" in out


def test_words_22_a_wrong_configuration_is_reported_beside_the_others(migrated: Migrated) -> None:
    text = f"{CONFIG_MAP}  wrong: 'version: v2'\n  broken: '['\n"

    code, out, _ = migrated(text, "-o", "json")

    faults = {it["name"]: it["fault"] for it in json.loads(out)["configurations"]}
    assert code == 1
    assert faults.pop("wrong") == "version must be v1, got 'v2'"
    assert faults.pop("broken").startswith("it is not YAML: ")
    assert faults == {"slices": "", "servers": "", "instances": ""}


@pytest.mark.parametrize("text", ["[1]", "{", "kind: ConfigMap"])
def test_a_file_that_is_no_configuration_is_an_error_in_one_line(
    migrated: Migrated, text: str
) -> None:
    code, _, err = migrated(text)

    assert code != 0
    assert len(err.strip().splitlines()) == 1


def test_standard_input_that_is_no_text_is_named() -> None:
    with pytest.raises(RequestError, match="standard input cannot be read"):
        load("-", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
