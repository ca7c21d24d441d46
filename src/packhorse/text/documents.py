"""Documents as text with a page map, and the prompt that puts them before a question."""

from __future__ import annotations

import codecs
import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from packhorse.core.errors import DocumentError

SUFFIXES = (".txt", ".md", ".pdf")
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Page:
    """Characters `start .. end` of the document's text are page `number`, counted from 1."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Document:
    """Text of a file. A text file is one page; a PDF file's pages are parted by a blank line."""

    name: str
    text: str
    pages: tuple[Page, ...]

    @property
    def empty_pages(self) -> tuple[int, ...]:
        """Numbers of the pages without text: scanned, or blank."""
        return tuple(page.number for page in self.pages if page.start == page.end)

    def page_of(self, position: int) -> int:
        """Number of the page that the character at `position` is on; the last page behind the end."""
        starts = [page.start for page in self.pages]
        return self.pages[max(bisect_right(starts, position) - 1, 0)].number


class Prompt(NamedTuple):
    """A prompt's text, and where in it each part ends: one part a document, the last the question."""

    text: str
    ends: tuple[int, ...]

    @property
    def parts(self) -> list[dict[str, str]]:
        """The content of a user's message, a part for each end: chat templates keep the marks so."""
        starts = (0, *self.ends[:-1])
        texts = [self.text[start:end] for start, end in zip(starts, self.ends, strict=True)]
        return [{"type": "text", "text": text} for text in texts]


def read_document(path: Path | str) -> Document:
    """The text of a .txt, .md or .pdf file (other suffixes are read as text).

    Text is UTF-8, or UTF-16 with a byte order mark; line ends become \\n. Raises DocumentError where the file
    is missing, empty, a folder, in another encoding, encrypted, broken, or holds no text.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        hint = "Give its files one by one, each with --document."
        raise DocumentError(f"{path} is a folder.", hint=hint, path=str(path))
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise DocumentError(
            f"The document {path} cannot be read: {getattr(error, 'strerror', None) or error}.",
            hint="Check the path and its permissions.",
            path=str(path),
        ) from error
    return parse_document(path, data)


def parse_document(path: Path | str, data: bytes) -> Document:
    """The document that a file's bytes are: see `read_document`. path: names it, nothing is read there."""
    path = Path(path)
    if data.startswith(b"%PDF-") or path.suffix.lower() == ".pdf":
        return _read_pdf(path, data)
    return parse_text(path, data)


def parse_text(path: Path | str, data: bytes) -> Document:
    """The document that bytes of text are, whatever `path` ends with. Raises as `read_document` does."""
    path = Path(path)
    text = _decode(data, path).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DocumentError(f"The document {path} is empty.", hint="Give one with text.", path=str(path))
    return Document(path.name, text, (Page(1, 0, len(text)),))


def compose(documents: Sequence[Document], question: str) -> Prompt:
    """The documents, each under a line that names it, then the question.

    The question comes last, so that what stands before it is the same for every question and is read once.
    """
    pieces = [document_text(document) for document in documents]
    asked = question.strip()
    if documents:
        asked = f"Answer this question from the document{'s' * (len(documents) > 1)} above: {asked}"
    ends, total = [], 0
    for piece in [*pieces, asked]:
        total += len(piece)
        ends.append(total)
    return Prompt("".join([*pieces, asked]), tuple(ends))


def document_text(document: Document) -> str:
    """A document as a prompt holds it."""
    return f"Document {document.name}:\n\n{document.text.strip()}\n\n"


def _decode(data: bytes, path: Path) -> str:
    encoding = "utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig"
    if encoding == "utf-8-sig":
        _check_zero(data.find(0), path, "byte")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        offset = error.start + len(data) - len(error.object)  # the mark at the start is cut off first
        raise DocumentError(
            f"{path} is not valid {encoding.removesuffix('-sig').upper()}: byte {offset} "
            f"(0x{data[offset]:02x}) cannot be read.",
            hint=f"Convert it, for instance: iconv -f WINDOWS-1252 -t UTF-8 {path.name} > new.txt",
            path=str(path),
            offset=offset,
        ) from error
    _check_zero(text.find("\0"), path, "character")
    return text


def _check_zero(offset: int, path: Path, unit: str) -> None:
    """Raises DocumentError where a zero was found, which no text holds."""
    if offset >= 0:
        raise DocumentError(
            f"{path} looks like a binary file: {unit} {offset} is zero.",
            hint=f"Documents are {', '.join(SUFFIXES)} files: save or print it as one of them.",
            path=str(path),
            offset=offset,
        )


def _read_pdf(path: Path, data: bytes) -> Document:
    from pypdf import PdfReader

    # pypdf reports what it mends in a file, line by line; what it cannot read it raises.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    encrypted = False
    try:
        reader = PdfReader(BytesIO(data))
        encrypted = reader.is_encrypted
        # Many files are encrypted with an empty password, only to forbid printing.
        if encrypted and not reader.decrypt(""):
            raise ValueError("it needs a password")
        texts = [_whole_characters(page.extract_text()).strip() for page in reader.pages]
    except Exception as error:  # broken files make pypdf stumble in many ways, few of them its own errors
        if encrypted:
            hint = "Save a copy without a password and give that."
            raise DocumentError(f"{path} is encrypted: {error}.", hint=hint, path=str(path)) from error
        raise DocumentError(
            f"{path} cannot be read as a PDF file: {str(error).rstrip('.') or type(error).__name__}.",
            hint="Open it in a viewer and save or print it to a new PDF file, or convert it to text.",
            path=str(path),
        ) from error
    pages, position = [], 0
    for number, text in enumerate(texts, 1):
        pages.append(Page(number, position, position + len(text)))
        position += len(text) + 2
    document = Document(path.name, "\n\n".join(texts), tuple(pages))
    if not any(texts):
        raise DocumentError(
            f"{path} holds no text on any of its pages ({page_list(document.empty_pages)}): it is scanned.",
            hint="Run text recognition on it first, for instance: ocrmypdf in.pdf out.pdf",
            path=str(path),
            empty_pages=list(document.empty_pages),
        )
    return document


def _whole_characters(text: str) -> str:
    """`text` without the halves of characters that fonts with wrong tables leave: no tokenizer takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def page_list(numbers: Sequence[int]) -> str:
    """Page numbers for print, neighbours joined: 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
