"""Runs the auth service: `python -m services.auth --help`."""

from services.auth.root_secret import AUTH
from services.auth.settings import ABOUT, EXAMPLES, AuthSettings
from services.auth.wiring import serve_auth
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit


def main() -> None:
    """Parse the settings and run."""
    settings = load_or_exit(AuthSettings, "python -m services.auth", about=ABOUT, examples=EXAMPLES)
    run(lambda: serve_auth(settings), service=AUTH, log_level=settings.log_level)


if __name__ == "__main__":
    main()
