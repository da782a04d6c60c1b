"""The kinds of objects that Leasehold adds to the API: read from files and from the API server."""
