"""The fault campaign: random pods and faults against a whole Leasehold, and a judge of its own."""
