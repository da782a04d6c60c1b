"""GPUs for machines that have none: models, MIG rules, injected faults."""
