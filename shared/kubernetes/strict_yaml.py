"""YAML whose mappings have each key once; pure."""

from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    """A key that a merge key `<<` adds is overridden."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def load_document(text: str) -> Any:
    """Return None for an empty text. Raises ValueError for several documents."""
    documents = load_documents(text)
    if len(documents) > 1:
        raise ValueError(f"there are {len(documents)} documents; write one")
    return documents[0] if documents else None


def load_documents(text: str) -> list[Any]:
    r"""Leave out empty documents. Raises ValueError for invalid ones.

    >>> load_documents("a: 1\n---\nb: 2")
    [{'a': 1}, {'b': 2}]
    """
    try:
        documents = yaml.load_all(text, Loader=_UniqueKeys)
        return [document for document in documents if document is not None]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(" ".join(str(error).split()) or "a value is invalid") from error
