"""Runs the webhook: `python -m services.webhook --help`."""

from services.webhook.settings import ABOUT, EXAMPLES, WebhookSettings
from services.webhook.wiring import serve_webhook
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(WebhookSettings, serve_webhook, service="webhook", about=ABOUT, examples=EXAMPLES)
