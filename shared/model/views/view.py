"""The base of all types that the API returns; pure."""

from typing import Any, Self

import msgspec


class View(msgspec.Struct, frozen=True, kw_only=True):
    @classmethod
    def from_attributes(cls, *sources: object, **others: Any) -> Self:
        """Return a view with `others`, and what `sources` have of its other fields by their names.

        Earlier sources come before later ones. What none has keeps its default.
        """
        fields = {
            name: getattr(source, name)
            for source in reversed(sources)
            for name in cls.__struct_fields__
            if hasattr(source, name)
        }
        return cls(**(fields | others))
