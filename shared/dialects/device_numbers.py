"""Short numbers for device IDs, of which a list may have very many."""

import string

_DIGITS = string.digits + string.ascii_lowercase


def base36(number: int) -> str:
    """Write a number that is not negative in base 36."""
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
        if not number:
            return digits
