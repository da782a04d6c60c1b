"""A night on call: faults of a running stack, and what each place that an operator reads says."""
