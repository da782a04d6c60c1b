"""The `leasehold` command: a room per kind of command, and what several of them use."""
