"""Runs the API and the page: `python -m services.api --help`."""

from services.api.settings import ABOUT, EXAMPLES, ApiSettings
from services.api.wiring import serve_api
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(ApiSettings, serve_api, service="api", about=ABOUT, examples=EXAMPLES)
