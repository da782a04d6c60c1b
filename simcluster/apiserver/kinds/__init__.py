"""The built-in kinds: defaults, validation, and the controllers that act on them."""
