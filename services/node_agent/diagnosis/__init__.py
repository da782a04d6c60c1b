"""The checks of `leasehold doctor` on a node; the only part of the agent that it uses."""
