"""PCI locations and links of GPUs, from simulated NVML and sysfs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node_agent.gpus.nvml import topology as nvml_topology
from services.node_agent.gpus.nvml.topology import (
    NvLinks,
    links_among,
    location_of,
    parse_pci_address,
)
from shared.model.names import DeviceUuid

SWITCH = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
PEER = pynvml.NVML_NVLINK_DEVICE_TYPE_GPU


@dataclass(slots=True)
class Card:
    """One GPU: where its NVLinks lead, a card's number or a switch; None: a link that is down."""

    bus: str
    links: tuple[int | str | None, ...] = ()
    lost: bool = False


@dataclass(slots=True)
class Machine:
    """NVML's answers about cards; `nearest` of pairs, lower number first."""

    cards: list[Card]
    nearest: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": self.handle,
            "nvmlDeviceGetHandleByUUID": lambda uuid: self.handle(int(uuid.rpartition("-")[2])),
            "nvmlDeviceGetUUID": lambda number: f"GPU-{number}".encode(),
            "nvmlDeviceGetPciInfo": self.info,
            "nvmlDeviceGetNumaNodeId": self.unsupported,
            "nvmlDeviceGetTopologyCommonAncestor": self.ancestor,
            "nvmlDeviceGetNvLinkState": self.state,
            "nvmlDeviceGetNvLinkRemoteDeviceType": self.kind,
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda number, link: self.info(
                self.cards[number].links[link]
            ),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    def handle(self, number: int) -> int:
        if self.cards[number].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return number

    def info(self, number: Any) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000{self.cards[number].bus}".upper().encode())

    def ancestor(self, one: int, other: int) -> int:
        found = self.nearest.get((min(one, other), max(one, other)))
        if found is None:
            self.unsupported()
        return int(found or 0)

    def state(self, number: int, link: int) -> int:
        links = self.cards[number].links
        if not links:
            self.unsupported()
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 0 if links[link] is None else 1

    def kind(self, number: int, link: int) -> int:
        return int(SWITCH if self.cards[number].links[link] == "switch" else PEER)

    def unsupported(self, *_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def scores(self) -> list[dict[str, int]]:
        names = [DeviceUuid(f"GPU-{number}") for number in range(len(self.cards))]
        return [{str(to): n for to, n in one.items()} for one in links_among(names).values()]


def test_pairs_are_scored_by_what_is_nearest_above_both(monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = {(0, 1): 0, (0, 2): 10, (0, 3): 20, (0, 4): 30, (0, 5): 40, (0, 6): 50}
    machine = Machine([Card(f"0000:{n:02x}:00.0") for n in range(7)], nearest)
    machine.install(monkeypatch)

    first, second, *_ = machine.scores()

    assert first == {
        f"GPU-{n}": score for n, score in zip(range(1, 7), (60, 50, 40, 30, 20, 10), strict=True)
    }
    assert second == {"GPU-0": 60}, "what the driver does not report is left out"


def test_each_nvlink_counts_direct_or_through_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [
        Card("0000:01:00.0", (1, 1, 2, None)),
        Card("0000:02:00.0", (0, 0)),
        Card("0000:03:00.0", (0,)),
    ]
    Machine(cards, {(0, 1): 50, (0, 2): 50, (1, 2): 50}).install(monkeypatch)
    direct = Machine(cards, {}).scores()
    switched = Machine(
        [Card("0000:01:00.0", ("switch",) * 18), Card("0000:02:00.0", ("switch",) * 12)],
        {(0, 1): 50},
    )
    switched.install(monkeypatch)

    assert direct == [
        {"GPU-1": 210, "GPU-2": 110}, {"GPU-0": 210, "GPU-2": 10}, {"GPU-0": 110, "GPU-1": 10}
    ]  # fmt: skip
    assert switched.scores() == [{"GPU-1": 1210}, {"GPU-0": 1210}]


def test_a_lost_gpu_does_not_affect_links_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card(f"0000:0{n}:00.0", lost=n == 1) for n in range(3)]
    machine = Machine(cards, {(0, 1): 10, (0, 2): 20, (1, 2): 10})
    machine.install(monkeypatch)

    assert machine.scores() == [{"GPU-2": 40}, {"GPU-0": 40}]


def test_the_pci_location_comes_from_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "devices" / "pci0000:3a" / "0000:3a:00.0" / "0000:3b:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text("1\n")
    (tmp_path / "0000:3b:00.0").symlink_to(place)
    monkeypatch.setattr(nvml_topology, "SYSFS", tmp_path)
    machine = Machine([Card("0000:3b:00.0"), Card("0000:5e:00.0")])
    machine.install(monkeypatch)

    known, unknown = (location_of(number) for number in range(2))

    assert (known.address, known.root_complex, known.numa) == ("0000:3b:00.0", "pci0000:3a", 1)
    assert (unknown.address, unknown.root_complex, unknown.numa) == ("0000:5e:00.0", "", None)


@given(st.text(max_size=40))
def test_any_text_parses_as_a_pci_address_or_none(text: str) -> None:
    found = parse_pci_address(text)

    assert found == parse_pci_address(found)


@given(st.lists(st.sampled_from(["a", "b"])), st.integers(0, 18), st.integers(0, 18))
def test_nvswitch_links_score_equally_in_both_directions(
    direct: list[str], one: int, two: int
) -> None:
    own = NvLinks(direct=tuple(direct), switched=one)
    other = NvLinks(switched=two)

    assert own.count_to("c", other) == other.count_to("c", own)
    assert NvLinks(direct=tuple(direct)).count_to("a", other) == direct.count("a")
