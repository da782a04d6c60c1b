"""Commands of MPS in version 3 of its protocol."""

import pytest

from simcluster.gpu_driver.mps_commands import CommandError, parse, table

LONGEST = "n" * 64


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "unknown command"),
        ("get_server_list", "unknown command"),
        ("server rename a", "unknown command"),
        ("server create a b", "2 names"),
        ("server get a", "1 names"),
        ("server create Training", "invalid name"),
        (f"namespace create {LONGEST}n --server=a", "invalid name"),
        ("namespace create a-b --server=a", "invalid name"),
        ("namespace create a", "--server is required"),
        ("namespace set a --server=a", "at least one option"),
        ("server set a", "at least one option"),
        ("server create a --uid=root", "--uid"),
        ("server create a --force", "unknown option"),
        ("server delete a --force=true", "unknown option"),
        ("server create a --locality-domains=yes", "--locality-domains"),
        ("server set a --active-thread-percentage=0", "--active-thread-percentage"),
        ("server set a --active-thread-percentage=101", "--active-thread-percentage"),
        ("server set a --active-thread-percentage=12.5", "--active-thread-percentage"),
        ("server set a --pinned-memory-limit=4096", "--pinned-memory-limit"),
        ("server set a --pinned-memory-limit=4GB", "--pinned-memory-limit"),
        ("server set a --client-priority=2", "--client-priority"),
        ("server list --format=json", "--format"),
    ],
)
def test_what_has_no_documented_form_is_refused(line: str, why: str) -> None:
    with pytest.raises(CommandError, match=why):
        parse(line.split())


def test_options_may_have_dashes_or_not() -> None:
    command = parse(["namespace", "set", LONGEST, "server=a", "--pinned-memory-limit=512M"])

    assert command.name == LONGEST
    assert command.options["server"] == "a"
    assert command.limits() == {"pinned-memory-limit": "512M"}


def test_a_list_is_a_table_or_csv_that_quotes_nothing() -> None:
    rows = [{"pid": "7", "cmd": "a,b\nc"}, {"pid": "123456", "cmd": "d"}]

    assert table(("pid", "cmd"), rows, "csv,noheader") == "7,a,b\nc\n123456,d\n"
    assert table(("pid", "cmd"), rows, "csv").startswith("PID,CMD\n")
    assert table(("pid", "cmd"), rows[1:], "table") == "PID     CMD\n123456  d\n"
    assert table(("pid", "cmd"), [], "table") == "PID  CMD\n"
    assert table(("pid", "cmd"), [], "table,noheader") == ""
