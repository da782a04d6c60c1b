"""Rules for code: purity by mark, sizes of files, functions and folders."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "; pure."
FOLDER_LIMIT = 20
FILE_LINES = 600
FUNCTION_LINES = 60
IO = {
    *("aiohttp", "argparse", "asyncio", "cel", "fcntl", "grpc", "http", "importlib", "logging"),
    *("mmap", "nats", "opentelemetry", "os", "pathlib", "prometheus_client", "pynvml", "random"),
    *("redis", "secrets", "select", "shutil", "signal", "socket", "sqlite3", "ssl"),
    *("subprocess", "sys", "tempfile", "threading", "time", "urllib.request", "uvloop"),
}
"""Modules through which a module reaches a clock, chance, the system or the network."""
PURE = {"pathlib.PurePath", "pathlib.PurePosixPath", "sys.intern"}
"""What such modules have that reaches nothing."""
CALLS = frozenset({"input", "open", "print"})
ASYNC = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def production() -> list[Path]:
    folders = ("services", "shared", "simcluster")
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "tests" not in path.parts[len(ROOT.parts) :] and "_pb2" not in path.name
    )


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    return named(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


@cache
def imported(path: Path) -> set[str]:
    """Names of modules that a file imports; of `from a import b` both `a` and `a.b`."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= PURE else {node.module, *names}
    return found


def reaches_out(path: Path) -> str:
    """Why a file by itself is not pure; empty: nothing."""
    for name in imported(path):
        if name not in PURE and (name.split(".")[0] in IO or name in IO):
            return f"imports {name}"
    for node in nodes(path):
        if isinstance(node, ASYNC):
            return f"waits at line {node.lineno}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CALLS:
            return f"does I/O at line {node.lineno}"
    return ""


@cache
def impure() -> dict[str, str]:
    """Modules that are not pure, and why: of themselves, or by a module they import."""
    paths = {module_of(path): path for path in production()}
    found = {name: why for name, path in paths.items() if (why := reaches_out(path))}
    while True:
        more = {
            name: f"imports {reached[0]}"
            for name, path in paths.items()
            if name not in found and (reached := sorted(imported(path) & found.keys()))
        }
        if not more:
            return found
        found |= more


def is_marked(path: Path) -> bool:
    text = ast.get_docstring(tree(path)) or ""
    return text.partition("\n")[0].endswith(MARK)


def modules() -> list[Path]:
    return [path for path in production() if path.name != "__init__.py"]


def test_pure_modules_are_marked_and_no_others() -> None:
    marked = {module_of(path) for path in modules() if is_marked(path)}
    others = {module_of(path) for path in modules()} - marked

    assert {name: why for name, why in impure().items() if name in marked} == {}
    assert others - impure().keys() == set()


def test_every_folder_has_a_docstring_and_at_most_20_files() -> None:
    folders = Counter(path.parent for path in modules())

    assert {named(at): count for at, count in folders.items() if count > FOLDER_LIMIT} == {}
    assert [named(at) for at in folders if not ast.get_docstring(tree(at / "__init__.py"))] == []


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in production():
        for node in nodes(path):
            if isinstance(node, FUNCTIONS):
                yield f"{named(path)}:{node.lineno} {node.name}", node


def test_functions_and_files_are_short_those_of_tests_included() -> None:
    folders = (ROOT / "tests", ROOT / "simcluster" / "tests", ROOT / "tools")
    files = (*modules(), *(path for folder in folders for path in folder.rglob("*.py")))
    lines = {named(path): path.read_text().count("\n") for path in files}
    spans = {name: (node.end_lineno or 0) - node.lineno for name, node in functions()}

    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}
    assert {name: count for name, count in spans.items() if count >= FUNCTION_LINES} == {}


def test_services_and_shared_never_import_the_simulated_cluster() -> None:
    found = [
        named(path)
        for path in production()
        if not named(path).startswith("simcluster/")
        and any(name.split(".")[0] == "simcluster" for name in imported(path))
    ]

    assert found == []


KUBERNETES_FIELDS = frozenset(
    {
        *("metadata", "spec", "init_containers", "container_statuses", "env_from", "node_name"),
        *("owner_references", "creation_timestamp", "deletion_timestamp", "match_labels"),
        *("allocatable", "conditions", "ca_bundle"),
    }
)
"""Fields of Kubernetes' objects that our own events and rows do not have."""
BODIES = {
    "services/api/aggregated/objects.py",
    "services/extender/scheduler_api.py",
    "services/webhook/admission_review.py",
}
"""What Kubernetes sends to our servers and gets of them; its objects are decoded elsewhere."""


def test_only_one_folder_decodes_kubernetes_objects() -> None:
    """A pod that is decoded in two places is decoded in two ways."""
    decoders = {
        f"{named(path)}: {node.name}"
        for path in production()
        if not named(path).startswith(("shared/kubernetes/", "simcluster/"))
        and named(path) not in BODIES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("Struct") for base in node.bases)
        and KUBERNETES_FIELDS
        & {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
    }

    assert decoders == set()


WATCHED_ELSEWHERE = {
    "simcluster/controller_manager/waits.py": "waits that are compared, then cancelled",
    "simcluster/kubelet/pods/pod_manager.py": "waits that are compared, then cancelled",
    "simcluster/kubelet/programs/processes.py": "each belongs to a container, whose end awaits it",
    "services/claims/claim_combinations.py": "each caller awaits the read that it shares",
    "services/node_agent/diagnosis/node_probes.py": "each probe awaits the one discovery",
    "shared/runtime/listener.py": "a handshake that fails ends its own connection, and no other",
}
"""Where a task is made in a function that does not await it."""
TASKS = {"create_task", "ensure_future", "run_in_executor"}


def bare_tasks(path: Path) -> Iterator[str]:
    """Yield the tasks that belong to no task group, and that their function does not await.

    To `end` a task is no wait for it: it may have ended long before.
    """
    if not any(name in path.read_text() for name in TASKS):
        return
    for function in nodes(path):
        if not isinstance(function, FUNCTIONS):
            continue
        awaited = {
            ast.unparse(part)
            for wait in ast.walk(function)
            if isinstance(wait, ast.Await) and not ast.unparse(wait.value).startswith("end(")
            for part in ast.walk(wait)
        }
        names = {
            ast.unparse(node.value): [ast.unparse(each) for each in node.targets]
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of = ast.unparse(node.func.value)
            if node.func.attr not in TASKS or not (of == "asyncio" or "loop" in of):
                continue
            text = ast.unparse(node)
            if not awaited & {text, *names.get(text, [])}:
                yield f"{named(path)}:{node.lineno} {text}"


def test_no_task_ends_unnoticed() -> None:
    """An error that ends a task reaches only what waits for it: a task group, or an `await`."""
    found = {
        text
        for path in production()
        if named(path) not in WATCHED_ELSEWHERE
        for text in bare_tasks(path)
    }

    assert found == set()
    assert all(any(bare_tasks(ROOT / path)) for path in WATCHED_ELSEWHERE)
