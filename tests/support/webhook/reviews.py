"""Pods and reviews as the API server sends them."""

import json
from typing import Any

from shared.pods.pod_view import PodView, decode_view


def reviewed(pod: dict[str, Any], namespace: str = "team-a") -> PodView:
    """Decode a pod that is written as a dictionary."""
    return decode_view(json.dumps(pod).encode(), namespace)
