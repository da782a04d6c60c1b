"""Pods and reviews as the API server sends them."""

import json
from typing import Any

from services.webhook.reviewed_pod import ReviewedPod, parse_pod


def reviewed(pod: dict[str, Any], namespace: str = "team-a") -> ReviewedPod:
    """Parse a pod that is written as a dictionary."""
    return parse_pod(json.dumps(pod).encode(), namespace)
