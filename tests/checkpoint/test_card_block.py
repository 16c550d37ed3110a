"""An evaluation in a model card, put in and taken out."""

import hashlib
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.checkpoint.card_block import MAX_BLOCK, CardBlock, with_block, without_block
from quantkit.checkpoint.manifest import Manifest
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError
from quantkit.testing import tiny_model

CARD = b"---\ntags:\n- quantkit\n---\n\n# m\n\ntext\n\n## Recipe\n\n---\n\n## How to load it\n"
BLOCK = CardBlock("model-index:\n- name: m\n", "## Evaluation\n\n| a |\n")


def test_it_stands_in_the_head_and_before_the_first_section():
    assert with_block(CARD, BLOCK).decode() == (
        "---\ntags:\n- quantkit\n# quantkit:eval\nmodel-index:\n- name: m\n# /quantkit:eval\n---\n\n"
        "# m\n\ntext\n\n"
        "<!-- quantkit:eval -->\n## Evaluation\n\n| a |\n<!-- /quantkit:eval -->\n\n"
        "## Recipe\n\n---\n\n## How to load it\n")


@given(st.binary(max_size=40), st.text(alphabet="ab# -\n<>!", max_size=30))
def test_what_is_put_in_can_be_taken_out(tail, text):
    card = CARD[:CARD.index(b"\n\n## Recipe")] + tail
    try:
        inserted = with_block(card, CardBlock(text, text))
    except (ValueError, CheckpointError):
        return
    assert without_block(inserted) == without_block(card)
    assert inserted != card


def test_a_newer_one_replaces_it():
    newer = CardBlock("model-index: []", "## Evaluation\n\nnewer")
    assert with_block(with_block(CARD, BLOCK), newer) == with_block(CARD, newer)
    assert without_block(CARD) == CARD and without_block(b"") == b""


@pytest.mark.parametrize("block", [CardBlock("a: 1\n---\n", "b"), CardBlock("a: 1", "<!-- quantkit:eval -->"),
                                   CardBlock("# /quantkit:eval", "b"), CardBlock("a: 1", "b" * MAX_BLOCK)])
def test_a_block_that_could_not_be_taken_out(block):
    with pytest.raises(ValueError):
        with_block(CARD, block)


@pytest.mark.parametrize("card", [b"", b"# m\n", b"---\ntags:\n"])
def test_a_card_without_a_head(card):
    with pytest.raises(CheckpointError, match="no YAML head"):
        with_block(card, BLOCK)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    return quantize(str(tiny_model(folder / "tiny")), "int8", folder / "out").out


def test_verify_takes_the_evaluation_out_and_nothing_else(checkpoint, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(checkpoint, folder)
    card = (folder / "README.md").read_bytes()
    (folder / "README.md").write_bytes(with_block(card, BLOCK))
    report = verify(folder)
    assert report.ok
    (check,) = (check for check in report.checks if check.name == "README.md")
    record = Manifest.from_bytes((folder / "quantkit.json").read_bytes()).files["README.md"]
    assert "with an evaluation" in check.detail and record.sha256 in check.detail
    assert record.sha256 == hashlib.sha256(card).hexdigest()
    inserted = with_block(card, BLOCK)
    huge = b"<!-- quantkit:eval -->\n" + b"x" * 2 * MAX_BLOCK + b"<!-- /quantkit:eval -->\n\n"
    for changed in (inserted + b"x", card + b"x", inserted.replace(b"int8", b"int4"), card + huge):
        (folder / "README.md").write_bytes(changed)
        assert [check.name for check in verify(folder).failed] == ["README.md"]
    (folder / "README.md").write_bytes(card)
    (folder / "config.json").write_bytes(with_block(CARD, BLOCK))
    assert "config.json" in [check.name for check in verify(folder).failed], "only the card may have one"
