"""Which chat template renders the conversations: the tokenizer's own, one of a file, or one by name."""

from __future__ import annotations

from pathlib import Path

from core.contracts import Tokenizer
from core.errors import ConfigError, nearest
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.records.chats import CHATML
from toolkit.bounded import read_error, read_inside
from toolkit.chat_template import CONFIG, FILES, TEMPLATE, ChatTemplate, special_tokens, stored_template
from toolkit.gguf_files import read_gguf
from toolkit.gguf_tokenizers import names_of_special

GGUF_TEMPLATE = "tokenizer.chat_template"
NAMED = {"chatml": CHATML}
PLAIN = "plain"


def find_template(name: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the template; None: `plain`, texts without one.

    Args:
        name: `chatml`, `plain`, or a file: a template in Jinja2, a tokenizer_config.json that has one, a GGUF file, or a
            folder with one of the first two. None: what is beside the tokenizer's file, or in it.
        tokenizer: The tokenizer.

    Raises:
        ConfigError: If there is none.
    """
    if name == PLAIN:
        return None
    if name in NAMED:
        return ChatTemplate(NAMED[name], {})
    own = tokenizer.path if isinstance(tokenizer, PretrainedTokenizer) else None
    place = own if name is None else name
    if name is not None and not Path(name).expanduser().exists():
        hint = nearest(name, {*NAMED, PLAIN})
        raise ConfigError(
            f"data.template={name}: there is no such file.{hint} Templates by name: {', '.join(NAMED)}, {PLAIN}."
        )
    found = _read(Path(place).expanduser(), beside=name is None) if place else None
    if found is None:
        where = (
            f"data.template={name} holds no chat template" if name else "The tokenizer has no chat template"
        )
        raise ConfigError(
            f"{where}.\nSet data.template to a file with one (a chat_template.jinja, a tokenizer_config.json, a GGUF file), to "
            "chatml,\nor to plain: prompt and answer follow each other without one."
        )
    return found


def _read(path: Path, beside: bool) -> ChatTemplate | None:
    if path.suffix == ".gguf":
        return _of_gguf(path)
    folder = path if path.is_dir() else path.parent
    names = FILES if path.is_dir() or beside else (path.name,)
    files = {
        name: text
        for name in names
        if (text := _content(folder, name, required=path.is_file() and not beside))
    }
    if not path.is_dir() and not beside:  # a file of the user, of any name
        config = _content(folder, CONFIG, required=False)
        files = (
            {CONFIG: files[path.name]}
            if path.suffix == ".json"
            else {TEMPLATE: files.get(path.name, ""), CONFIG: config or "{}"}
        )
    return stored_template(files) if any(files.values()) else None


def _content(folder: Path, name: str, required: bool) -> str | None:
    if not required and not (folder / name).is_file():
        return None
    try:
        return read_inside(folder, name).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / name}: {read_error(error)}.") from error


def _of_gguf(path: Path) -> ChatTemplate | None:
    file = read_gguf(path)
    source = file.metadata.get(GGUF_TEMPLATE)
    if not isinstance(source, str):
        return None
    named = {f"{role}_token": token for role, (_, token) in names_of_special(file).items()}
    return ChatTemplate(source, special_tokens(named))
