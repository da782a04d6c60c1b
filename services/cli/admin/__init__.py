"""Commands that change something: budget, resize, node-keys, credentials, reclaim."""
