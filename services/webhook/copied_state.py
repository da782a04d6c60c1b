"""What a new pod that is a copy of a placed one brings with it, and what is removed; pure."""

import difflib
from dataclasses import dataclass, replace
from typing import Self

from msgspec import structs

from services.webhook.patches import ANNOTATIONS, PatchOperation, remove
from shared.dialects.reserved import (
    AUTHOR_ANNOTATIONS,
    COMPLETED_ANNOTATIONS,
    STRIPPED_ANNOTATIONS,
    is_of_leasehold,
)
from shared.pods.pod_view import PodView

MAX_SHOWN = 10
"""Annotations that warnings name."""


@dataclass(frozen=True, slots=True)
class CopiedState:
    """What a new pod has of an earlier one that was placed, of which it is a copy."""

    annotations: tuple[str, ...]
    """Those that only schedulers write."""
    node: str
    """The node of the earlier pod, if the new one is placed, too."""

    @classmethod
    def of(cls, pod: PodView, *, is_placed: bool) -> Self:
        """Find it in a new pod, which gets GPUs on the node where it is placed if `is_placed`.

        A backup, or what `kubectl get pod -o yaml` has shown, has all of it.
        """
        keys = sorted(
            key
            for key in pod.annotations
            if key.startswith(STRIPPED_ANNOTATIONS) or is_of_leasehold(key)
        )
        is_copy = bool(keys) or pod.has_run
        return cls(tuple(keys), pod.spec.node_name if is_copy and is_placed else "")

    def misspelled(self) -> str:
        """Return why the pod is denied: one was meant to be an author's; empty: none was."""
        for key in filter(is_of_leasehold, self.annotations):
            meant = difflib.get_close_matches(key, AUTHOR_ANNOTATIONS, n=1, cutoff=0.8)
            if meant:
                return f"annotation {key} is unknown to Leasehold: did you mean {meant[0]}?"
        return ""

    def removed(self, pod: PodView) -> PodView:
        """Return the pod without it, and without what the webhook replaces."""
        gone = {*self.annotations, *COMPLETED_ANNOTATIONS}
        kept = {key: value for key, value in pod.annotations.items() if key not in gone}
        spec = structs.replace(pod.spec, node_name="") if self.node else pod.spec
        return replace(pod, annotations=kept, spec=spec)

    def patches(self, pod: PodView) -> list[PatchOperation]:
        """Return the patches that remove it."""
        replaced = (key for key in COMPLETED_ANNOTATIONS if key in pod.annotations)
        patches = [remove(ANNOTATIONS, key) for key in (*self.annotations, *replaced)]
        return [*patches, remove("/spec", "nodeName")] if self.node else patches

    def warnings(self) -> list[str]:
        """Return the first warnings."""
        texts = [
            f"annotation {key} was removed: only "
            f"{'Leasehold' if is_of_leasehold(key) else 'schedulers'} may write it"
            for key in self.annotations[:MAX_SHOWN]
        ]
        if self.node:
            texts.append(
                f"nodeName {self.node} was removed, as the pod is a copy of one that was placed: "
                "it gets GPUs of its own, possibly on another node"
            )
        return texts
