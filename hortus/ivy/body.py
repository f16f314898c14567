"""JSON bodies to msgspec structs, and what every API's body has in common. Pure.

Parsing and checking are one pass; errors say where in the body they are, in the words of its own API. Does not know any route.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from hortus.errors import InvalidInput, ModelNotFound, RequestError
from hortus.ivy.exchange import Request


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """A body. Unknown fields are refused: one that is silently ignored gives answers that look right and are not."""

    def names(self) -> Mapping[str, str]:
        """Fields that this API, or this request, calls something else than errors do: their name here by ours.

        Errors of parts that know no API speak of `dimensions`, `encoding_format`, `prompt_name`, `truncate: true`,
        `truncate_prompt_tokens`, `truncation_side` and `instruction`.
        """
        return {}


T = TypeVar("T", bound=msgspec.Struct)
A = TypeVar("A", bound=Asked)

_path = re.compile(r" - at `\$\.?([^`]*)`$")
_named = re.compile(r"(?:unknown|required) field `([^`]*)`")


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Parses bodies of one kind; InvalidInput says where one went wrong."""
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> T:
        try:
            return decode(body)
        except msgspec.ValidationError as e:
            raise _refusal(str(e), kind) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            # Lone surrogates and invalid UTF-8 end here, before any tokenizer sees them.
            if not body.strip():
                raise InvalidInput("the body is empty; a JSON object is wanted") from None
            # Where a text ends in half a pair, or the body in the middle.
            cut = ""
            if "truncated" in str(e):
                half = b"\\ud" in body or b"\\uD" in body
                cut = (
                    " (a text may end in half a surrogate pair, \\ud800 to \\udfff)"
                    if half
                    else ": it ends in the middle"
                )
            raise InvalidInput(f"the body is not valid JSON in UTF-8: {e}{cut}") from None
        except RecursionError:
            raise InvalidInput("the body is not valid JSON: nested too deeply") from None

    return read


def reader(kind: type[A]) -> Callable[[Request], A]:
    """The same of requests, whose errors speak the body's words from then on."""
    decode = decoder(kind)

    def read(request: Request) -> A:
        asked = decode(request.body)
        request.names = asked.names()
        return asked

    return read


def reworded(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with the fields it is about as `names` has them. In messages fields stand in backquotes."""
    for ours, theirs in names.items():
        error.message = error.message.replace(f"`{ours}`", f"`{theirs}`")
        if error.param == ours:
            error.param = theirs
    return error


_MOST_TOLD = 400
"""Characters of what was wrong that go back."""


def _refusal(text: str, kind: type[msgspec.Struct]) -> InvalidInput:
    at, named = _path.search(text), _named.search(text)
    param = at[1] if at else named[1] if named else None
    if len(text) > _MOST_TOLD:  # a name in it is the client's, and may be of any length
        text, at = text[:_MOST_TOLD] + "...", None
        param = None if param is None else param[:_MOST_TOLD]
    hint = "; known: " + ", ".join(kind.__struct_encode_fields__) if "unknown field" in text and not at else ""
    where = f"{param}: " if at and param else ""
    return InvalidInput(where + (text[: at.start()] if at else text) + hint, param=param)


def check_model(asked: str | None, served: str) -> None:
    """A request that names a model must name the one that is served; of a hub id the part after the slash will do, because
    some clients (perplexityai) take no other."""
    if asked is not None and asked != served and asked != served.rpartition("/")[2]:
        raise ModelNotFound(f"the model {asked!r:.200} is not served here; this server has {served!r}", param="model")


def one_of(value: str, allowed: tuple[str, ...], param: str) -> str:
    """`value` when it is allowed; InvalidInput with the list otherwise."""
    if value not in allowed:
        raise InvalidInput(f"unknown `{param}` {value!r:.80}; allowed: {', '.join(allowed)}", param=param)
    return value


def sort_out(given: str | list[Any], field: str = "input") -> tuple[list[Any], bool]:
    """(inputs, flat): all texts or all id lists. flat: one list of ids came without outer brackets. InvalidInput if mixed."""
    if isinstance(given, str):
        return [given], False
    kinds = set(map(type, given))
    if len(kinds) > 1:
        first = type(given[0])
        at = next(i for i, x in enumerate(given) if type(x) is not first)
        raise InvalidInput(
            f"{field}[{at}] is not of the same kind as {field}[0]: give only texts, only token ids, or only lists of ids",
            param=f"{field}[{at}]",
        )
    return ([given], True) if kinds == {int} else (given, False)
