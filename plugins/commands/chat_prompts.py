"""Messages of a chat as token ids, by the template of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from plugins.commands.generate_network import Loaded
from toolkit.bounded import read_error, read_inside
from toolkit.chat_template import CONFIG, FILES, TEMPLATE, ChatTemplate, stored_template


def find_template(model: Loaded, file: str | None) -> ChatTemplate | None:
    """Returns the template of a file, or of the Hugging Face folder that a checkpoint was imported from.

    Args:
        model: It also says the special tokens that the template names.
        file: A template in Jinja2, or a tokenizer_config.json that has one; None: the checkpoint's.

    Raises:
        ConfigError: If the file cannot be read or is no template.
    """
    spelt = {id: token for token, id in model.encoder.special.items()}
    known = {"bos_token": next(iter(model.encoder.leading), None), "eos_token": model.end}
    special = {role: spelt[id] for role, id in known.items() if id in spelt}
    kept = {name: model.files[name] for name in FILES if isinstance(model.files.get(name), str)}
    if file is not None:
        kept = {CONFIG: kept.get(CONFIG, "{}")} | _named(file)
    found = stored_template(kept)
    if file is not None:
        _required(found, file)
    return found and ChatTemplate(found.source, special | found.special)


def read_template(file: str) -> str:
    """Returns the template that is in a file of the user, as it is.

    Args:
        file: As in :func:`find_template`.

    Raises:
        ConfigError: If the file cannot be read or is no template.
    """
    return _required(stored_template(_named(file)), file).source


def _named(file: str) -> dict[str, str]:
    """Returns the text of a file of the user, under the name that says what it is."""
    return {CONFIG if file.endswith(".json") else TEMPLATE: _content(file)}


def _required(found: ChatTemplate | None, file: str) -> ChatTemplate:
    if found is None:
        raise ConfigError(f"--template {file}: it has no `chat_template`.")
    return found


def _content(file: str) -> str:
    path = Path(file)
    try:
        return read_inside(path.parent, path.name).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--template {file}: {read_error(error)}.") from error


def require_template(model: Loaded, file: str | None, path: Path) -> ChatTemplate:
    """Returns the template.

    Raises:
        ConfigError: If there is none.
    """
    if found := find_template(model, file):
        return found
    raise ConfigError(
        f"{path} has no chat template: it was not imported from a folder with one.\nGive --template FILE, in Jinja2 as "
        "in a chat_template.jinja, or continue texts with `generate`."
    )


def encode_messages(
    model: Loaded,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: bool = False,
    further: Mapping[str, Any] | None = None,
) -> list[int]:
    """Returns the ids of a conversation up to where an answer begins.

    Args:
        model: Its encoder.
        template: Of the conversation.
        messages: Each with `role` and `content`.
        special_tokens: Whether special tokens are read in messages and `further`; else only those of the template are.
        further: Of :meth:`ChatTemplate.render`.

    Raises:
        ConfigError: If the template refuses the messages, or makes no text of them.
    """
    given: list[Any] = [messages, dict(further or {})]
    texts, named = given if special_tokens else model.encoder.as_text(given)
    ids = model.encoder.encode(template.render(texts, **named), leading=False)
    if not ids:
        raise ConfigError("The chat template makes an empty text of these messages.")
    return ids
