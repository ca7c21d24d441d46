"""Freezes what the house rules fix: import direction, sizes, what may import torch, exported names."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "packhorse"
MAX_CODE_LINES = 25_000
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80

# A package may import those named here, and itself.
ALLOWED = {
    "core": set(),
    "facts": {"core"},
    "plan": {"core", "facts"},
    "quant": {"core", "facts"},
    "kernels": {"core", "facts", "quant"},
    "layers": {"core", "facts", "quant", "kernels"},
    "models": {"core", "facts", "quant", "kernels", "layers"},
    "store": {"core", "facts", "quant", "kernels"},
    "text": {"core", "facts"},
    "hub": {"core", "facts"},
}
BELOW_ENGINE = {"core", "facts", "plan", "quant", "kernels", "layers", "models", "store", "text", "hub"}
ALLOWED["engine"] = BELOW_ENGINE
for top in ("server", "verify", "bench"):
    ALLOWED[top] = BELOW_ENGINE | {"engine"}
ALLOWED["cli"] = BELOW_ENGINE | {"engine", "server", "verify", "bench"}

NO_TORCH = ("core", "facts", "plan")
PURE = (
    "engine/schedule.py", "store/durable.py", "store/evict.py", "store/prefix.py", "store/records.py",
    "store/documents.py", "store/export.py", "store/files.py", "store/index.py", "store/snapshots.py",
)  # fmt: skip
# A bare GPU host has none of these: packages that run there must not need them.
BARE = ("core", "facts", "plan", "quant", "kernels", "layers", "models", "store", "engine", "bench")
NOT_ON_BARE_HOSTS = {"pydantic", "fastapi", "uvicorn", "openai", "gguf", "pypdf"}


FROZEN = BELOW_ENGINE | {"engine"}
PUBLIC_NAMES = Path(__file__).with_name("public_names.json")


def files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, which nobody changes."""
    return ast.parse(path.read_text())


def package_of(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else ""


def imports_of(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


class _WithoutTypes(ast.NodeTransformer):
    """Leaves out what stands under `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def runtime_imports(text: str) -> list[str]:
    """All imports that can run, those inside functions and classes too."""
    return imports_of(_WithoutTypes().visit(ast.parse(text)))


def public_names(path: Path) -> list[str]:
    """Functions, classes and UPPER constants at the top level of a module, those in `if` and `try` too."""
    names = set()
    todo: list[ast.AST] = list(parsed(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            names |= {name for name in found if name.isupper()}
        else:
            todo += ast.iter_child_nodes(node)
    return sorted(name for name in names if not name.startswith("_"))


def public_surface() -> dict[str, list[str]]:
    """Public names by module of the packages whose names are frozen."""
    return {
        str(path.relative_to(SRC).with_suffix("")): public_names(path)
        for path in files()
        if package_of(path) in FROZEN and path.name != "__init__.py"
    }


def test_packages_import_only_what_stands_before_them():
    wrong = []
    for path in files():
        package = package_of(path)
        if not package:
            continue
        for name in imports_of(parsed(path)):
            parts = name.split(".")
            if parts[0] == "packhorse" and len(parts) > 1:
                other = parts[1]
                if other != package and other in ALLOWED and other not in ALLOWED[package]:
                    wrong.append(f"{path.relative_to(SRC)} imports {other}")
    assert not wrong


def test_every_package_is_known():
    found = {p.name for p in SRC.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert found == set(ALLOWED)


def test_no_torch_where_it_must_not_be():
    wrong = []
    for path in files():
        relative = str(path.relative_to(SRC))
        barred = package_of(path) in NO_TORCH or relative in PURE or path.name == "__init__.py"
        names = runtime_imports(path.read_text()) if barred else []
        wrong += [f"{relative} imports {n}" for n in names if n.split(".")[0] in ("torch", "transformers")]
    assert not wrong


def test_imports_inside_functions_count():
    text = (
        "if TYPE_CHECKING:\n    from torch import Tensor\n"
        "class A:\n    def f(self):\n        import torch.nn\n"
        "try:\n    from transformers import x\nexcept ImportError:\n    pass\n"
    )
    assert sorted(runtime_imports(text)) == ["torch.nn", "transformers.x"]


def test_bare_hosts_can_run_what_they_must():
    wrong = []
    for path in files():
        if package_of(path) in BARE:
            for name in imports_of(parsed(path)):
                if name.split(".")[0] in NOT_ON_BARE_HOSTS:
                    wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert not wrong


def code_lines(path: Path) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    text = path.read_text()
    prose = {
        line
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        1
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in prose and line.strip() and not line.lstrip().startswith("#")
    )


def test_sizes():
    lengths = {path: code_lines(path) for path in files()}
    assert sum(lengths.values()) <= MAX_CODE_LINES
    assert not {str(p): n for p, n in lengths.items() if n > MAX_FILE_LINES}
    long = []
    for path in files():
        if package_of(path) == "kernels":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(SRC)}:{node.name} has {length} lines")
    assert not long


def test_public_things_say_what_they_are():
    """Modules, and public classes and functions at their top level, have docstrings."""
    silent = []
    for path in files():
        tree = parsed(path)
        relative = path.relative_to(SRC)
        if ast.get_docstring(tree) is None:
            silent.append(str(relative))
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and ast.get_docstring(node) is None:
                silent.append(f"{relative}:{node.name}")
    assert not silent


def test_importing_a_package_imports_no_torch():
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(f'packhorse.{name}')\n"
    )
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code, *sorted(ALLOWED)], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_package_exports():
    import packhorse

    assert sorted(packhorse.__all__) == ["__version__"]


def test_public_names():
    frozen, found = json.loads(PUBLIC_NAMES.read_text()), public_surface()
    changed = {
        module: {
            "new": sorted(set(found.get(module, [])) - set(frozen.get(module, []))),
            "gone": sorted(set(frozen.get(module, [])) - set(found.get(module, []))),
        }
        for module in frozen.keys() | found.keys()
        if frozen.get(module) != found.get(module)
    }
    assert not changed, "if this is meant: .venv/bin/python tests/cpu/test_structure.py --write"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {sys.argv[0]} --write   (writes {PUBLIC_NAMES.name} from the source)")
    PUBLIC_NAMES.write_text(json.dumps(public_surface(), indent=1) + "\n")
