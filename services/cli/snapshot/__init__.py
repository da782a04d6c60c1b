"""What the commands read of a running Leasehold: where it is, and its state at one moment."""
