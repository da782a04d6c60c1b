"""Files of Kubernetes objects, as YAML."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from shared.kubernetes.strict_yaml import load_documents
from shared.model.errors import RequestError

T = TypeVar("T")


def load_objects(path: Path, kind: str, parse: Callable[[Iterable[object]], T]) -> T:
    """Parse a file's objects of one kind. Raises RequestError with the file and its error."""
    try:
        return parse(load_documents(path.read_text("utf-8")))
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; set a file of {kind} objects") from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    except ValueError as error:
        raise RequestError(f"{path} is not valid YAML: {error}") from error
