"""A chain of the store, and its document, as one file: to be kept elsewhere, or read by another store. No torch.

    | MAGIC | image | image | ... | contents, JSON | salt, 16 | MAC, 32 | length of the contents, 8 |

The contents name the model's identity and hold the tokens, the document, and the BLAKE2b digest of each image. The
MAC is a BLAKE2b over them, keyed by the store's secret or by a passphrase that whoever imports must have: nothing of
a file is believed before it is checked. It hides nothing: the text is there to be read.
"""

from __future__ import annotations

import hmac
import json
import os
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b, scrypt
from pathlib import Path
from typing import Any, BinaryIO

from packhorse.core.errors import CorruptFileError, NotAuthenticError, PackhorseError, RefusedError
from packhorse.core.units import MIB
from packhorse.store.documents import NewDocument, add_document, find_document, no_room, owner_of, root_of
from packhorse.store.durable import DurableStore, Prefix
from packhorse.store.prefix import chain_value
from packhorse.store.records import (
    TOKEN_IDS,
    Image,
    Kind,
    Record,
    UnreadableError,
    agreed_pages,
    anonymous,
    chain_values,
)

MAGIC = b"packhorse export 1\n"
BATCH_BYTES = 32 * MIB
"""Written in one transaction."""
_SALT, _MAC, _LENGTH = 16, 32, 8
_TAIL = _SALT + _MAC + _LENGTH
_WANTED = "Give a file that `cache export` has written."


class _Chain:
    """A prefix of one store: its chain values at page boundaries, and records as they lie on it."""

    def __init__(self, disk: DurableStore, model: int, root: bytes, tokens: bytes) -> None:
        self.tokens = tokens
        self.page_bytes = disk.page_bytes(model)
        self.num_pages = len(tokens) // self.page_bytes
        chain = partial(chain_value, disk.secret)
        self.keys = [root, *chain_values(root, tokens, 0, self.num_pages, self.page_bytes, chain)]

    def place(self, image: Image) -> Image:
        """The image under the chain's own values, without pages that are not the prefix's: a record may go on
        behind its end, or part from it."""
        old, page_len = image.record, self.page_bytes // 4
        first, parts = old.start // page_len, dict(image.parts)
        if old.kind is Kind.STATE:
            made = Image.make(
                replace(old, parent=self.keys[first], key=self.keys[first]),
                {n: (len(v),) for n, v in parts.items()},
            )
        else:
            tokens, pages = parts.pop(TOKEN_IDS), len(old.tokens) // self.page_bytes
            count = agreed_pages(bytes(tokens), self.tokens, first, self.num_pages, self.page_bytes)
            stop, kept = first + count, old.tokens[: count * self.page_bytes]
            record = Record(old.kind, self.keys[first], self.keys[stop], old.start, stop * page_len, kept)
            made = Image.make(record, {name: (count, len(view) // pages) for name, view in parts.items()})
        for name, view in parts.items():
            made.parts[name][:] = view[: len(made.parts[name])]
        return made


def export_prefix(disk: DurableStore, prefix: Prefix, path: Path, passphrase: bytes | None) -> int:
    """Write a prefix with all that it needs; bytes of the file. passphrase: None takes the store's secret, so that
    only this store imports it again.

    Raises CorruptFileError where a record of it cannot be read, PackhorseError where the file cannot be written.
    """
    document = find_document(disk, None, prefix.document or "")
    about = disk.models()[prefix.model]
    contents: dict[str, Any] = {
        "identity": about["identity"], "name": about["name"], "page_len": about["page_len"],
        "label": prefix.label, "root": prefix.root.hex(), "tokens": b64encode(prefix.tokens).decode(), "images": [],
    }  # fmt: skip
    if document is not None:
        contents |= {"owner": document.owner.hex(), "text": document.text, "pages": document.pages}
        contents["expires"] = document.expires
    part = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
    try:
        if path.exists() and not (path.is_file() and _begins_as_one(path)):
            raise RefusedError(f"{path} is there and no export.", hint="Name another, or delete it.")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(MAGIC)
            chain = _Chain(disk, prefix.model, prefix.root, prefix.tokens)
            for record in disk.records_of(prefix):
                image = chain.place(disk.read(record))
                digest = blake2b(image.view, digest_size=32).hexdigest()
                contents["images"].append({"bytes": image.record.num_bytes, "digest": digest})
                stream.write(image.view)
            data, salt = json.dumps(contents).encode(), os.urandom(_SALT)
            stream.write(data + salt + _mac(_key(disk, passphrase, salt), data) + len(data).to_bytes(_LENGTH))
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        return path.stat().st_size
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror or error}."
        raise PackhorseError(
            reason, hint="Give a file on a disk that has room and may be written."
        ) from error
    except UnreadableError as error:
        raise CorruptFileError(
            f"A file of {prefix.label or 'this prefix'} is damaged: {error.reason}.",
            hint="`packhorse cache verify` names it; its text has to be read again.",
        ) from error
    finally:
        with suppress(OSError):  # nothing that went wrong before is hidden
            part.unlink()


def import_prefix(disk: DurableStore, path: Path, passphrase: bytes | None) -> dict[str, Any]:
    """Read an exported file into the store: its label, tokens and bytes, JSON-ready. passphrase: that of the export;
    None takes the store's secret, and then it is whose it was. Else it is for those who use no key.

    Raises NotAuthenticError where the MAC says no, RefusedError for files that are no export or of a model that the
    store does not know, CorruptFileError, DoesNotFitError.
    """
    try:
        with path.open("rb") as stream:
            contents = _contents(disk, path, stream, passphrase)
            return _take(disk, path, stream, contents, same_store=passphrase is None)
    except OSError as error:
        raise RefusedError(f"{path} cannot be read: {error.strerror or error}.", hint=_WANTED) from error


def _contents(disk: DurableStore, path: Path, stream: BinaryIO, passphrase: bytes | None) -> dict[str, Any]:
    """What the file says of itself, authenticated."""
    size = os.fstat(stream.fileno()).st_size
    if size < len(MAGIC) + _TAIL or stream.read(len(MAGIC)) != MAGIC:
        raise RefusedError(f"{path} is no export of a store.", hint=_WANTED)
    stream.seek(size - _TAIL)
    tail = stream.read(_TAIL)
    salt, mac, length = tail[:_SALT], tail[_SALT:-_LENGTH], int.from_bytes(tail[-_LENGTH:])
    data = b""
    if length <= size - len(MAGIC) - _TAIL:
        stream.seek(size - _TAIL - length)
        data = stream.read(length)
    if not hmac.compare_digest(_mac(_key(disk, passphrase, salt), data), mac):
        raise NotAuthenticError(
            f"{path} was not written with this {'passphrase' if passphrase else 'store'}, or was changed since.",
            hint="Give the passphrase of the export with --key-file."
            if passphrase is None
            else "Check --key-file.",
        )
    contents: dict[str, Any] = json.loads(data)
    return contents


def _take(
    disk: DurableStore, path: Path, stream: BinaryIO, contents: dict[str, Any], *, same_store: bool
) -> dict[str, Any]:
    models = {about["identity"]: (number, about) for number, about in disk.models().items()}
    model, about = models.get(contents["identity"], (0, {}))
    if about.get("page_len") != contents["page_len"]:
        raise RefusedError(
            f"{path} was read by {contents['name']} as it was on another machine, or by another model: this store "
            "knows none of that identity (weights, tokenizer, types, codec).",
            hint="Ask that model something with this --store first, with the same --dtype, --kv and --device.",
        )
    total = sum(entry["bytes"] for entry in contents["images"])
    if total > disk.room():
        raise no_room(f"{path} holds", total, disk.room(), "Make room on the disk.")
    root = bytes.fromhex(contents["root"]) if same_store else root_of(disk, model, "")
    tokens = b64decode(contents["tokens"])
    chain = _Chain(disk, model, root, tokens)
    stream.seek(len(MAGIC))
    batch: list[Image] = []
    for entry in contents["images"]:
        batch.append(chain.place(_image(path, stream, entry)))
        if sum(image.record.num_bytes for image in batch) >= BATCH_BYTES:
            _write(disk, model, batch)
            batch = []
    _write(disk, model, batch)
    if "text" in contents:
        owner = bytes.fromhex(contents["owner"]) if same_store else owner_of(disk, "")
        pages = tuple((number, start, end) for number, start, end in contents["pages"])
        expires = contents["expires"]
        lifetime = None if expires is None else max(0.0, expires - disk.files.now())
        label, text = contents["label"], contents["text"]
        new = NewDocument(root, owner, label, text, pages, tokens, lifetime=lifetime, renew=False)
        name = add_document(disk, model, new).id
    else:
        disk.note_prefix(model, root, chain.keys[-1], tokens, contents["label"])
        name = chain.keys[-1].hex()[:12]
    return {"id": name, "label": contents["label"], "tokens": len(tokens) // 4, "bytes": total}


def _begins_as_one(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _image(path: Path, stream: BinaryIO, entry: dict[str, Any]) -> Image:
    """The next image. Raises CorruptFileError where it is not the one that was exported."""
    buffer = anonymous(entry["bytes"])
    view = memoryview(buffer)[: entry["bytes"]]
    # Where the file is short the rest stays zero, and the digest is another.
    stream.readinto(view)  # type: ignore[attr-defined]
    if blake2b(view, digest_size=32).hexdigest() != entry["digest"]:
        raise CorruptFileError(f"{path} was changed since it was written.", hint="Export it again.")
    return Image.parse(buffer, entry["bytes"])


def _write(disk: DurableStore, model: int, batch: list[Image]) -> None:
    if batch and not disk.write(model, batch):
        reason = f"The store could not keep what was imported: {disk.trouble}."
        raise PackhorseError(reason, hint="Import it again when that is mended.")


def _key(disk: DurableStore, passphrase: bytes | None, salt: bytes) -> bytes:
    if passphrase is None:
        return blake2b(salt, digest_size=32, key=disk.secret, person=b"export").digest()
    return scrypt(passphrase, salt=salt, n=1 << 14, r=8, p=1, dklen=32)


def _mac(key: bytes, data: bytes) -> bytes:
    return blake2b(MAGIC + data, digest_size=_MAC, key=key).digest()
