"""The containers of a pod: spec, state, status, environment, built-in commands."""
