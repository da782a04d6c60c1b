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
KUBELET = ROOT / "simcluster" / "kubelet"
CONTAINER_RUNTIME = {
    KUBELET / "programs" / "gpu_programs.py",
    KUBELET / "containers" / "runtime_devices.py",
    ROOT / "simcluster" / "gpu_driver" / "mps_control.py",
    ROOT / "simcluster" / "gpu_driver" / "mps_daemon.py",
    ROOT / "simcluster" / "gpu_driver" / "mps_service.py",
}
"""They play NVIDIA's container runtime, the loader and the control daemon of MPS, which read the
variables of a container."""
MODULES = sorted(
    path
    for package in ("services", "simcluster")
    for path in (ROOT / package).rglob("*.py")
    if path not in CONTAINER_RUNTIME and not path.is_relative_to(ROOT / "simcluster" / "tests")
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


def test_services_contain_no_name_of_a_vendor() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{one.lineno} {one.value!r}"
        for path in MODULES
        for one in code_values(ast.parse(path.read_text()))
        if NAMES.search(str(one.value))
    }

    assert not found, "move these to shared/dialects"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('KEY = "volcano.sh/vgpu-number"', True),
        ('f(limits["nvidia.com/gpu"])', True),
        ('labels = {"podname": "x", "hami_gpu_shared_count": 1}', True),
        ('text = f"{prefix}koordinator.sh/gpu"', True),
        ('memory: str = setting("tencent.com/vcuda-memory", "which resource")', True),
        ('"""Reads volcano.sh/vgpu-number."""', False),
        ('strategy: str = setting("auto", "how nvidia.com/gpu is served")', False),
    ],
)
def test_a_vendors_name_is_found_in_code_only(source: str, is_found: bool) -> None:
    values = code_values(ast.parse(source))

    assert any(NAMES.search(str(one.value)) for one in values) == is_found
