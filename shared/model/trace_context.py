"""W3C trace context: a span as text, its `traceparent`.

https://www.w3.org/TR/trace-context/
"""

import re

ADMISSION = "leasehold.dev/admission"
"""Annotation of a pod: the span in which the webhook admitted it, told nobody but traces."""
_FORM = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(text: str) -> bool:
    """Tell whether a text, from wherever it comes, names a span."""
    return _FORM.fullmatch(text) is not None
