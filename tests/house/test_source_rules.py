"""Rules of the code base that a walk over the syntax tree can hold."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "jaxrl"
SOURCES = sorted(PACKAGE.rglob("*.py"))

DEVICE_CALLS = {
    "jax.devices",
    "jax.local_devices",
    "jax.device_count",
    "jax.local_device_count",
    "jax.process_index",
    "jax.process_count",
    "jax.default_backend",
    "jax.device_put",
    "jax.distributed.initialize",
    "jax.make_mesh",
    "jax.random.key",
    "jax.random.PRNGKey",
}
HARMLESS = {"jax.numpy.dtype"}
"""Calls of jax.numpy that make no array."""

BLOCKING_CALLS = {
    "time.sleep",
    "open",
    "input",
    "subprocess.run",
    "subprocess.check_output",
    "subprocess.check_call",
    "os.system",
    "os.fsync",
    "jax.device_get",
    "jax.block_until_ready",
    "socket.create_connection",
    "urllib.request.urlopen",
    "requests.get",
    "requests.post",
}
BLOCKING_METHODS = {
    "block_until_ready",
    "read_text",
    "write_text",
    "read_bytes",
    "write_bytes",
    "run_until_complete",
    "open",
}
"""Method names that block whatever object they are called on."""


def _dotted(node: ast.AST, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """`a.b.c` of a name or attribute expression, "" for anything else.

    `names` gives what imports call something else: {"jnp": "jax.numpy", "sleep": "time.sleep"}.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        left = _dotted(node.value, names)
        return f"{left}.{node.attr}" if left else ""
    return ""


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it stands for, of every import of the module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _device_work(tree: ast.Module) -> list[tuple[int, str]]:
    """Calls at import that reach for devices or make arrays."""
    return [
        (line, name)
        for line, name in _calls_at_import(tree)
        if name in DEVICE_CALLS or (name.startswith("jax.numpy.") and name not in HARMLESS)
    ]


def _calls_at_import(tree: ast.Module) -> list[tuple[int, str]]:
    """Calls that run when the module is imported: everything outside function bodies."""
    found: list[tuple[int, str]] = []
    names = _imported_names(tree)

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            # Decorators and defaults do run at import; the body does not.
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            for child in [*getattr(node, "decorator_list", []), *defaults]:
                if child is not None:
                    visit(child)
            return
        if isinstance(node, ast.Call):
            found.append((node.lineno, _dotted(node.func, names)))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def _blocking_in_async(tree: ast.Module) -> list[tuple[int, str]]:
    """Blocking calls in the body of a coroutine, less those inside nested plain functions."""
    found: list[tuple[int, str]] = []
    names = _imported_names(tree)

    def visit(node: ast.AST, awaited: bool = False) -> None:
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.With):
            held = [_dotted(item.context_expr) for item in node.items]
            found.extend((node.lineno, f"with {name}") for name in held if "lock" in name)
        if isinstance(node, ast.Call) and not awaited:
            name = _dotted(node.func, names)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            # A lock or a thread that is waited for without a bound stops every other coroutine.
            named = {"result": "fut", "get": "queue"}.get(method)  # asyncio tasks do not wait
            waits = method in {"acquire", "join"} or (named is not None and named in name)
            unbounded = waits and not node.args + node.keywords
            if name in BLOCKING_CALLS or method in BLOCKING_METHODS or unbounded:
                found.append((node.lineno, name or method))
        for child in ast.iter_child_nodes(node):
            visit(child, awaited=isinstance(node, ast.Await))

    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef):
            for statement in node.body:
                visit(statement)
    return found


def _prints(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _dotted(node.func) == "print"
    ]


def _wildcards(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


by_name = pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))


@by_name
def test_source_has_no_print(path):
    assert _prints(_parse(path)) == []


@by_name
def test_source_has_no_wildcard_import(path):
    assert _wildcards(_parse(path)) == []


@by_name
def test_source_does_no_device_work_at_import(path):
    assert _device_work(_parse(path)) == []


@by_name
def test_source_does_not_block_in_coroutines(path):
    assert _blocking_in_async(_parse(path)) == []


@by_name
def test_source_file_is_short_and_documented(path):
    text = path.read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 450
    assert path.name == "__init__.py" or ast.get_docstring(ast.parse(text))


def test_guards_bad_source_is_found():
    bad = ast.parse(
        "import jax, time\n"
        "from os import *\n"
        "DEVICES = jax.devices()\n"
        "async def f(lock, loop):\n"
        "    print(1)\n"
        "    time.sleep(1)\n"
        "    lock.acquire()\n"
        "    await lock.acquire()\n"
        "from time import sleep as rest\n"
        "from jax import devices\n"
        "import jax.numpy as jnp\n"
        "def g(*, x=jnp.ones(3), dtype=jnp.dtype('int32')):\n"
        "    return devices()\n"
        "MORE = devices()\n"
        "async def h(path, lock, queue, fut):\n"
        "    rest(1)\n"
        "    with lock:\n"
        "        path.open()\n"
        "    queue.get()\n"
        "    fut.result()\n"
        "    await queue.get()\n"
    )

    assert _prints(bad) == [5]
    assert _wildcards(bad) == [2]
    assert _device_work(bad) == [
        (3, "jax.devices"),
        (12, "jax.numpy.ones"),
        (14, "jax.devices"),
    ]
    assert [line for line, _ in _blocking_in_async(bad)] == [6, 7, 16, 17, 18, 19, 20]
