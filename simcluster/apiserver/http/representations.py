"""Representations of objects: plain, metadata only, or rows of a table; pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from simcluster.apimachinery.conversions import to_version
from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, encode
from simcluster.apimachinery.printer_columns import DEFAULT_COLUMNS, Column
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.kinds.columns import COLUMNS
from simcluster.apiserver.storage.records import ObjectRecord

_PARAMETER = re.compile(r"\s*([\w-]+)\s*=\s*([^;,\s]+)")


class ObjectView(Protocol):
    """Encodes records in one representation."""

    def one(self, record: ObjectRecord) -> bytes:
        """Encode one object, also for a watch event."""
        ...

    def many(self, records: Sequence[ObjectRecord], meta: Json) -> bytes:
        """Encode a list; `meta` is the list's metadata."""
        ...

    def bookmark(self, meta: Json) -> bytes:
        """Encode the object of a BOOKMARK event."""
        ...


EMPTY: Mapping[str, Json] = {"Pod": {"spec": {"containers": None}, "status": {}}}
"""Fields of a bookmark's object that are never omitted, by kind."""


class PlainView:
    """Complete objects; list items have no type, because the list has it."""

    def __init__(self, kind: Resource) -> None:
        self.kind = kind
        self._prefix = encode({"apiVersion": kind.api_version, "kind": kind.kind})[:-1] + b","

    def one(self, record: ObjectRecord) -> bytes:
        """Return the stored bytes if they are in this version; encode the object otherwise."""
        if record.encoded.startswith(self._prefix):
            return record.encoded
        return encode(to_version(self.kind, record.obj))

    def many(self, records: Sequence[ObjectRecord], meta: Json) -> bytes:
        """Join the encoded objects."""
        skip = len(self._prefix)
        head = {"kind": self.kind.list_kind, "apiVersion": self.kind.api_version}
        if isinstance(self.kind, CustomKind):
            items = b",".join([self.one(record) for record in records])
        else:
            items = b",".join([b"{" + self.one(record)[skip:] for record in records])
        start = encode({**head, "metadata": meta})[:-1]
        return b'%b,"items":[%b]}\n' % (start, items)

    def bookmark(self, meta: Json) -> bytes:
        """Return an empty object with the metadata."""
        kind = {"kind": self.kind.kind, "apiVersion": self.kind.api_version}
        return encode({**kind, "metadata": meta, **EMPTY.get(self.kind.kind, {})})


class MetadataView:
    """Type and metadata only: `PartialObjectMetadata`."""

    def one(self, record: ObjectRecord) -> bytes:
        """Encode the object's metadata."""
        return encode(partial_metadata(record.obj))

    def many(self, records: Sequence[ObjectRecord], meta: Json) -> bytes:
        """Encode a `PartialObjectMetadataList`."""
        return encode(
            {
                "kind": "PartialObjectMetadataList",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": meta,
                "items": [partial_metadata(record.obj) for record in records],
            }
        )

    def bookmark(self, meta: Json) -> bytes:
        """Encode the metadata as an object."""
        return encode(partial_metadata({"metadata": meta}))


@dataclass(frozen=True, slots=True)
class TableView:
    """Tables of rows and columns; `include` is the part of each object to add."""

    kind: Resource
    version: str
    include: str
    now: float

    def one(self, record: ObjectRecord) -> bytes:
        """Encode a table of one row."""
        return self.many([record], {"resourceVersion": str(record.version)})

    def many(self, records: Sequence[ObjectRecord], meta: Json) -> bytes:
        """Encode a table with a row per object."""
        columns = columns_of(self.kind)
        return encode(
            {
                "kind": "Table",
                "apiVersion": f"meta.k8s.io/{self.version}",
                "metadata": meta,
                "columnDefinitions": [
                    {
                        "name": column.name,
                        "type": column.type,
                        "format": column.format,
                        "description": "",
                        "priority": column.priority,
                    }
                    for column in columns
                ],
                "rows": [
                    {
                        "cells": [column.cell(record.obj, self.now) for column in columns],
                        "object": self._object(to_version(self.kind, record.obj)),
                    }
                    for record in records
                ],
            }
        )

    def bookmark(self, meta: Json) -> bytes:
        """Encode a table without rows."""
        return self.many([], meta)

    def _object(self, obj: Json) -> Json | None:
        if self.include == "None":
            return None
        return obj if self.include == "Object" else partial_metadata(obj)


def columns_of(kind: Resource) -> Sequence[Column]:
    """Return the printer columns of a kind, the default ones if it defines none."""
    return (
        kind.columns if isinstance(kind, CustomKind) else COLUMNS.get(kind.table, DEFAULT_COLUMNS)
    )


def partial_metadata(obj: Json) -> Json:
    """Return the object's metadata as a `PartialObjectMetadata`."""
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": obj["metadata"],
    }


def negotiate_view(kind: Resource, accept: str, include: str, now: float) -> ObjectView:
    """Return the first representation in `Accept` that is served; 406 if none is."""
    for choice in accept.split(",") if accept else ["*/*"]:
        media_type = choice.split(";", 1)[0].strip().lower()
        parameters = dict(_PARAMETER.findall(choice))
        if media_type not in {"application/json", "application/*", "*/*", "application/yaml"}:
            continue
        match parameters.get("as"), parameters.get("g"), parameters.get("v"):
            case None, _, _:
                return PlainView(kind)
            case "Table", "meta.k8s.io", "v1" | "v1beta1" as version:
                return TableView(kind, version, include or "Metadata", now)
            case (("PartialObjectMetadata" | "PartialObjectMetadataList"), "meta.k8s.io", "v1"):
                return MetadataView()
    raise ApiError(
        406,
        "NotAcceptable",
        "only the following media types are accepted: application/json, "
        "application/json;as=Table;v=v1;g=meta.k8s.io, "
        "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
    )
