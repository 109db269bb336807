"""Imports point down only, and nobody reaches for a module from inside a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "lmcache"

# The layer of every module; a module may import from its own layer or below. The first prefix that
# fits decides.
LAYERS = [
    ("lmcache.logging", 0),
    ("lmcache.v1.clock", 0),
    ("lmcache.v1.errors", 0),
    ("lmcache.v1.stats", 0),
    ("lmcache.v1.gauges", 0),
    ("lmcache.v1.memory_format", 0),
    ("lmcache.v1.native", 0),
    ("lmcache.v1.dtype_names", 0),
    ("lmcache.v1.cache_key", 0),
    ("lmcache.observability", 1),
    ("lmcache.v1.config", 1),
    ("lmcache.v1.host_limits", 1),
    ("lmcache.v1.metadata", 1),
    ("lmcache.v1.event_loop", 1),
    ("lmcache.v1.event_manager", 1),
    ("lmcache.v1.kv_events", 1),
    ("lmcache.v1.disk_cache_metadata", 1),
    ("lmcache.utils", 2),
    ("lmcache.v1.device", 2),
    ("lmcache.v1.memory", 3),
    ("lmcache.v1.address_manager", 3),
    ("lmcache.v1.host_copy", 3),
    ("lmcache.v1.pin_", 3),
    ("lmcache.v1.token", 3),
    ("lmcache.v1.cbor", 3),
    ("lmcache.v1.chunk_hash", 3),
    ("lmcache.v1.storage_backend", 4),
    ("lmcache.v1.engine", 5),
    ("lmcache.v1.cache_engine", 5),
    ("lmcache.v1.rpc_utils", 1),
    ("lmcache.v1.lookup_client", 5),
    ("lmcache.v1.gpu_connector", 4),
]
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    if module in ("lmcache", "lmcache.v1"):
        return 0
    for prefix, layer in LAYERS:
        if module.startswith(prefix):
            return layer
    raise AssertionError(f"{module} has no layer; add it to LAYERS")


def is_typing_only(tree: ast.AST, node: ast.AST) -> bool:
    return any(
        isinstance(parent, ast.If)
        and ast.unparse(parent.test) == "TYPE_CHECKING"
        and any(node is child for child in ast.walk(parent))
        for parent in ast.walk(tree)
    )


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_module_imports_point_down(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own_layer = layer_of(module_name(path))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("lmcache") and name != "lmcache._native":
                if is_typing_only(tree, node):
                    continue
                assert layer_of(name) <= own_layer, f"{module_name(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_import_hides_in_a_function(path: Path) -> None:
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            hidden = [n for n in ast.walk(function) if isinstance(n, (ast.Import, ast.ImportFrom))]
            assert not hidden, f"{function.name} imports {ast.unparse(hidden[0])}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_attribute_probing(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("getattr", "hasattr"), f"line {node.lineno}"


def test_native_module_has_one_importer() -> None:
    importers = [p for p in FILES if "lmcache._native" in p.read_text()]
    assert [module_name(p) for p in importers] == ["lmcache.v1.native"]


def test_prometheus_client_has_one_importer() -> None:
    importers = [p for p in FILES if "import prometheus_client" in p.read_text()]
    importers += [p for p in FILES if "from prometheus_client" in p.read_text()]
    assert [module_name(p) for p in importers] == ["lmcache.observability"]
