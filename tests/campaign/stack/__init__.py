"""The stack of a campaign: parts, proxies, clocks, faults and what is read of it."""
