"""Runs the API and the page: `python -m services.api --help`."""

from services.api.settings import ABOUT, EXAMPLES, ApiSettings
from services.api.wiring import serve_api
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit


def main() -> None:
    """Parse the settings and run."""
    settings = load_or_exit(ApiSettings, "python -m services.api", about=ABOUT, examples=EXAMPLES)
    run(lambda: serve_api(settings), service="api", log_level=settings.log_level)


if __name__ == "__main__":
    main()
