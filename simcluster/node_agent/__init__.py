"""A node agent with simulated GPUs: production's agent, and the GPUs that it reads and changes."""
