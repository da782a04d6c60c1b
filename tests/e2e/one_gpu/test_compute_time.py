"""What docs/try.md shows of cores by GPU time: two pods with 25 and 75 %, and what each gets."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from simcluster.gpu_driver.build import compiler
from tests.support.stack import NEEDS_KUBECTL, Stack
from tests.support.waiting import until

pytestmark = [
    *NEEDS_KUBECTL,
    pytest.mark.skipif(compiler() is None, reason="the library needs a C compiler"),
]
PAGE = Path(__file__).parents[3] / "docs" / "try.md"
LEAST = {"quarter": 18, "rest": 54}
"""Percent of the GPU. A program that is held up by a busy machine gets less than its limit."""
MOST = {"quarter": 28, "rest": 78}
Percents = dict[str, int | None]


def percents_of(shares: list[dict[str, Any]]) -> Percents:
    return {share["name"]: (share["measured"] or {}).get("cores_percent") for share in shares}


def is_held(got: Percents) -> bool:
    return got.keys() == LEAST.keys() and all(
        LEAST[name] <= (got[name] or 0) <= MOST[name] for name in LEAST
    )


async def test_two_pods_that_always_compute_get_25_and_75_percent(up: Stack) -> None:
    manifests = re.findall(r"<<'EOF'\n(.*?)\nEOF", PAGE.read_text(), re.DOTALL)
    (manifest,) = [text for text in manifests if "flood" in text]

    await up.apply(manifest)

    async def top() -> Percents:
        return percents_of(json.loads((await up.leasehold("top", "--json")).out)["shares"])

    async def page() -> Percents:
        [node] = json.loads((await up.leasehold("gpus", "--json")).out)["nodes"]
        shares: list[dict[str, Any]] = node["devices"][0]["shares"]
        assert {share["held_text"] for share in shares} == {
            "memory by HAMi-core, cores by GPU time"
        }
        return percents_of(shares)

    await until(top, is_held)
    await until(page, is_held)
