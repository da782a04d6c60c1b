"""The built-in kinds: defaults, validation and what each does when it is written."""
