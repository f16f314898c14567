"""The Python API: a model in this process, asked without a server.

    engine = hortus.Engine("sentence-transformers/all-MiniLM-L6-v2")
    engine.embed(["The cat sits on the mat."])          # [1, 384] float32
    engine.rerank("a cat", ["a feline", "a spoon"])     # [2] float32
    await engine.aembed(texts)                          # the same from a coroutine

The same tokenizer, scheduler, engine and outputs as `hortus serve`, so the same vectors and the same errors; the event loop
that they live on runs in a thread of its own, and any number of threads and coroutines may ask at once. A forked process has
neither thread nor loop: there every call is refused. Knows Ivy and Tulip, as serve.py does. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import operator
import os
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from hortus import config
from hortus.cores import usable_cores
from hortus.corpus.vectors import TYPES, Backend, Local, Vectors, Wish, only_text
from hortus.engines import load_engine, open_model
from hortus.errors import InvalidInput, NotReady, RequestError, StartError, first_of
from hortus.folder import ModelFolder
from hortus.ivy.embed import Embedder
from hortus.ivy.scores import Question, score
from hortus.metrics import Metrics
from hortus.tulip.scheduler import Scheduler
from hortus.types import Float32, ModelInfo

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
Rows = npt.NDArray[Any]

WINDOW_ROWS = 8192
"""Texts tokenised and sorted together. Two windows are at work at a time."""
_ALL = 2**62
"""A limit that guards a server against its clients, lifted: here the caller has the memory or not."""
_FOREVER_S = 10 * 365 * 86400.0


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A model with everything between texts and rows."""

    folder: ModelFolder
    embedder: Embedder
    scheduler: Scheduler


async def open_local(model: str, settings: config.Config, closing: AsyncExitStack, *, merge: bool = True) -> Opened:
    """The model, ready, on the running event loop; what it holds is given to `closing`. StartError.

    merge: as in Scheduler.
    """
    ivy = dataclasses.replace(settings.ivy, max_inputs=_ALL, max_answer_values=_ALL)
    metrics = Metrics()
    fake = settings.tulip.fake_delay_ms is not None
    folder = await asyncio.to_thread(open_model, model, ivy.served_model_name, settings.rose, weights=not fake)
    engine = await asyncio.to_thread(load_engine, folder, settings, metrics)
    closing.callback(engine.close)
    tulip, bulk = settings.tulip, not merge or not settings.tulip.lanes
    most = tulip.max_batch_tokens or (bulk and engine.info.bulk_tokens) or engine.info.batch_tokens
    scheduler = Scheduler(engine, dataclasses.replace(tulip, max_batch_tokens=most), metrics, merge=merge)
    await scheduler.start()
    closing.push_async_callback(scheduler.close)
    info = dataclasses.replace(engine.info, batch_tokens=most)
    if ivy.tokenize_threads is None and info.device != "cpu":
        ivy = dataclasses.replace(ivy, tokenize_threads=min(16, max(2, usable_cores() - 2)))
    embedder = await asyncio.to_thread(Embedder, folder, info, scheduler, ivy, metrics)
    closing.callback(embedder.close)
    return Opened(folder, embedder, scheduler)


class Engine:
    """A model in this process. Close it, or use it in a `with` block; one that nobody holds any more ends by itself.

    Any number of threads may share it, and any may close it: what others wait for then is NotReady. A process forked from
    this one may not ask it (RuntimeError), it opens an engine of its own.
    Texts are any iterable of str, read in its order: a list, a generator, a column of pandas or pyarrow.

    Errors are those of hortus.errors: StartError when it cannot be opened, InvalidInput and TooLong (which name the text at
    fault by its index) when a text cannot be embedded, NotReady when it is closed or the engine has gone; and TypeError for
    what is no list of texts at all, and for options of another kind than theirs.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: object) -> None:
        """model: a folder, a hub id, or `demo`. settings: knobs of hortus.config by their names, such as device="cpu",
        dtype="bfloat16", threads=4, auto_truncate=True; unknown ones are refused. Takes seconds.

        Unlike a server, steps are filled with bulk work (lanes=False) unless told otherwise.
        """
        name = _model_named(model)
        chosen = config.load(flags={"lanes": False, **settings})
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_live, args=(self._loop,), name="hortus-engine", daemon=True)
        self._thread.start()
        self._closing = AsyncExitStack()
        self._asks: set[asyncio.Task[Any]] = set()
        """Of the engine's loop: what somebody waits for."""
        self._lock = threading.RLock()  # a signal handler may close what its own thread is asking
        self._closed = False
        """Nothing new is begun."""
        self._ending: concurrent.futures.Future[None] | None = None
        self._forgotten = weakref.finalize(self, _let_go, self._loop, self._asks, self._closing)
        self._forgotten.atexit = False  # the process ends anyway
        try:
            self._opened = self._run(open_local(name, chosen, self._closing))
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> ModelInfo:
        """What the model is: its width, limits, number format, device."""
        return self._opened.embedder.info

    def embed(
        self,
        texts: Iterable[str],
        *,
        dimensions: int | None = None,
        precision: str = "float32",
        prompt_name: str | None = None,
        truncate: bool | None = None,
    ) -> Rows:
        """[len(texts), dimensions] vectors, in order. Any number of texts.

        dimensions: keep the first so many values. precision: float32, float16, int8, uint8, binary, ubinary (bits: one byte
        for eight). prompt_name: the model's prompt to put before each text; None its default, "" none. truncate: cut texts
        that are too long instead of refusing them; None takes the setting auto_truncate.
        """
        return self._run(self._embed(listed(texts, "texts"), _wish(dimensions, precision, prompt_name, truncate)))

    async def aembed(
        self,
        texts: Iterable[str],
        *,
        dimensions: int | None = None,
        precision: str = "float32",
        prompt_name: str | None = None,
        truncate: bool | None = None,
    ) -> Rows:
        """`embed` for coroutines, of any event loop."""
        return await self._await(
            self._embed(listed(texts, "texts"), _wish(dimensions, precision, prompt_name, truncate))
        )

    def rerank(self, query: str, documents: Iterable[str], *, truncate: bool | None = None) -> Float32:
        """[len(documents)] float32, how relevant each document is to the query, in the documents' order: a reranker's
        probability, or an embedding model's cosine."""
        _switch(truncate)
        return self._run(self._rerank(query, listed(documents, "documents"), truncate))

    async def arerank(self, query: str, documents: Iterable[str], *, truncate: bool | None = None) -> Float32:
        """`rerank` for coroutines, of any event loop."""
        _switch(truncate)
        return await self._await(self._rerank(query, listed(documents, "documents"), truncate))

    def embed_table(
        self,
        table: pa.Table,
        text: str = "text",
        *,
        name: str = "embedding",
        dimensions: int | None = None,
        precision: str = "float32",
        prompt_name: str | None = None,
        truncate: bool | None = None,
    ) -> pa.Table:
        """The table with a column of fixed-size lists more. A null text gives a null vector; one that is refused raises."""
        try:
            from hortus.corpus.output import with_vectors
        except ModuleNotFoundError as e:
            raise StartError(f"tables need the package {e.name}: pip install 'hortus[corpus]'") from None
        names = getattr(table, "column_names", None)
        if names is None:
            raise TypeError(f"table: give a pyarrow.Table, not {type(table).__name__}")
        if names.count(text) != 1:
            how = "two columns" if text in names else "no column"
            raise InvalidInput(f"{how} {text!r:.80}; the table has {', '.join(names)}", param="text")
        values = table.column(text).to_pylist()
        at = [i for i, value in enumerate(values) if value is not None]
        wish = _wish(dimensions, precision, prompt_name, truncate)
        rows = self._run(self._embed([values[i] for i in at], wish, names=at))
        return with_vectors(table, name, rows, at)

    def close(self) -> None:
        """Free the model, from any thread. What others still wait for is NotReady. Idempotent, and goes on where Ctrl-C broke
        it off."""
        self._same_process()
        with self._lock:
            self._closed = True
            if not self._thread.is_alive():
                return
            if self._ending is None:
                self._forgotten.detach()
                self._ending = asyncio.run_coroutine_threadsafe(_end(self._asks, self._closing), self._loop)
            try:
                self._ending.result()
            finally:
                if self._ending.done():
                    self._loop.call_soon_threadsafe(self._loop.stop)
                    self._thread.join()

    def __enter__(self) -> Self:
        self._same_process()
        if self._closed:
            raise NotReady("this engine has been closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _same_process(self) -> None:
        """A fork copies the engine without the thread that answers: who asked would wait for ever."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine belongs to process {self._process}, and a fork of it (this is {os.getpid()}) has not its threads: "
                "open an Engine in each process, or start processes by `spawn`"
            )

    def _start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            self._same_process()
            if not self._closed:
                with self._lock:  # between this look and the start nobody closes
                    if not self._closed:
                        return asyncio.run_coroutine_threadsafe(self._ask(work), self._loop)
            raise NotReady("this engine has been closed")
        except BaseException:
            work.close()
            raise

    async def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, on the engine's loop, until somebody closes the engine."""
        task = asyncio.current_task()
        assert task is not None, "run_coroutine_threadsafe makes a task"
        self._asks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise NotReady("this engine was closed before it had answered") from None
        finally:
            self._asks.discard(task)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("called from the engine's own thread, which would wait for itself")
        future = self._start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: nothing of it stays behind
            raise

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._start(work))

    async def _embed(self, texts: Sequence[str], wish: Wish, names: Sequence[int] | None = None) -> Rows:
        return await embed_all(Local(self._opened.embedder, wish), texts, wish, names or range(len(texts)))

    async def _rerank(self, query: str, documents: Sequence[str], truncate: bool | None) -> Float32:
        (query,) = listed([query], "query")
        for i, error in only_text([query, *documents]).items():
            what = f"documents[{i - 1}]" if i else "query"
            raise InvalidInput(f"{what}: {error.message}", param=what)
        if not documents:
            return np.zeros(0, np.float32)
        embedder = self._opened.embedder
        loop = asyncio.get_running_loop()
        question = Question(queries=[query], documents=list(documents), truncate=embedder.truncate(truncate))
        return (await score(embedder, question, deadline=loop.time() + _FOREVER_S, route="rerank")).values


async def _end(asks: set[asyncio.Task[Any]], closing: AsyncExitStack) -> None:
    """Answer whoever waits, then let go of the model. What was asked before has begun by now, so `asks` holds all of it."""
    for task in asks:
        task.cancel()
    if asks:
        ended, _ = await asyncio.wait(asks.copy())
        for task in ended:
            task.cancelled() or task.exception()  # looked at here: after Ctrl-C nobody else does
    await closing.aclose()


def _let_go(loop: asyncio.AbstractEventLoop, asks: set[asyncio.Task[Any]], closing: AsyncExitStack) -> None:
    """End an engine that nobody holds any more. Whatever thread finds that out must not wait."""
    ending = asyncio.run_coroutine_threadsafe(_end(asks, closing), loop)
    ending.add_done_callback(lambda _: loop.stop())  # called on the loop


def _live(loop: asyncio.AbstractEventLoop) -> None:
    """The engine's thread. It holds the loop and not the engine."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _model_named(model: object) -> str:
    """What open_model takes. StartError; a Path is a folder and never a hub id."""
    if isinstance(model, os.PathLike):
        name = os.fsdecode(model)
        if not os.path.exists(os.path.expanduser(name)):
            raise StartError(f"{name}: no such folder")
        return name
    if not isinstance(model, str) or not model:
        what = "an empty string" if model == "" else type(model).__name__
        raise StartError(f"model: give a folder, a hub id or `demo`, not {what}")
    return model


def listed(given: Iterable[str], what: str) -> list[str]:
    """The texts, in the order of iteration: a column of a data frame is sliced by its labels, and a generator not at all.

    TypeError for what is no list of texts; an element that is no text is left for the one who can name it.
    """
    if given is None or isinstance(given, str | bytes | bytearray | Mapping | Set) or hasattr(given, "columns"):
        raise TypeError(f"{what}: give a list of texts (or another iterable in order), not {type(given).__name__}")
    told = getattr(given, "to_pylist", None)  # an Arrow array iterates as scalars of its own
    try:
        found = list(told() if callable(told) else given)
    except TypeError:
        if hasattr(type(given), "__iter__") and getattr(given, "ndim", None) != 0:
            raise  # of a generator's own making
        raise TypeError(f"{what}: give a list of texts, not {type(given).__name__}") from None
    # np.str_ and other kinds of str become plain ones, which the tokenizer takes.
    return [str.__str__(t) if isinstance(t, str) and type(t) is not str else t for t in found]


def _wish(dimensions: int | None, precision: str, prompt_name: str | None, truncate: bool | None) -> Wish:
    if dimensions is not None:
        dimensions = _number(dimensions)
    _switch(truncate)
    return Wish(dimensions=dimensions, precision=precision, prompt_name=prompt_name, truncate=truncate)


def _number(dimensions: object) -> int:
    """A whole number, NumPy's too. TypeError."""
    if isinstance(dimensions, bool) or not hasattr(dimensions, "__index__"):
        raise TypeError(f"dimensions: give a whole number, not {dimensions!r:.80}")
    return operator.index(dimensions)


def _switch(truncate: object) -> None:
    """TypeError for what is only true in Python's eyes: "no" would cut texts, silently."""
    if not (truncate is None or isinstance(truncate, bool | np.bool_)):
        raise TypeError(f"truncate: give True, False or None, not {truncate!r:.80}")


async def embed_all(backend: Backend, texts: Sequence[str], wish: Wish, names: Sequence[int]) -> Rows:
    """[len(texts), values]: every text's row, or the error of the first that has none. names: what each text is called."""
    rows = np.empty((len(texts), backend.values), TYPES[wish.precision])
    starts = iter(range(0, len(texts), WINDOW_ROWS))
    errors: dict[int, RequestError] = {}

    async def worker() -> None:
        for lo in starts:
            found: Vectors = await backend.vectors(texts[lo : lo + WINDOW_ROWS])
            if found.refused:
                errors.update({lo + i: e for i, e in found.refused.items()})
                return
            rows[lo + found.owners] = found.rows

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None
    if errors:
        first = min(errors)
        raise _named(errors[first], names[first])
    return rows


def _named(error: RequestError, name: int) -> RequestError:
    """The same, of a text that the caller can find."""
    if not error.message.startswith(("the text", "no text")):
        return error
    return type(error)(f"input {name}: {error.message}", param=f"input[{name}]")
