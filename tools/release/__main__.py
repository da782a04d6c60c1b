"""`make dist`, `make release-dry-run` and the release workflow."""

import argparse
import sys
from pathlib import Path

from tools.release import artifacts, publish
from tools.release.changelog import ChangelogError


def main() -> int:
    """Make the files of a release; with `publish`, also the images, and publish all."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("command", choices=("dist", "publish"))
    parser.add_argument("--output", type=Path, default=artifacts.ROOT / "dist", metavar="DIR")
    parser.add_argument(
        "--image", default="registry.example.org/leasehold", help="name of the image"
    )
    parser.add_argument(
        "--downloads",
        default="https://example.org/leasehold/releases/download",
        metavar="URL",
        help="where the files of releases are, each in a folder vVERSION",
    )
    parser.add_argument("--tag", default="", help="the tag of the commit, vVERSION")
    parser.add_argument("--dry-run", action="store_true", help="publish nothing, use no secrets")
    flags = parser.parse_args()
    try:
        made = artifacts.make_all(flags.output, image=flags.image, downloads=flags.downloads)
        for path in made:
            print(f"{path.stat().st_size:>10,} bytes  {path}")
        if flags.command == "publish":
            publish.publish(flags.output, image=flags.image, tag=flags.tag, dry_run=flags.dry_run)
    except (ChangelogError, publish.PublishError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
