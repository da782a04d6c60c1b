"""Write all generated files: `python -m tools.generate`. Review the difference before a commit."""

from collections.abc import Mapping
from pathlib import Path

from tools.generate import (
    alerts,
    architecture,
    chart,
    compatibility,
    reference,
    security,
    webhook_registration,
)


def write(files: Mapping[Path, str]) -> None:
    """Write what differs, and print its path."""
    for path, text in files.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path)


def main() -> None:
    """Write pages and manifests, then the chart, which is made from the manifests."""
    write(webhook_registration.generated())
    write({alerts.PAGE: alerts.generated()})
    write(
        {
            architecture.PAGE: architecture.generated(),
            compatibility.PAGE: compatibility.generated(),
            reference.PAGE: reference.generated(),
            security.PAGE: security.generated(),
        }
    )
    templates = chart.generated()
    for old in set(chart.TEMPLATES.glob("*.yaml")) - templates.keys():
        old.unlink()
        print(f"{old} (removed)")
    write(templates)


if __name__ == "__main__":
    main()
