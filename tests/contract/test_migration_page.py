"""docs/migrate.md has each word of KAI, NVIDIA and clouds, with what holds the amounts."""

import re
from collections.abc import Iterator
from typing import NamedTuple, get_args, get_type_hints

import pytest

from shared.dialects.kai import words as kai
from shared.dialects.kai.dialect import PORTION, UNUSED
from shared.dialects.nvidia import dra_parameters
from shared.dialects.nvidia.plugin_config import FIELDS, MIG_RESOURCES, SHARED
from shared.dialects.nvidia.replica_labels import LABELS, SHARED_PRODUCT
from shared.dialects.nvidia.sharing_selectors import GKE_PARTITION
from tools.generate.pages import DOCS

PAGE = DOCS / "migrate.md"
CARD_MIB = 15_360


class Row(NamedTuple):
    word: str
    here: str
    memory: str
    cores: str


def rows() -> Iterator[Row]:
    """Yield the rows of the tables that say what holds memory and cores."""
    table = re.compile(r"^\|.*\| memory \| cores \|\n\|.*\n((?:\|.*\n)+)", re.MULTILINE)
    tables = table.findall(PAGE.read_text())
    for line in "".join(tables).splitlines():
        yield Row(*(cell.strip() for cell in line.strip("|").split(" |")))


def row_of(word: str) -> Row | None:
    """Return the first row with a word in its first column, whatever its prefix is there."""
    written = rf"(?<![\w-]){re.escape(word.rpartition('/')[2])}[`:]"
    return next((row for row in rows() if re.search(written, row.word)), None)


def literals(of: type, field: str) -> tuple[str, ...]:
    return tuple(get_args(get_type_hints(of)[field]))


@pytest.mark.parametrize(
    "word",
    sorted(
        {
            *kai.ANNOTATIONS,
            *kai.ENDINGS,
            *kai.OWNED_ENDINGS,
            *UNUSED,
            kai.PORTION_LIMIT,
            kai.QUEUE,
            kai.TIME_SLICING,
            kai.SM_SHARING,
            PORTION,
            *FIELDS.values(),
            f"nvidia.com/gpu{SHARED}",
            "failRequestsGreaterThanOne",
            "renameByDefault",
            f"{MIG_RESOURCES}1g.5gb",
            *LABELS,
            SHARED_PRODUCT,
            GKE_PARTITION,
            *literals(dra_parameters.DeviceConfig, "kind"),
            *literals(dra_parameters.Sharing, "strategy"),
            "nvidiaMps",
            "aliyun.com/gpu-mem",
            "nvidia.com/vgpu-mode: mps",
        }
    ),
)
def test_words_36_each_word_has_its_row_on_the_migration_page(word: str) -> None:
    row = row_of(word)

    assert row is not None, f"docs/migrate.md has no row for {word}"
    assert row.here, f"docs/migrate.md does not say what {word} is here"


AMOUNTS = (
    *(kai.FRACTION, kai.MEMORY, kai.DEVICES, kai.MPS),
    *(kai.REQUEST, kai.COMPUTE, kai.LIMIT, kai.PORTION_LIMIT, kai.TIME_SLICING, kai.SM_SHARING),
    *("nvidia.com/gpu", "timeSlicing", "mps", f"nvidia.com/gpu{SHARED}"),
    *("failRequestsGreaterThanOne", f"{MIG_RESOURCES}1g.5gb: 1"),
    *("cloud.google.com/gke-gpu-sharing-strategy", GKE_PARTITION),
    *("GpuConfig", "MigDeviceConfig", "TimeSlicing", "MPS"),
    *("nvidiaMps", "aliyun.com/gpu-mem", "nvidia.com/vgpu-mode: mps"),
)
"""Words that stand for a part of a GPU, or for all of it."""


@pytest.mark.parametrize("word", AMOUNTS)
def test_words_36_each_amount_is_held_counted_or_a_turn_on_the_migration_page(word: str) -> None:
    row = row_of(word)

    assert row is not None
    for cell in (row.memory, row.cores):
        assert re.search(r"\b(held|counted|turns?|not limited|all|as of a replica)\b", cell), row


def test_the_migration_page_names_what_kai_makes_of_memory() -> None:
    """With HAMi-core, KAI has a fraction of two decimals."""
    row = row_of(kai.MEMORY)

    assert row is not None
    assert f"{int(round(4096 / CARD_MIB, 2) * CARD_MIB):,}" == "4,147"
    assert "exactly 4096 MiB" in row.here
    assert "of 15,360 MiB it gives 4,147" in row.here
