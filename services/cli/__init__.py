"""The `leasehold` command: a package per kind of command, and shared code."""
