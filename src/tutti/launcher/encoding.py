"""Write text to streams whose encoding lacks some characters: replace or escape them instead of raising."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, TextIO

_HANDLER = "tutti.replace"
_LOST = ("strict", "surrogateescape")
_NEAREST = {
    **{"·": "-", "–": "-", "—": "-", "−": "-", "→": "->", "…": "...", "×": "x", "÷": "/", "±": "+-"},
    **{"≤": "<=", "≥": ">=", "‘": "'", "’": "'", "“": '"', "”": '"', "µ": "u", "μ": "u", "Δ": "d", "σ": "sigma"},
}


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encoding error handler: return the nearest ASCII text; undecodable bytes of file names stay as they were."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if 0xDC80 <= ord(character) <= 0xDCFF:
        return bytes([ord(character) - 0xDC00]), error.start + 1
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return _NEAREST.get(character) or plain or "?", error.start + 1


codecs.register_error(_HANDLER, _replace)


def replace_unencodable(*streams: TextIO) -> None:
    """Make text streams write the nearest ASCII text for characters that their encoding lacks, as in an ASCII locale.

    Without this call such a character would raise UnicodeEncodeError, or become an escape on standard error. Streams
    that are no ``io.TextIOWrapper``, such as a notebook's, or have another error handler by choice
    (``PYTHONIOENCODING=ascii:replace``), stay as they are.

    Args:
        streams: the streams, such as ``sys.stdout``; changed.
    """
    for stream in streams:
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.errors in _LOST or (stream.errors == "backslashreplace" and not speaks_unicode(stream)):
            _reconfigure(stream)


def write_utf8(*streams: TextIO) -> None:
    """Switch text streams to the encoding UTF-8 in every locale.

    For standard streams that are redirected into log files. UTF-8 cannot encode lone surrogates: those that stand for
    undecodable bytes of file names (``os.fsdecode``) are written as these bytes, others as ``?``. Streams that are no
    ``io.TextIOWrapper``, such as a notebook's, stay as they are.

    Args:
        streams: the streams, such as ``sys.stdout``; changed.
    """
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            _reconfigure(stream, "utf-8")


def _reconfigure(stream: io.TextIOWrapper, encoding: str | None = None) -> None:
    # reconfigure ends with a tell(), which fails where the descriptor now leads into a pipe.
    with contextlib.suppress(OSError):
        stream.reconfigure(encoding=encoding, errors=_HANDLER)


def speaks_unicode(stream: TextIO) -> bool:
    """Return whether the encoding of a text stream can encode every character; True if the encoding is unknown."""
    try:
        return codecs.lookup(stream.encoding or "utf-8").name.startswith("utf")
    except (LookupError, AttributeError, TypeError):
        return True


def strict_json(value: Any, **options: Any) -> str:
    """Return a value as JSON text; NaN and infinities, for which JSON has no token, become null.

    Args:
        value: a value that ``json.dumps`` accepts; keys of dicts become strings.
        options: further arguments of ``json.dumps``, such as ``indent``.

    >>> strict_json({"a": float("nan"), 3: [float("-inf"), (0.5,)]})
    '{"a": null, "3": [null, [0.5]]}'
    """
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Mapping[str, Any], stream: TextIO) -> str:
    """Return a value as JSON text with an indentation of two spaces, in characters that a stream can encode.

    Non-ASCII characters are escaped unless the stream's encoding is a Unicode encoding; NaN and infinities become null.
    Nothing is written.

    Args:
        value: a value that ``json.dumps`` accepts.
        stream: text stream for which the text is meant; only its encoding is used.
    """
    return strict_json(value, indent=2, ensure_ascii=not speaks_unicode(stream))


def toml_text(text: str, stream: TextIO) -> str:
    r"""Return a TOML document in characters that a stream can encode.

    Non-ASCII characters are escaped unless the stream's encoding is a Unicode encoding. Nothing is written.

    Args:
        text: the document.
        stream: text stream for which the text is meant; only its encoding is used.

    >>> toml_text('task = "é.py"', io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    'task = "\\u00E9.py"'
    """
    return text if speaks_unicode(stream) else re.sub(r"[^\x00-\x7f\ud800-\udfff]", _escaped, text)


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\u{number:04X}" if number < 0x10000 else f"\\U{number:08X}"
