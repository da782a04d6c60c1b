"""Commands that read: gpus, ps, explain, trace, topology."""
