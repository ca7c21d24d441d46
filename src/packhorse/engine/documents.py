"""Documents that are kept: read once, named by an id, and gone on from by every later question about them. No torch.

text.Document --read_as_prompt--> tokens --a request reads them--> pages on disk --keep--> StoredDocument
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from packhorse.store.documents import (
    NewDocument,
    StoredDocument,
    add_document,
    check_fits,
    check_written,
    documents_of,
    find_document,
    owner_of,
    root_of,
)
from packhorse.store.durable import DurableStore
from packhorse.store.prefix import encode_tokens
from packhorse.text.documents import Document, Page, Prompt, document_text
from packhorse.text.template import ChatTemplate, mark_positions
from packhorse.text.tokenizer import Tokenizer, text_marks

if TYPE_CHECKING:
    from packhorse.engine.engine import Engine
    from packhorse.store.kv import KVStore
    from packhorse.store.lower import LowerTiers


@dataclass(frozen=True)
class Reading:
    """A document as the beginning of a prompt. token_ids: with a question in place of those to come. marks: as in
    Request. length: tokens up to the document's end."""

    token_ids: tuple[int, ...]
    marks: tuple[int, ...]
    length: int


def read_as_prompt(
    document: Document, tokenizer: Tokenizer, template: ChatTemplate | None, options: Mapping[str, Any]
) -> Reading:
    """The prompt that reads a document just as one with a question about it does (`compose`). template: None
    continues plain text. Raises what `ChatTemplate.render` raises."""
    whole = document_text(document)
    # A blank at a question's beginning is another token together with those of the document's end: the first mark is
    # before them all.
    text = whole.rstrip()
    prompt = Prompt(whole + "?", (len(text), len(whole), len(whole) + 1))
    if template is None:
        ids, marks = text_marks(tokenizer, prompt.text, prompt.ends)
    else:
        chat = [{"role": "user", "content": prompt.parts}]
        ids, marks = mark_positions(template, tokenizer, chat, **options)
    return Reading(tuple(ids), marks, marks[0])


def keep(
    engine: Engine,
    document: Document,
    reading: Reading,
    *,
    tenant: str = "",
    pinned: bool = False,
    lifetime: float | None = None,
    renew: bool = True,
) -> Future[StoredDocument]:
    """Have a document noted on disk, after what has been read until now. From the engine's thread; needs a disk
    store. The future raises what `check_written` and `add_document` raise. pinned, lifetime, renew: as in
    NewDocument."""
    lower = engine.store.lower
    assert lower is not None
    new = replace(_new(lower, document, reading, tenant), pinned=pinned, lifetime=lifetime, renew=renew)
    return lower.after_writing(partial(_note, engine.store, lower, new))


def check_room(engine: Engine, document: Document, reading: Reading, tenant: str) -> None:
    """Raises DoesNotFitError where the store has no room for a document that is about to be read. From the engine's
    thread; needs a disk store."""
    lower = engine.store.lower
    assert lower is not None and lower.disk is not None
    new = _new(lower, document, reading, tenant)
    check_fits(lower.disk, lower.model, new, _need(engine.store, lower, new))


def _new(lower: LowerTiers, document: Document, reading: Reading, tenant: str) -> NewDocument:
    assert lower.disk is not None
    return NewDocument(
        root=root_of(lower.disk, lower.model, tenant),
        owner=owner_of(lower.disk, tenant),
        name=document.name,
        text=document.text,
        pages=tuple((page.number, page.start, page.end) for page in document.pages),
        tokens=encode_tokens(reading.token_ids[: reading.length]),
    )


def _need(store: KVStore, lower: LowerTiers, new: NewDocument) -> int:
    """Bytes of its pages and state; 0 for what is so short that its text alone is kept."""
    geometry, disk = store.geometry, lower.disk
    assert disk is not None
    num_pages = len(new.tokens) // disk.page_bytes(lower.model)
    if num_pages < lower.min_pages:
        return 0
    return num_pages * geometry.codec.page_bytes * len(geometry.full_layers) + geometry.state_bytes


def _note(store: KVStore, lower: LowerTiers, new: NewDocument) -> StoredDocument:
    disk, need = lower.disk, _need(store, lower, new)
    assert disk is not None
    if need:
        check_written(disk, lower.model, new, need, with_state=store.geometry.is_hybrid)
    return add_document(disk, lower.model, new)


def tier_bytes(engine: Engine, stored: StoredDocument, tenant: str = "") -> dict[str, int]:
    """Bytes of a document's pages and states by tier. From the engine's thread."""
    store, prefix = engine.store, stored.prefix
    geometry, lower = store.geometry, store.lower
    assert lower is not None
    ids = memoryview(prefix.tokens).cast("I").tolist()
    entries = store.match([*ids, 0], tenant.encode()).entries  # a match leaves one token to be read
    pages = (
        sum(len(entry.page_ids) for entry in entries) * geometry.codec.page_bytes * len(geometry.full_layers)
    )
    states = sum(entry.snapshot is not None for entry in entries) * geometry.state_bytes
    return {"device": pages + states, **lower.bytes_of(prefix.root, prefix.tokens)}


def as_text(stored: StoredDocument) -> Document:
    """The document as it was read from its file."""
    pages = tuple(Page(number, start, end) for number, start, end in stored.pages)
    return Document(stored.prefix.label, stored.text, pages)


def find(disk: DurableStore, model: int, tenant: str, name: str) -> StoredDocument | None:
    """A tenant's document of that id with a model, None where there is none."""
    found = find_document(disk, owner_of(disk, tenant), name)
    return found if found is not None and found.prefix.model == model else None


def listed(disk: DurableStore, model: int, tenant: str) -> list[StoredDocument]:
    """A tenant's documents with a model, the last used first."""
    return documents_of(disk, model, owner_of(disk, tenant))
