"""Every constant and setting in seconds says what it is for; the page lists all of them."""

from tools.generate.timings import Timing, timings, undocumented


def test_every_time_says_what_it_is_for() -> None:
    assert undocumented(timings()) == []


def test_a_time_without_words_is_named() -> None:
    silent = Timing("services/x.py", "PAUSE_S", 1.0, "")
    clear = Timing("services/x.py", "LIMIT_S", 1.0, "How long a call may take.")

    assert undocumented([silent, clear]) == ["services/x.py PAUSE_S"]


def test_constants_fields_of_timings_and_settings_are_found_with_their_values() -> None:
    found = {(timing.path, timing.name): timing for timing in timings()}

    pause = found["services/placer/rounds/rounds.py", "ROUND_PAUSE_S"]
    assert (pause.value, pause.text) == (
        0.005,
        "Pause for the feed to deliver changes to the mirror.",
    )
    tick = found["services/timekeeper/settings.py", "TimekeeperSettings.tick_s"]
    assert (tick.value, tick.text) == (5.0, "seconds between two counts")
    assert found["services/node_agent/agent_timing.py", "AgentTiming.relist_s"].value == 90.0
    assert ("shared/model/clock.py", "HOUR_S") not in found
    assert not [path for path, _ in found if path.startswith("simcluster/")]
