"""The handshake of Volcano's older generation."""

from datetime import UTC, datetime

import pytest

from shared.dialects.volcano.device_register import is_gone, reported

NOW = datetime(2026, 8, 20, 10, 7, 21, 123456, tzinfo=UTC).timestamp()


def test_item_14_a_report_is_gos_default_time_text_in_utc() -> None:
    assert reported(NOW) == "Reported 2026-08-20 10:07:21.123456 +0000 UTC"


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        (None, False),
        ("Reported 2020-01-01 00:00:00 +0000 UTC m=+3.0", False),
        ("Requesting_2026.08.20 10:06:22", False),
        ("Requesting_2026.08.20 10:06:20", True),
        ("Requesting_soon", True),
        ("Deleted_2026.08.20 10:07:20", True),
    ],
)
def test_item_16_a_handshake_request_without_a_report_for_a_minute_means_that_the_plugin_is_gone(
    text: str | None, gone: bool
) -> None:
    assert is_gone(text, NOW) is gone
