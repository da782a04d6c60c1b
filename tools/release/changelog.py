"""The release notes: the changelog's section of a version; pure."""

import re


class ChangelogError(Exception):
    """The changelog has no section that can be released."""


def section(changelog: str, version: str) -> str:
    """Return the text below the heading of `version`. Raises ChangelogError if there is none."""
    match = re.search(
        rf"^## {re.escape(version)} \([^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if match is None:
        raise ChangelogError(f"CHANGELOG.md has no section of version {version}")
    return match[1].strip() + "\n"


def check_released(changelog: str, version: str) -> None:
    """Raise ChangelogError unless the heading of `version` has its date."""
    section(changelog, version)
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise ChangelogError(
            f"CHANGELOG.md: write the date of version {version} into its heading, "
            f"as in `## {version} (2026-12-01)`"
        )
