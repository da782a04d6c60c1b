"""MPS of the node agent: daemons, and the agent that has them hold shares."""
