"""The policy `fragmentation`: nodes are chosen so that idle GPUs stay usable for later pods."""
