"""An evaluation in a checkpoint's ``README.md``, inserted so that it can be taken out to the byte.

The manifest has the hash of the card as the checkpoint was written with it. The evaluation comes later, and
is of a checkpoint with just that manifest, so it can't change it. It therefore stands between two pairs of
markers, and ``quantkit verify`` hashes what is left without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.support.errors import CheckpointError

OPENING, CLOSING = b"<!-- quantkit:eval -->\n", b"<!-- /quantkit:eval -->\n\n"
MAX_BLOCK = 2**20
"""Bytes of an evaluation in a card; a real one has a hundredth of that."""
_YAML_OPENING, _YAML_CLOSING = b"# quantkit:eval\n", b"# /quantkit:eval\n"
_HEAD = b"---\n"
_HEAD_END = b"\n---\n"
_SECTION = b"\n## "


@dataclass(frozen=True)
class CardBlock:
    """What is known of a checkpoint after it was evaluated.

    Attributes:
        metadata: YAML of the card's head, whole lines: ``model-index``, as the hub reads it.
        markdown: a section of the card, whole lines.
    """

    metadata: str
    markdown: str


def with_block(card: bytes, block: CardBlock) -> bytes:
    """The card with the evaluation, in its head and before its first section; an older one is replaced.

    Raises:
        CheckpointError: the card has no YAML head, or a marker without its other half.
        ValueError: the block has a marker in it, or is longer than :data:`MAX_BLOCK`.
    """
    metadata, markdown = (text.strip("\n").encode() + b"\n" for text in (block.metadata, block.markdown))
    markers = (OPENING, CLOSING, _YAML_OPENING, _YAML_CLOSING)
    if any(marker.strip() in part for marker in markers for part in (metadata, markdown)) or (
            _HEAD_END in b"\n" + metadata):
        raise ValueError("a marker stands inside of the block")
    if len(metadata) + len(markdown) > MAX_BLOCK // 2:
        raise ValueError("the block is too long")
    card = without_block(card)
    if any(marker in card for marker in markers):
        raise CheckpointError("README.md has one marker of an evaluation without the other",
                              why="the evaluation couldn't be taken out again",
                              next="remove the line that has quantkit:eval from it")
    end = card.find(_HEAD_END)
    if not card.startswith(_HEAD) or end < 0:
        raise CheckpointError("README.md has no YAML head", why="quantkit writes one",
                              next="quantkit quantize writes the checkpoint anew")
    head, body = card[:end + 1], card[end + 1:]
    section = body.find(_SECTION) + 1 or len(body)
    return b"".join((head, _YAML_OPENING, metadata, _YAML_CLOSING, body[:section], OPENING, markdown, CLOSING,
                     body[section:]))


def without_block(card: bytes) -> bytes:
    """The card without what :func:`with_block` inserted; one without an evaluation as it is."""
    end = card.find(_HEAD_END) + 1
    head, body = card[:end], card[end:]
    return _cut(head, _YAML_OPENING, _YAML_CLOSING) + _cut(body, OPENING, CLOSING)


def _cut(text: bytes, opening: bytes, closing: bytes) -> bytes:
    begin = text.find(opening)
    end = text.find(closing, begin + len(opening)) if begin >= 0 else -1
    return text if end < 0 else text[:begin] + text[end + len(closing):]
