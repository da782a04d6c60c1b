"""Runs the webhook: `python -m services.webhook --help`."""

from services.webhook.settings import ABOUT, EXAMPLES, WebhookSettings
from services.webhook.wiring import serve_webhook
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit


def main() -> None:
    """Parse the settings and run."""
    settings = load_or_exit(
        WebhookSettings, "python -m services.webhook", about=ABOUT, examples=EXAMPLES
    )
    run(lambda: serve_webhook(settings), service="webhook", log_level=settings.log_level)


if __name__ == "__main__":
    main()
