"""A model folder: where it is, and what its small files say. Weights are rose/loader's, the tokenizer's ivy/tokenize's.

Knows JSON and the layout that sentence-transformers and transformers write. Does not know torch. Read by both
Ivy (prompts, length limit, where the tokenizer is) and ROSE (config, modules), so that the two can never disagree.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hortus import hub, late
from hortus.errors import StartError

log = logging.getLogger("hortus")

ST_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)


@dataclass(frozen=True, slots=True)
class Module:
    """One line of modules.json."""

    kind: str
    """Last part of its type: Transformer, Pooling, Dense, Normalize, or a name we may not know."""
    path: Path
    """Its folder; may not exist (Normalize has no files)."""
    config: dict[str, Any]
    """config.json of that folder, {} when absent (for the Transformer: see ModelFolder.config)."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk, opened."""

    path: Path
    name: str
    revision: str | None
    transformer: Path
    """Folder of the Transformer module: config.json, tokenizer.json and the weights."""
    config: dict[str, Any]
    """The transformer's config.json."""
    modules: tuple[Module, ...]
    """modules.json in order; () when there is none (a plain transformers folder)."""
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_tokens: int = 512
    """Longest input in tokens, special ones included, as sentence-transformers applies it."""
    kind: str = "embed"
    """What its files make of it: a kind of ModelInfo."""
    activation: str | None = None
    """What a CrossEncoder's files say its scores are of the logit, such as Sigmoid or Identity; None: they do not say."""
    adapters: tuple[str, ...] = ()
    """Tasks that the model has an adapter of its own for (jina-embeddings-v3). A token of type n is read with number n - 1."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Keys that win over those of tokenizer_config.json: sentence_bert_config.json's processor_kwargs."""
    late: late.Late | None = None
    """How a late-interaction model reads its texts; None for others."""

    @property
    def prompts_apart(self) -> bool:
        """A prompt's tokens are to be left out of pooling: not supported, so such a model may have no prompts."""
        return any(m.kind == "Pooling" and m.config.get("include_prompt", True) is False for m in self.modules)


@contextmanager
def readable(where: Path | str) -> Iterator[None]:
    """The last resort for a model's files: a value in them of a kind that nobody looked for is a StartError, not a traceback."""
    try:
        yield
    except StartError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as e:
        log.debug("reading %s", where, exc_info=True)
        raise StartError(
            f"{where}: one of its files holds a value that cannot be right ({type(e).__name__}: {str(e)[:200]}); "
            "--log-level debug says where"
        ) from e


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file; StartError when it is not an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise StartError(f"{path}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise StartError(f"{path}: expected a JSON object")
    return value


KINDS = (
    "Transformer",
    "MLMTransformer",
    "Pooling",
    "SpladePooling",
    "Dense",
    "Normalize",
    "Dropout",
    "FlexibleQuantizer",
    "LogitScore",
    "MultiVectorMask",
)
"""Modules we know. FlexibleQuantizer is pplx-embed's own file: quantising is done at output, the file is never run."""

_DESCRIBED = ("Pooling", "SpladePooling", "Dense", "Normalize", "LogitScore", "MultiVectorMask")
"""Modules with a config.json of their own."""

_OTHERS = ("st_quantize.FlexibleQuantizer", "pylate.models.Dense.Dense")
"""Types of modules that are not sentence-transformers' and known all the same."""

_JINA = "custom_st.Transformer"
"""That of jina-embeddings-v3, which chooses an adapter: served where config.json lists adapters, as is a Transformer."""

SORTS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder", "ColBERT")
"""Models of sentence-transformers (the last: PyLate's) that can be served."""

_TASKS = {
    "feature-extraction": ("embed", "last_hidden_state"),
    "sequence-classification": ("classify", "logits"),
    "fill-mask": ("sparse", "logits"),
    "text-generation": ("classify", "logits"),
}
"""What the Transformer module may be asked for -> the kind of model that it then is part of, the output that it reads."""

_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet", "data2vec-text")
"""Families whose first token has position pad_token_id + 1, so that many rows of the position table are never used."""

_SEGMENTED = ("bert", "camembert", "nomic_bert", "roberta", "xlm-roberta")
"""Families that tell two token types apart where config.json says nothing of type_vocab_size, as transformers has it."""

_NO_LIMIT = 10**9
"""tokenizer_config.json says "no limit" by a number as large as 1e30."""


def open_folder(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    offline: bool = False,
    token: str | None = None,
    served_name: str | None = None,
    max_length: int | None = None,
    weights: bool = True,
) -> ModelFolder:
    """Open a local folder, or a hub id after fetching it.

    model: a folder, or a hub id such as `org/name`. weights: False fetches only the small files (a gateway needs no
    more). The other arguments are RoseConfig's. Raises StartError, which says what to do.
    """
    place = Path(model).expanduser()
    if model and os.path.isdir(place):
        path = place.resolve()
        name = path.name
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise StartError(
                f"{str(path)!r}: the folder's name is not UTF-8; rename it, or give a copy of another name"
            ) from None
    elif os.path.isfile(place):
        raise StartError(f"{model}: a file; give the model's folder (the one that holds config.json)")
    elif re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        path = hub.fetch(model, revision=revision, cache_dir=cache_dir, offline=offline, token=token, weights=weights)
        name = model
    else:
        raise StartError(f"{model}: no such folder, and not a hub id (those look like org/name)")
    return _describe(path, served_name or name, max_length)


def _describe(path: Path, name: str, max_length: int | None) -> ModelFolder:
    """Read the small files of a folder that is on disk."""
    modules = read_modules(path)
    transformer = modules[0].path if modules else path
    config = read_json(transformer / "config.json")
    if not config:
        raise StartError(f"{transformer}: no config.json; is this a model folder in Hugging Face's layout?")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise StartError(f"{transformer / 'config.json'}: architectures must be a list of names, not {names!r:.80}")
    # Without modules.json sentence-transformers makes its own modules and does not read this file.
    settings = transformer_settings(transformer) if modules else {}
    config |= _arguments(settings, "config_kwargs", "config_args")
    described = read_json(path / "config_sentence_transformers.json")
    if (sort := described.get("model_type", "SentenceTransformer")) not in SORTS:
        raise StartError(f"{path}: a {sort} of sentence-transformers; supported: {', '.join(SORTS)}")
    prompts = described.get("prompts") or {}
    default = described.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(p, str | None) for p in prompts.values()):
        raise StartError(f"{path / 'config_sentence_transformers.json'}: prompts must map names to texts")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise StartError(
            f"{path / 'config_sentence_transformers.json'}: default_prompt_name {default!r:.80} is not one of the prompts "
            f"({', '.join(map(repr, prompts)) or 'there are none'})"
        )
    adapters, instructions = adapters_of(config)
    prompts = instructions | prompts
    kind = kind_of(config, modules, sort)
    reads = None
    if late.is_late(config, described):
        kind = "tokens"
        mask = next((m.config for m in modules if m.kind == "MultiVectorMask"), None)
        reads = late.read_late(path, transformer, config, described, settings, mask, read_json)
        prompts = dict(reads.prompts)
    task = settings.get("transformer_task")
    if task is not None and _TASKS[task][0] != ("embed" if kind == "tokens" else kind):
        raise StartError(
            f"{path}: transformer_task {task!r} does not go with its modules "
            f"({', '.join(m.kind for m in modules)}), which make {kind} rows"
        )
    limit, why = length_limit(
        config,
        settings,
        read_json(transformer / "tokenizer_config.json"),
    )
    if max_length is not None and max_length > limit:
        raise StartError(f"--max-length {max_length}: the model takes at most {limit} tokens ({why})")
    if (truncate := described.get("truncate_dim")) is not None:
        raise StartError(
            f"{path}: truncate_dim {truncate} in config_sentence_transformers.json (vectors cut by default) is not "
            "supported; remove it there and let requests ask for `dimensions`"
        )
    return ModelFolder(
        path=path,
        name=name,
        revision=path.name if re.fullmatch(r"[0-9a-f]{40}", path.name) else None,
        transformer=transformer,
        config=config,
        modules=modules,
        prompts={key: text or "" for key, text in prompts.items()},
        default_prompt_name=default,
        max_tokens=max_length or limit,
        kind=kind,
        activation=activation_of(config, described) if kind == "classify" else None,
        adapters=adapters,
        tokenizer=_tokenizer_arguments(settings),
        late=reads,
    )


def adapters_of(config: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """(tasks that config.json has adapters for, what goes before each's texts). StartError.

    As XLMRobertaLoRA of jinaai/xlm-roberta-flash-implementation reads them.
    """
    tasks, texts = config.get("lora_adaptations") or [], config.get("task_instructions") or {}
    if not isinstance(tasks, list) or not all(isinstance(t, str) and t for t in tasks) or len({*tasks}) < len(tasks):
        raise StartError(f"config.json: lora_adaptations must be a list of different names, not {tasks!r:.80}")
    if tasks and config.get("model_type") != "xlm-roberta":
        raise StartError(f"config.json: lora_adaptations of a {config.get('model_type')!r:.80} are not supported")
    if not isinstance(texts, dict) or not all(isinstance(texts.get(t, ""), str) for t in tasks):
        raise StartError(f"config.json: task_instructions must map names to texts, not {texts!r:.80}")
    return tuple(tasks), {t: texts.get(t, "") for t in tasks}


def activation_of(config: dict[str, Any], described: dict[str, Any]) -> str | None:
    """The activation that a CrossEncoder of sentence-transformers puts on its logits, from config.json and
    config_sentence_transformers.json, by the library's rule: the latter first, and of the former's two spellings the newer. One
    that is not of torch is, as there, not run: the default is taken. Pure but for a line in the log."""
    own = config.get("sentence_transformers")
    for told in (
        described.get("activation_fn"),
        own.get("activation_fn") if isinstance(own, dict) else None,
        config.get("sbert_ce_default_activation_function"),
    ):
        if isinstance(told, str):
            if told.startswith("torch."):
                return told.rpartition(".")[2]
            log.warning(
                "activation function %.100s is the model's own code, which is never run: taking the default", told
            )
            return None
    return None


def kind_of(config: dict[str, Any], modules: tuple[Module, ...], sort: str = "SentenceTransformer") -> str:
    """A kind of ModelInfo, from config.json, modules.json, and whose folder sentence-transformers says it is. Pure.

    A folder without modules is what its architecture is: a classifier's head gives logits, that of a masked language model
    weights over the vocabulary (SPLADE).
    """
    if sort == "CrossEncoder" or config.get("classifier_from_token"):
        return "classify"
    if any(m.kind == "SpladePooling" for m in modules):
        return "sparse"
    if modules:
        return "embed"
    name = str((config.get("architectures") or [""])[0])
    if name.endswith("ForSequenceClassification"):
        return "classify"
    return "sparse" if name.endswith("ForMaskedLM") else "embed"


def read_modules(path: Path) -> tuple[Module, ...]:
    """modules.json in its order, () when there is none; StartError names what we cannot serve."""
    file = path / "modules.json"
    if not file.is_file():
        return ()
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise StartError(f"{file}: not valid JSON ({e})") from None
    if not isinstance(listed, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path", ""), str) for m in listed
    ):
        raise StartError(f"{file}: expected a list of modules, each with a type and a path")
    modules = []
    for at, entry in enumerate(listed):
        origin, _, kind = entry["type"].rpartition(".")
        what = f"{file}: module {at} ({entry.get('name', at)}) of type {entry['type']}"
        others = (*_OTHERS, _JINA) if adapters_of(read_json(path / "config.json"))[0] else _OTHERS
        if origin.split(".")[0] != "sentence_transformers" and entry["type"] not in others:
            raise StartError(f"{what} is the model's own code, which is never run; supported: {', '.join(KINDS)}")
        if kind not in KINDS:
            raise StartError(f"{what} is not supported; supported: {', '.join(KINDS)}")
        inside = Path(entry.get("path", ""))
        if inside.is_absolute() or ".." in inside.parts:
            raise StartError(f"{what}: path {str(inside)!r} leaves the model folder")
        here = path / inside
        # The quantizer's path is the model's own folder: that config.json is not the quantizer's.
        own = read_json(here / "config.json") if kind in _DESCRIBED and inside.parts else {}
        modules.append(Module(kind, here, own))
    if not modules or modules[0].kind not in ("Transformer", "MLMTransformer"):
        raise StartError(f"{file}: the first module must be a Transformer")
    return tuple(modules)


def token_id(transformer: Path, token: str) -> int | None:
    """The id of one token of the tokenizer.json in a folder; None when it has no such token."""
    told = read_json(transformer / "tokenizer.json")
    for added in told.get("added_tokens") or ():
        if added.get("content") == token:
            return int(added["id"])
    vocabulary = (told.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
        return next((i for i, (known, _) in enumerate(vocabulary) if known == token), None)
    found = vocabulary.get(token)
    return None if found is None else int(found)


def token_types(config: dict[str, Any]) -> int:
    """How many types of tokens a config.json's model tells apart; 0: it reads none. StartError."""
    value = config.get("type_vocab_size", 2 if config.get("model_type") in _SEGMENTED else 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise StartError(f"config.json: type_vocab_size must be a whole number, not {value!r:.80}")
    return value


def transformer_settings(transformer: Path) -> dict[str, Any]:
    """sentence_bert_config.json of the Transformer module, by whichever of its names; {} when there is none."""
    for name in ST_CONFIGS:
        if found := read_json(transformer / name):
            task = found.get("transformer_task", "feature-extraction")
            if task not in _TASKS:
                raise StartError(
                    f"{transformer / name}: transformer_task {task!r} is not supported; supported: {', '.join(_TASKS)}"
                )
            text = (found.get("modality_config") or {}).get("text") or {}
            output = text.get("method_output_name")
            if output not in (_TASKS[task][1], None):
                raise StartError(f"{transformer / name}: method_output_name {output!r} is not supported")
            called = found.get("processing_kwargs") or {}
            for key in {**(called.get("common") or {}), **(called.get("text") or {})}:
                if key not in ("padding", "padding_side", "pad_to_multiple_of", "return_tensors"):
                    raise StartError(f"{transformer / name}: {key} in processing_kwargs is not supported")
            return found
    return {}


def _arguments(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    """What sentence_bert_config.json (settings) gives from_pretrained besides the folder, by the first of its names that there
    is; StartError."""
    name = next((name for name in names if settings.get(name)), None)
    found: dict[str, Any] = {} if name is None else settings[name]
    if not isinstance(found, dict):
        raise StartError(f"sentence_bert_config.json: {name} must map names to values, not {found!r:.80}")
    return found


def _tokenizer_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    return _arguments(settings, "processor_kwargs", "tokenizer_args")


def length_limit(config: dict[str, Any], settings: dict[str, Any], tokenizer: dict[str, Any]) -> tuple[int, str]:
    """(longest input in tokens, which file says so), by sentence-transformers' rule. Pure.

    config: config.json. settings: sentence_bert_config.json. tokenizer: tokenizer_config.json. Also never more tokens
    than there are positions: sentence-transformers would fail on those.
    """

    def number(value: object) -> int | None:
        return int(value) if isinstance(value, int | float) and 0 < value < _NO_LIMIT else None

    positions = number(config.get("max_position_embeddings", config.get("n_positions")))
    if positions is not None and config.get("model_type") in _OFFSET_POSITIONS:
        pad = (
            1 if config["model_type"] == "mpnet" else config.get("pad_token_id")
        )  # MPNet's code says 1, whatever is said
        positions -= (pad if isinstance(pad, int) else 1) + 1
    found, arguments = [], _tokenizer_arguments(settings)
    if (wanted := number(arguments.get("model_max_length"))) or (wanted := number(settings.get("max_seq_length"))):
        found.append((wanted, "sentence_bert_config.json"))
    elif wanted := number(tokenizer.get("model_max_length")):
        found.append((wanted, "model_max_length of tokenizer_config.json"))
    if positions is not None:
        found.append((positions, "max_position_embeddings of config.json"))
    return min(found, default=(512, "no file of the model gives a limit"))
