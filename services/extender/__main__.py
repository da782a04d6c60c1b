"""Runs the extender: `python -m services.extender --help`."""

from services.extender.settings import ExtenderSettings
from services.extender.wiring import serve_extender
from shared.runtime.run import run_service

if __name__ == "__main__":
    run_service(
        ExtenderSettings,
        serve_extender,
        service="extender",
        about="Answer a kube-scheduler about pods that request GPUs. Any number of replicas may "
        "run.",
        examples=(
            "python -m services.extender --listen 0.0.0.0:8443 --certificate-file tls.crt \\",
            "    --key-file tls.key --client-ca-file ca.crt --redis-url redis://cache:6379/0",
        ),
    )
