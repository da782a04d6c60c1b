"""The base of all types that the API returns; pure."""

from typing import Any, Self

import msgspec

_NONE_HAS_IT = object()


class View(msgspec.Struct, frozen=True, kw_only=True):
    @classmethod
    def from_attributes(cls, *sources: object, **others: Any) -> Self:
        """Return a view with `others`, and what `sources` have of its other fields by their names.

        Earlier sources come before later ones.
        """
        fields: dict[str, Any] = {}
        for name in cls.__struct_fields__:
            for source in sources:
                value = getattr(source, name, _NONE_HAS_IT)
                if value is not _NONE_HAS_IT:
                    fields[name] = value
                    break
        return cls(**(fields | others))
