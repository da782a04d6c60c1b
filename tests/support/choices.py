"""Choices of random input that are drawn from many times."""

from functools import lru_cache
from typing import Any

from hypothesis import strategies as st


@lru_cache(maxsize=None, typed=True)
def among(*values: Any) -> st.SearchStrategy[Any]:
    """Return the choice among these values: to make it takes longer than to draw from it."""
    return st.sampled_from(values)
