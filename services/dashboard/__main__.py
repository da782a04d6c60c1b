"""Runs the dashboard: `python -m services.dashboard --help`."""

from services.dashboard.settings import ABOUT, EXAMPLES, DashboardSettings
from services.dashboard.wiring import serve_dashboard
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit


def main() -> None:
    """Parse the settings and run."""
    settings = load_or_exit(
        DashboardSettings, "python -m services.dashboard", about=ABOUT, examples=EXAMPLES
    )
    run(lambda: serve_dashboard(settings), service="dashboard", log_level=settings.log_level)


if __name__ == "__main__":
    main()
