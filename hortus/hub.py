"""Fetching a model from the Hugging Face hub: which files, and what each failure means. Imported always, but the hub's
own library only when a hub id is opened. Does not know what the files hold.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hortus.errors import StartError

log = logging.getLogger(__name__)

_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata")
_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
_NEVER = ("onnx/*", "openvino/*", "*.onnx", "*.msgpack", "*.h5", "*.gguf")


def fetch(
    repo: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    offline: bool = False,
    token: str | None = None,
    weights: bool = True,
) -> Path:
    """The snapshot's folder on this machine; its name is the commit. StartError says what to do.

    Pickled weights (`*.bin`) are fetched only where a folder has no safetensors: those are smaller to trust.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise StartError(
            f"{repo}: no such folder; a hub model needs the hub's client: pip install huggingface-hub"
        ) from None

    def get(patterns: list[str]) -> Path:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=cache_dir,
                token=token,
                local_files_only=offline,
                allow_patterns=patterns,
                ignore_patterns=list(_NEVER),
            )
        )

    at = f"{repo}, revision {revision}" if revision else repo
    try:
        path = get([*_SMALL, *(_anywhere(_WEIGHTS) if weights else ())])
        if weights and (bare := _without_weights(path)):
            log.info("%s: no safetensors in %s, fetching pickled weights", repo, ", ".join(b or "." for b in bare))
            path = get([f"{b}{name}" for b in bare for name in _PICKLES])
    except errors.GatedRepoError:
        raise StartError(
            f"{repo}: a gated model; ask for access on its page, then pass --hub-token or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise StartError(
            f"{repo}: no such folder here and no such model on the hub (or a private one: pass --hub-token). "
            "Hub ids look like sentence-transformers/all-MiniLM-L6-v2"
        ) from None
    except errors.RevisionNotFoundError:
        raise StartError(f"{repo}: the hub has no revision {revision!r}; check --revision") from None
    except errors.HFValidationError as e:
        raise StartError(f"{repo}: not a folder, and not a hub id ({e})") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        if offline:
            raise StartError(
                f"{at}: not a folder and not in the cache, and --offline forbids asking the hub; fetch it once without "
                "--offline, or check --cache-dir"
            ) from None
        raise StartError(
            f"{at}: not a folder, not in the cache, and the hub cannot be reached (no network, or HF_HUB_OFFLINE is set)"
        ) from None
    except errors.HfHubHTTPError as e:
        raise StartError(f"{at}: the hub refused ({e})") from None
    except OSError as e:  # network and disk errors of every kind: the hub's client raises both as these
        raise StartError(
            f"{at}: could not be fetched ({e}); check the network, --cache-dir and the free disk"
        ) from None
    return path


def _anywhere(names: tuple[str, ...]) -> list[str]:
    """Patterns for these names in the root and in module folders."""
    return [p for n in names for p in (n, f"*/{n}")]


def _without_weights(path: Path) -> list[str]:
    """Folders (as prefixes, "" for the root) that have a config.json and may hold weights, but no safetensors.

    Pooling folders have a config.json too and match in vain: asking for a file that is not there costs nothing.
    """
    folders = [f.parent for f in path.glob("**/config.json")]
    return [
        "" if f == path else f"{f.relative_to(path).as_posix()}/" for f in folders if not any(f.glob("*.safetensors"))
    ]
