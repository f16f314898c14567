"""Make hortus_pb2.py and hortus_pb2.pyi from hortus.proto: `python -m hortus.protocol.generate` (needs the `dev` extra).

The results are committed; a test holds them against the proto. Only messages are generated: the three methods are named
once each, in wire.py.
"""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path

HERE = Path(__file__).parent
MADE = ("hortus_pb2.py", "hortus_pb2.pyi")


def generate(out: Path) -> None:
    """Write both files into `out`. RuntimeError when protoc refuses the proto."""
    from grpc_tools import protoc

    bundled = importlib.resources.files("grpc_tools") / "_proto"
    words = ["protoc", f"-I{HERE}", f"-I{bundled}", f"--python_out={out}", f"--pyi_out={out}", "hortus.proto"]
    if protoc.main(words) != 0:
        raise RuntimeError("protoc refused hortus.proto")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
