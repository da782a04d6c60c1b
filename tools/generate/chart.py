"""Writes the Helm chart's templates from kustomize's output: `python -m tools.generate.chart`.

The manifests in `k8s/base`, `overlays/ha` and `components` are the source. Every pair of the
overlay and the components is built, and all of them together, so that no part may depend on two
others at once; where combinations differ, the template tests the value that stands for the part
(`highAvailability`, or the component's name). Two components exclude each other. A few scalars
become values by `tools.generate.chart_values`. The namespace becomes the release's; its object is
left out, for Helm requires the namespace before it installs anything. That of the agents is created
by the chart.
"""

import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tools.generate.chart_values import Expression, Members, Optional, with_values
from tools.generate.manifests import KUBE_SCHEDULER, WEBHOOK

K8S = Path(__file__).parents[2] / "k8s"
TEMPLATES = K8S / "chart" / "templates"
NAMESPACES = {
    SYSTEM_NAMESPACE: "{{ .Release.Namespace }}",
    AGENTS_NAMESPACE: "{{ .Values.agentsNamespace }}",
}
"""What stands for each namespace of the manifests."""
FOLDERS = ("base", "overlays/ha", "components", "persistent")
KOORDINATOR = K8S / "base" / "crds" / "koordinator-device.yaml"
WITH_KOORDINATOR = "koordinatorDevice"
HIGHLY_AVAILABLE = "highAvailability"
EXCLUSIVE = frozenset({"combinedScheduler", "keda"})
"""Parts of which at most one may be chosen: kustomize fails with both, and so does `NOTES.txt`."""

Parts = frozenset[str]
Key = tuple[str, str]


class _Absent:
    """The value for a key that a combination does not have."""


ABSENT: Final = _Absent()


@dataclass(frozen=True)
class Choice:
    """`yes` where the value is set, else `no`."""

    value: str
    yes: Any
    no: Any


def objects(text: str) -> list[Any]:
    """Parse all objects in the text with the fast C loader."""
    return [it for it in yaml.load_all(text, yaml.CSafeLoader) if it]


def part_of(component: str) -> str:
    """Return the value that enables a component: `prometheusOperator` for `prometheus-operator`."""
    head, *others = component.split("-")
    return head + "".join(word.title() for word in others)


def components() -> dict[str, str]:
    """Return each component's directory by the value that enables it."""
    return {part_of(found.name): found.name for found in sorted((K8S / "components").iterdir())}


def parts() -> tuple[str, ...]:
    """Return all values that enable a part."""
    return (HIGHLY_AVAILABLE, *components(), WITH_KOORDINATOR)


_HASHED = re.compile(r"(leasehold-settings|node-agent-settings|kube-scheduler)-[a-z0-9]{10}")
"""The names of ConfigMaps that end with a hash of their content."""


def without_hashes(text: str) -> str:
    """Return kustomize's output with the plain names of ConfigMaps."""
    names = [it["metadata"]["name"] for it in objects(text) if it["kind"] == "ConfigMap"]
    for name in filter(_HASHED.fullmatch, names):
        text = re.sub(rf"\b{name}\b", name.rpartition("-")[0], text)
    return text


def kustomized(chosen: Parts) -> Mapping[Key, Any]:
    """Return kustomize's objects for these parts, by kind and name."""
    added = added_files()
    files = [path for part, paths in added.items() if part in chosen for path in paths]
    made = [
        *agents_namespace(),
        *_built(chosen.difference(added)),
        *(it for path in files for it in objects(path.read_text())),
    ]
    return {(it["kind"], it["metadata"]["name"]): it for it in made}


@cache
def added_files() -> dict[str, list[Path]]:
    """Return the files of parts that change no other object, by the value that enables them.

    Kustomize would include them as they are, so no combination with them is built.
    """
    found = {WITH_KOORDINATOR: [KOORDINATOR]}
    for part, directory in components().items():
        folder = K8S / "components" / directory
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        if kustomization.keys() == {"apiVersion", "kind", "resources"}:
            found[part] = [folder / name for name in kustomization["resources"]]
    return found


def agents_namespace() -> list[Any]:
    """Return the Namespace of the agents, as `k8s/persistent` has it."""
    found = objects((K8S / "persistent" / "namespaces.yaml").read_text())
    return [it for it in found if it["metadata"]["name"] == AGENTS_NAMESPACE]


@cache
def _built(chosen: Parts) -> list[Any]:
    root = "overlays/ha" if HIGHLY_AVAILABLE in chosen else "base"
    wanted = [directory for part, directory in components().items() if part in chosen]
    with tempfile.TemporaryDirectory() as made:
        kustomization = {
            "resources": [os.path.relpath(K8S / path, made) for path in (root, "base/crds")],
            "components": [os.path.relpath(K8S / "components" / name, made) for name in wanted],
        }
        (Path(made) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        text = subprocess.run(
            ["kubectl", "kustomize", made], capture_output=True, text=True, check=True
        ).stdout
    return objects(without_hashes(text))


def combinations() -> list[Parts]:
    """Return the combinations of up to two parts, and all parts together that may be."""
    few = [
        frozenset(chosen) for count in range(3) for chosen in itertools.combinations(parts(), count)
    ]
    return [*(it for it in few if it != EXCLUSIVE), *all_together()]


def all_together() -> list[Parts]:
    """Return all parts but one of those that exclude each other."""
    return [frozenset(parts()) - {each} for each in sorted(EXCLUSIVE)]


def merged(made: Mapping[Parts, Any]) -> Any:
    """Merge the combinations into one tree, with a Choice where they differ."""
    trees = list(made.values())
    if all(tree == trees[0] for tree in trees):
        return trees[0]
    if all(isinstance(tree, dict) and tree for tree in trees):
        keys = list(dict.fromkeys(key for tree in trees for key in tree))
        return {
            key: merged({chosen: tree.get(key, ABSENT) for chosen, tree in made.items()})
            for key in keys
        }
    order = _order(trees)
    if order is not None:
        return [
            merged({chosen: _named(name, tree) for chosen, tree in made.items()}) for name in order
        ]
    # The parts without which there is nothing come first: what there is then differs less.
    there = {chosen: tree is not ABSENT for chosen, tree in made.items()}
    part = next(part for it in (there, made) for part in parts() if _matters(part, it))
    return Choice(
        f".Values.{part}",
        merged({chosen: tree for chosen, tree in made.items() if part in chosen}),
        merged({chosen: tree for chosen, tree in made.items() if part not in chosen}),
    )


def _order(trees: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the names in lists of named items, if one list has all of them in order."""
    if not all(isinstance(tree, list) and tree for tree in trees):
        return None
    names: list[tuple[str, ...]] = [
        tuple(it.get("name", "") if isinstance(it, dict) else "" for it in tree) for tree in trees
    ]
    most = max(names, key=len)
    in_order = all(found == tuple(name for name in most if name in found) for found in names)
    return most if "" not in most and in_order else None


def _named(name: str, things: Sequence[Any]) -> Any:
    return next((it for it in things if it["name"] == name), ABSENT)


def _matters(part: str, made: Mapping[Parts, Any]) -> bool:
    without = ((chosen, chosen - {part}) for chosen in made if part in chosen)
    return any(other in made and made[chosen] != made[other] for chosen, other in without)


def scalar(value: Any) -> str:
    """Format a value on one line, with braces escaped and the namespace of the release."""
    if isinstance(value, Expression):
        return value.text
    if not isinstance(value, str):
        return json.dumps(value)
    text = yaml.safe_dump(value, width=100_000, allow_unicode=True).removesuffix("\n...\n").strip()
    if "\n" in text or "{{" in value or any(namespace in value for namespace in NAMESPACES):
        text = json.dumps(value, ensure_ascii=False)
    text = text.replace("{{", '{{ "{{" }}')
    for namespace, expression in NAMESPACES.items():
        text = text.replace(namespace, expression)
    return text


def lines(tree: Any, depth: int = 0) -> Iterator[str]:
    """Yield the lines of the template of a map or a list."""
    pad = "  " * depth
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _entry(key, value, depth)
        return
    for item in tree:
        if isinstance(item, Choice):
            yield from chosen_between(item, lambda branch: lines([branch], depth), pad)
        elif isinstance(item, dict | list) and item:
            first, *others = lines(_sure_first(item), depth + 1)
            yield f"{pad}- {first.lstrip()}"
            yield from others
        else:
            yield f"{pad}- {scalar(item)}"


def _sure_first(item: Any) -> Any:
    """Return the map with an unconditional key first, since the dash precedes it."""
    if not isinstance(item, dict):
        return item
    sure = next(key for key, it in item.items() if not isinstance(it, Choice | Optional | Members))
    return {sure: item[sure]} | item


def _entry(key: str, value: Any, depth: int) -> Iterator[str]:
    pad = "  " * depth
    match value:
        case Choice():
            yield from chosen_between(value, lambda branch: _entry(key, branch, depth), pad)
        case Optional(path=path, text=text):
            yield from (f"{pad}{{{{- if {path} }}}}", f"{pad}{key}: {text}", f"{pad}{{{{- end }}}}")
        case Members(path=path):
            yield f"{pad}{{{{- range $name, $value := {path} }}}}"
            yield f"{pad}{{{{ $name }}}}: {{{{ $value | quote }}}}"
            yield f"{pad}{{{{- end }}}}"
        case dict() | list() if value:
            yield f"{pad}{scalar(key)}:"
            yield from lines(value, depth + 1)
        case _:
            yield f"{pad}{scalar(key)}: {scalar(value)}"


def chosen_between(
    choice: Choice, drawn: Callable[[Any], Iterator[str]], pad: str = ""
) -> Iterator[str]:
    """Yield the lines of both branches of a condition, or of the only one."""
    yes, no = choice.yes, choice.no
    yield f"{pad}{{{{- if {'not ' if yes is ABSENT else ''}{choice.value} }}}}"
    if yes is not ABSENT:
        yield from drawn(yes)
    if ABSENT not in (yes, no):
        yield f"{pad}{{{{- else }}}}"
    if no is not ABSENT:
        yield from drawn(no)
    yield f"{pad}{{{{- end }}}}"


def document(tree: Any) -> Iterator[str]:
    """Return one object as a YAML document with its separator."""
    if isinstance(tree, Choice):
        yield from chosen_between(tree, document)
    else:
        yield "---"
        yield from lines(tree)


@cache
def sources() -> dict[Key, Path]:
    """Return the file that defines each object: that of the base before an overlay's patch."""
    found: dict[Key, Path] = {
        ("ConfigMap", "leasehold-settings"): K8S / "base" / "settings.env",
        ("ConfigMap", "node-agent-settings"): K8S / "base" / "agent-settings.env",
        ("ConfigMap", "kube-scheduler"): KUBE_SCHEDULER,
    }
    for folder in (*(K8S / name for name in FOLDERS), WEBHOOK):
        for path in sorted(folder.rglob("*.yaml")):
            for it in objects(path.read_text()):
                if "name" in it.get("metadata", {}):
                    found.setdefault((it["kind"], it["metadata"]["name"]), path)
    return found


def generated() -> dict[Path, str]:
    """Return the chart's templates by file name."""
    made = {
        chosen: {key: with_values(it) for key, it in kustomized(chosen).items()}
        for chosen in combinations()
    }
    keys = list(dict.fromkeys(key for found in made.values() for key in found))
    written: dict[Path, list[str]] = {}
    for key in sorted(keys, key=lambda key: str(sources()[key])):
        tree = merged({chosen: found.get(key, ABSENT) for chosen, found in made.items()})
        written.setdefault(sources()[key], []).extend(document(tree))
    return {
        TEMPLATES
        / path.with_suffix(
            ".yaml"
        ).name: f"# Generated from {path.relative_to(K8S.parent)}: python -m tools.generate\n"
        + re.sub(r"[ ]+\n", "\n", "\n".join(found))
        + "\n"
        for path, found in written.items()
    }
