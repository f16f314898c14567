"""Which prompt goes before a text. Pure.

The rule is sentence-transformers' `encode`: the prompt named by the request, else the model's default prompt, else none.
Does not know tokens: ids are taken as given and never get a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from hortus.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Prompts:
    """A model's prompts, by name, and the one used when a request names none."""

    texts: dict[str, str]
    default: str | None = None

    def choose(self, name: str | None, *, ids: bool = False) -> str:
        """The text to put before each input; "" for none.

        name: None takes the model's default; "" asks for no prompt; anything else must be one of the model's.
        ids: the request brings token ids, to which no prompt can be added; asking for one is InvalidInput.
        """
        if name:
            if ids:
                raise InvalidInput(
                    "prompt_name cannot be used with token ids: they are embedded as they are", param="prompt_name"
                )
            if name not in self.texts:
                known = ", ".join(sorted(self.texts)) or "none"
                raise InvalidInput(
                    f"unknown prompt_name {name!r:.80}; this model's prompts: {known}", param="prompt_name"
                )
            return self.texts[name] or ""
        if name is None and self.default is not None and not ids:
            return self.texts.get(self.default) or ""
        return ""
