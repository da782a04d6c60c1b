"""Commands that read: gpus, ps, top, explain, trace, topology."""
