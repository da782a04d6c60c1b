"""What `leasehold doctor` checks on a node; the only part of the agent that it uses."""
