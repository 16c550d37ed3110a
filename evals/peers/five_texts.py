"""Writes five texts of different kinds, on which :mod:`quality` compares: ``--text DIR/*.txt``.

    apt-get download manpages-de && dpkg-deb -x manpages-de_*.deb MAN
    python evals/peers/five_texts.py --model smollm2 --wikitext wiki.test.raw --novel NOVEL \\
        --chats CHATS.jsonl --manpages MAN/usr/share/man/de --out DIR

An encyclopedia, a novel, conversations as the model's chat template writes them, the sources of Python's
standard library, and manual pages in German. The first two are copied as they are. ``mixed.txt`` has parts of
all five in turn, for commands that read the beginning of one text.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sysconfig
from pathlib import Path

from quantkit.quantization.calibration.files import DataFile, local_files, read_files, some_of
from quantkit.sources.open import open_source
from quantkit.text.tokenizer import Tokenizer

CHARACTERS = 1_000_000
"""Of a text, at most."""
PART = 4000
"""Characters of a text in ``mixed.txt``, until the next one's turn."""
SHORTEST = 2000
"""Characters of a manual page that counts: shorter ones only name another."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose chat template writes conversations")
    parser.add_argument("--wikitext", type=Path, required=True)
    parser.add_argument("--novel", type=Path, required=True)
    parser.add_argument("--chats", type=Path, required=True, help="a .jsonl of conversations")
    parser.add_argument("--manpages", type=Path, required=True, help="folder with man1 to man8")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = {"wikitext": args.wikitext.read_text(encoding="utf-8"),
             "novel": args.novel.read_text(encoding="utf-8"),
             "chats": chats(args.model, args.chats), "code": standard_library(),
             "german": manual_pages(args.manpages)}
    texts["mixed"] = mixed(list(texts.values()))
    for name, text in texts.items():
        (args.out / f"{name}.txt").write_text(text[:CHARACTERS], encoding="utf-8")
        print(f"{name}.txt: {min(len(text), CHARACTERS):,} characters")


def mixed(texts: list[str]) -> str:
    """Parts of all texts in turn, until one of them ends."""
    return "\n\n".join(text[start:start + PART] for start in range(0, min(map(len, texts)) - PART + 1, PART)
                       for text in texts)


def chats(model: str, path: Path) -> str:
    """Conversations, one after another, in the form in which the model reads them."""
    source = open_source(model)
    tokenizer = Tokenizer(source.side_files(), source.config())
    files = [file for file in some_of(local_files(str(path)), CHARACTERS, 0) if isinstance(file, DataFile)]
    documents = [document for _, rows in read_files(files, CHARACTERS) for document in rows]
    return "".join(tokenizer.chat_text(document.content, answer=False) for document in documents
                   if not isinstance(document.content, str))


def standard_library() -> str:
    """The modules of the running Python's standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace")
                       for path in sorted(folder.glob("*.py")))


def manual_pages(folder: Path) -> str:
    """Pages without their markup: comments, fonts and the names of macros."""
    pages = []
    for path in sorted(folder.glob("man[1-8]/*.gz")):
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            page = file.read()
        page = re.sub(r"^[.']\\\".*$", "", page, flags=re.MULTILINE)
        page = re.sub(r"\\f[A-Z]|\\f\(..|\\[&,/]", "", page).replace("\\-", "-")
        page = re.sub(r"^\.[A-Za-z]+ ?", "", page, flags=re.MULTILINE)
        if len(page) > SHORTEST:
            pages.append(page)
    return "\n\n".join(pages)


if __name__ == "__main__":
    main()
