"""The HTTP interface: the page, `/api/v1`, and their server."""
