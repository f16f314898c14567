"""The import arrows: ivy, tulip and rose never import one another; torch lives in rose; the gateway starts without it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hortus"
SHARED = {
    "types",
    "errors",
    "config",
    "metrics",
    "folder",
    "hub",
    "traces",
    "late",
    "native",
    "deadlines",
    "cores",
    "stopping",
}
WIRE = {"protocol"}  # what ivy and tulip say to each other; rose says nothing there
PARTS = {"ivy", "tulip", "rose"}


def imports(path: Path) -> set[str]:
    """Every module named in an import anywhere in the file, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(f.relative_to(ROOT)) for f in FILES])
def test_arrows(path: Path):
    part = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        top = name.split(".")
        if top[0] == "torch":
            assert part in ("rose", "bench"), f"{path} imports {name}: torch lives in rose"
        if top[0] != "hortus" or len(top) < 2:
            continue
        if part in PARTS:
            wire = WIRE if part in ("ivy", "tulip") else set()
            assert top[1] in SHARED | wire | {part, "__version__"}, f"{path} imports {name}"
            assert "hortus_pb2" not in name, f"{path} imports {name}: protocol/wire.py is its only reader"
        elif part == "corpus":  # wires like serve.py, and keeps to itself
            assert top[1] in SHARED | {"corpus", "engines", "ivy", "tulip", "local", "start", "__version__"}, (
                f"{path} imports {name}"
            )
        elif path.stem in SHARED and path.parent == ROOT:
            assert top[1] in SHARED | {"__version__"}, f"{path} imports {name}"


def test_no_two_files_of_tests_have_one_name():
    """They could not be collected together, which a run of one of them does not show."""
    names = [f.name for f in Path(__file__).parents[1].rglob("*.py") if f.name != "conftest.py"]
    assert not {name for name in names if names.count(name) > 1}


def test_gateway_and_fake_start_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import hortus.cli, hortus.serve, hortus.ivy.app, hortus.ivy.server, hortus.tulip.scheduler, hortus.tulip.fake\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_one_process_starts_without_grpc():
    code = (
        "import sys; sys.modules['grpc'] = None; sys.modules['google.protobuf'] = None\n"
        "import hortus.cli, hortus.serve, hortus.supervise\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_the_api_is_there_and_light():
    code = (
        "import sys\nfor name in ('torch', 'pyarrow', 'grpc'): sys.modules[name] = None\n"
        "import hortus\nassert 'numpy' not in sys.modules\nassert hortus.Engine.__name__ == 'Engine'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_no_drawers():
    for path in FILES:
        assert not {"utils", "common", "core", "helpers", "misc"} & set(path.with_suffix("").relative_to(ROOT).parts)
