"""Files of objects of our own kinds, as YAML."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shared.kubernetes.kinds.custom_kinds import by_namespace
from shared.kubernetes.strict_yaml import load_documents
from shared.model.errors import RequestError
from shared.model.names import Namespace

T = TypeVar("T")


def load_objects(
    path: Path, kind: str, parse_spec: Callable[[Namespace, object], T]
) -> dict[Namespace, T]:
    """Raises RequestError with the file and its error."""
    try:
        return by_namespace(load_documents(path.read_text("utf-8")), kind, parse_spec)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; set a file of {kind} objects") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    except ValueError as error:
        raise RequestError(f"{path} is not valid YAML: {error}") from error
