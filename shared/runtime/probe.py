"""Asks this machine's own service whether it is ready: `python -m shared.runtime.probe`.

For container health checks, in images without curl. LEASEHOLD_PROBE names HOST:PORT; otherwise the
port is that of LEASEHOLD_HTTP. Exit code 0: ready; 1: not, and the reason is printed.
"""

import os
import sys
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

TIMEOUT_S = 2.0


def address(environ: dict[str, str]) -> str:
    """Return HOST:PORT of the service's own endpoints."""
    told = environ.get("LEASEHOLD_PROBE", "")
    if told:
        return told
    _, _, port = environ.get("LEASEHOLD_HTTP", "").rpartition(":")
    return f"127.0.0.1:{port or 9100}"


def main() -> int:
    """Ask once."""
    url = f"http://{address(dict(os.environ))}/readyz"
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            answer.read()
    except HTTPError as error:
        print(f"{url}: {error.code} {error.read().decode(errors='replace')}")  # noqa: T201
        return 1
    except (URLError, OSError) as error:
        print(f"{url}: {error}")  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
