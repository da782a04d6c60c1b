"""Selectors of nodes as Kubernetes writes them, as requirements of placement; pure."""

from shared.kubernetes.types import LabelSelector, NodeSelector, NodeSelectorTerm
from shared.model.requests.request import NodeTerm

NO_NODE: tuple[tuple[NodeTerm, ...], ...] = ((),)
"""A term without requirements matches no node."""


def node_terms(term: NodeSelectorTerm) -> tuple[NodeTerm, ...]:
    return tuple(
        NodeTerm(
            key=requirement.key,
            operator=requirement.operator,
            values=requirement.values,
            field=field,
        )
        for requirements, field in ((term.match_expressions, False), (term.match_fields, True))
        for requirement in requirements
    )


def selected_nodes(selector: NodeSelector) -> tuple[tuple[NodeTerm, ...], ...]:
    """A selector whose terms are all empty matches no node."""
    terms = tuple(node_terms(term) for term in selector.node_selector_terms)
    return tuple(term for term in terms if term) or NO_NODE


def labelled_nodes(selector: LabelSelector) -> tuple[NodeTerm, ...]:
    """A selector without requirements matches all nodes."""
    equal = (
        NodeTerm(key=key, operator="In", values=(value,))
        for key, value in sorted(selector.match_labels.items())
    )
    others = (
        NodeTerm(key=requirement.key, operator=requirement.operator, values=requirement.values)
        for requirement in selector.match_expressions
    )
    return (*equal, *others)
