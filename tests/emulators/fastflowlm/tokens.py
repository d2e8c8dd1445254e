"""A tokenizer that is greedy and deterministic; a token is its own text.

Pieces are short, so that a text cut elsewhere gives other tokens than ``encode`` of the whole:
what a model generated need not be what its text is encoded to (fastflowlm.md 3.3, HIST).
"""

from __future__ import annotations

import re
import sys
import zlib

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

IMAGE = "<|image_soft|>"
IMAGE_TOKENS = 256  # an image is this many copies of one soft token, whatever it shows

SPECIAL = (
    r"<\|[a-z_]+\|>|</?think>|</?tool_call>|</?tool_response>|</?tools>"
    r"|<(?:start|end)_of_turn>|<bos>"
)
_PIECE = re.compile(rf"{SPECIAL}| ?[^\W\d_]{{1,6}}|\d|\s+|[^\w\s]|_", re.UNICODE)
_SPECIAL = re.compile(SPECIAL)


def encode(text: str) -> list[str]:
    """The canonical tokens of a text; joined they are the text."""
    return [sys.intern(piece) for piece in _PIECE.findall(text)]


def encode_pieces(pieces: list[str]) -> list[str]:
    """Tokens of a text that was generated in these pieces; canonical if there is only one."""
    return [token for piece in pieces for token in encode(piece)]


def is_special(token: str) -> bool:
    """Whether the token is a control token (it is never shown as text)."""
    return _SPECIAL.fullmatch(token) is not None


def token_id(token: str) -> int:
    """A number for it, where an API returns numbers."""
    return zlib.crc32(token.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF


def tokenizer_json() -> str:
    """A tokenizer.json that counts as ``encode`` does; its ids mean nothing."""
    made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE.pattern), "isolated")
    return str(made.to_str())
