"""No service knows a vendor's resource, annotation, label, metric or variable by name.

These names, and the rules that go with them, are in `shared/dialects` only. Docstrings and comments
may name them, and so may texts for people: help of flags, and examples of commands and pods.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTAINER_RUNTIME = ROOT / "simcluster" / "kubelet" / "programs" / "gpu_programs.py"
"""Plays NVIDIA's container runtime and the loader, which read the variables of a container."""
MODULES = sorted(
    path
    for package in ("services", "simcluster")
    for path in (ROOT / package).rglob("*.py")
    if path != CONTAINER_RUNTIME and not path.is_relative_to(ROOT / "simcluster" / "tests")
)
NAMES = re.compile(
    r"""
    (?: nvidia\.com | volcano\.sh | koordinator\.sh | tencent\.com | hami\.io | huawei\.com
      | k8s\.io/pod-group | pod-group\.scheduling | kubernetes\.io/gpu )   # domains
    | v(?:cuda|gpu|GPU)[-_A-Z]\w | /vgpu\b | \bvGPU\b                     # parts of names
    | \b(?:hami_|volcano_|GPUDevice|nodeGPU|Host(?:GPU|Core)|Device_)\w+   # metrics
    | \b(?:CUDA_|NVIDIA_VISIBLE|GPU_CORE_)\w+                              # variables
    | (?:hami|koord|volcano)-(?:scheduler|system)                          # schedulers
    """,
    re.VERBOSE,
)
TEXTS_FOR_PEOPLE = {"ABOUT", "EXAMPLES", "EXAMPLE"}
"""Module constants that are shown as they are."""


def code_values(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings of a module that are neither docstrings nor help texts."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Assign(targets=[ast.Name(id=name)]) if name in TEXTS_FOR_PEOPLE:
                continue
            case ast.keyword(arg="help" | "about" | "examples"):
                continue
            case ast.Call(func=ast.Name(id="setting" | "argument"), args=[default, *_]):
                yield from code_values(ast.Expression(default))
            case ast.Constant(value=str()):
                yield node
            case _:
                yield from code_values(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_service_contains_no_name_of_a_vendor(path: Path) -> None:
    values = code_values(ast.parse(path.read_text()))

    found = {f"line {one.lineno}: {one.value!r}" for one in values if NAMES.search(str(one.value))}

    assert not found, "move these to shared/dialects"


@pytest.mark.parametrize(
    "source",
    [
        'KEY = "volcano.sh/vgpu-number"',
        'f(limits["nvidia.com/gpu"])',
        'labels = {"podname": "x", "hami_gpu_shared_count": 1}',
        'text = f"{prefix}koordinator.sh/gpu"',
        'memory: str = setting("tencent.com/vcuda-memory", "which resource")',
    ],
)
def test_a_vendors_name_in_code_is_found(source: str) -> None:
    assert any(NAMES.search(str(one.value)) for one in code_values(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        '"""Reads volcano.sh/vgpu-number."""',
        "x = 1  # nvidia.com/gpu",
        'strategy: str = setting("auto", "how nvidia.com/gpu is served")',
        'add("--conf", help="for volcano.sh/gpu-memory")',
        'EXAMPLES = ("kubectl get nodes -l nvidia.com/gpu",)',
    ],
)
def test_a_vendors_name_in_a_docstring_or_help_text_is_allowed(source: str) -> None:
    assert not [one for one in code_values(ast.parse(source)) if NAMES.search(str(one.value))]
