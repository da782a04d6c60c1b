"""Runs the extender: `python -m services.extender --help`."""

from services.extender.settings import ExtenderSettings
from services.extender.wiring import serve_extender
from shared.runtime.run import run
from shared.runtime.settings import load_or_exit


def main() -> None:
    """Parse the settings and run."""
    settings = load_or_exit(
        ExtenderSettings,
        "python -m services.extender",
        about="Answer a kube-scheduler about pods that request GPUs. Any number of replicas may "
        "run.",
        examples=(
            "python -m services.extender --listen 0.0.0.0:8443 --certificate-file tls.crt \\",
            "    --key-file tls.key --client-ca-file ca.crt --redis-url redis://cache:6379/0",
        ),
    )
    run(lambda: serve_extender(settings), service="extender", log_level=settings.log_level)


if __name__ == "__main__":
    main()
