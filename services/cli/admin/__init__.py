"""Commands of an operator: budget, report, preemptions, resize, credentials, node-keys."""
