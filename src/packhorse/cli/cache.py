"""packhorse cache: what a store holds, for people. Imports no torch."""

from __future__ import annotations

import time
from array import array
from enum import StrEnum
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from packhorse.cli import asking, common
from packhorse.cli.common import check_file, find_model, note, option, print_json
from packhorse.core.errors import CorruptFileError, PackhorseError, RefusedError, UsageError
from packhorse.core.units import format_bytes
from packhorse.facts.read import read_model
from packhorse.store.documents import find_document, root_of
from packhorse.store.durable import MIN_TOKENS, DurableStore, Prefix, wipe
from packhorse.store.export import export_prefix, import_prefix
from packhorse.text.documents import Document, compose
from packhorse.text.template import ChatTemplate, mark_positions
from packhorse.text.tokenizer import Tokenizer
from packhorse.text.volatile import find_volatile, volatile_kind

SHOWN_CHARS = 240
"""Of a text that is shown."""
MIN_ID = 4
"""Of an id's characters, beside the doc- of documents."""
MIN_PASSPHRASE = 16
"""Bytes."""


class Action(StrEnum):
    """What is done with a store."""

    LS = "ls"
    SHOW = "show"
    PIN = "pin"
    UNPIN = "unpin"
    RM = "rm"
    WHY = "why"
    EXPORT = "export"
    IMPORT = "import"
    VERIFY = "verify"
    WIPE = "wipe"


TARGETS = {
    Action.LS: (), Action.SHOW: ("ID",), Action.PIN: ("ID",), Action.UNPIN: ("ID",), Action.RM: ("ID",),
    Action.EXPORT: ("ID", "FILE"), Action.IMPORT: ("FILE",), Action.WHY: ("MODEL", "QUESTION"),
    Action.VERIFY: (), Action.WIPE: (),
}  # fmt: skip

ActionArgument = Annotated[
    Action,
    typer.Argument(
        help="ls: what was read. show, pin, unpin, rm: one of these. why: where a question (as in ask) parts from "
        "what is stored. export, import: one of these as a file. verify: read and check every file. wipe: delete all."
    ),
]
TargetArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID | FILE | MODEL QUESTION]", help="An id that ls shows, a file; for why a question."
    ),
]
KeyFileOption = Annotated[
    Path | None,
    option("--key-file", "FILE", "A passphrase of export, import. [default: the store's secret, good there alone]"),
]  # fmt: skip
RequestOption = Annotated[
    Path | None, option("--request", "FILE", "For why: the body of a chat request, not a question.")
]
StoreOption = Annotated[Path, option("--store", "DIR", "The store's folder.")]


def command(
    action: ActionArgument,
    store: StoreOption,
    target: TargetArgument = None,
    document: asking.DocumentOption = None,
    key_file: KeyFileOption = None,
    request: RequestOption = None,
    json: common.JsonOption = False,
    cache: common.CacheOption = None,
    offline: common.OfflineOption = False,
) -> None:
    """Every action prints what it found or did; verify ends with exit code 4 where a file is damaged."""
    given, wanted = target or [], TARGETS[action]
    if request is not None:
        if action is not Action.WHY or document:
            raise UsageError("--request is for cache why alone, without --document.", hint="Leave it out.")
        wanted = wanted[:1]
    if len(given) != len(wanted):
        raise UsageError(
            f"cache {action} takes {' and '.join(wanted) or 'no target'}, and {len(given)} were given.",
            hint="See `packhorse cache --help`.",
        )
    if document and action is not Action.WHY:
        raise UsageError("--document is for cache why alone.", hint="Leave it out.")
    if key_file is not None and action not in (Action.EXPORT, Action.IMPORT):
        raise UsageError("--key-file is for cache export and import alone.", hint="Leave it out.")
    passphrase = None if key_file is None else read_passphrase(key_file)
    if action is Action.WIPE:
        wipe(store)
        found: dict[str, Any] = {"deleted": str(store)}
    else:
        if not (store / "secret").is_file():
            hint = f"Give --store the folder of one; to import, first: packhorse ask MODEL --store {store} QUESTION"
            raise UsageError(f"{store} is no store.", hint=hint)
        # The quota is the writers' affair, and so is a damaged index: nothing is evicted or emptied here.
        opened = DurableStore(store, quota=1 << 62, may_empty=False)
        try:
            if action is Action.WHY:
                if request is not None:
                    chat = read_request(opened, request)
                else:
                    prompt = compose(asking.read_documents(document or [], note), given[1])
                    chat = {"messages": [{"role": "user", "content": prompt.parts}]}
                found = why(opened, find_model(given[0], cache, offline), chat)
            elif action is Action.IMPORT:
                found = import_prefix(opened, Path(given[0]), passphrase)
            elif action is Action.EXPORT:
                prefix = find_prefix(opened, given[0])
                check_file(Path(given[1]))
                if not describe(opened, prefix)["stored_tokens"]:
                    note("Warning: no page of it is stored: whoever imports it reads its text anew.")
                size = export_prefix(opened, prefix, Path(given[1]), passphrase)
                found = {**describe(opened, prefix), "file": given[1], "file_bytes": size}
            else:
                found = act(opened, action, given)
        finally:
            opened.close()
    if json:
        print_json(found)
    else:
        show(found)
    if damaged := found.get("damaged"):  # not raised: with --json that would print a second document
        files, what = ("file", "is") if len(damaged) == 1 else ("files", "are")
        note(f"Error: {len(damaged)} {files} of {store} {what} damaged: {', '.join(damaged)}.")
        note("What is damaged is passed over, and replaced when its text is read again.")
        raise typer.Exit(CorruptFileError.exit_code)


def act(store: DurableStore, action: Action, given: list[str]) -> dict[str, Any]:
    """Do what was asked; a JSON-ready document of what was found or done."""
    if action is Action.LS:
        found: dict[str, list[dict[str, Any]]] = {"documents": [], "prefixes": []}
        for prefix in store.prefixes():
            found["documents" if prefix.document else "prefixes"].append(describe(store, prefix))
        return {**store.usage(), **found}
    if action is Action.VERIFY:
        damaged = {str(path): reason for path, reason in store.verify()}
        return {**store.usage(), "damaged": damaged}
    prefix = find_prefix(store, given[0])
    described = describe(store, prefix)
    if action is Action.SHOW:
        text: dict[str, Any] = {"text": stored_text(store, prefix)}
        document = find_document(store, None, prefix.document or "")
        if document is not None:
            text = {"pages": [list(page) for page in document.pages], "text": shortened(document.text)}
        return {**described, **store.models()[prefix.model], **text}
    if action is Action.RM:
        if prefix.pinned:
            hint = f"packhorse cache unpin {described['id']} --store {store.folder}"
            raise RefusedError(f"{described['id']} ({prefix.label}) is pinned.", hint=f"First: {hint}")
        return {**described, "freed_bytes": store.remove(prefix)}
    store.set_pinned(prefix, action is Action.PIN)
    return {**described, "pinned": action is Action.PIN}


def read_passphrase(path: Path) -> bytes:
    """Raises UsageError where the file cannot be read or is too short to keep anybody out."""
    try:
        passphrase = path.read_bytes().strip()
    except OSError as error:
        hint = "Check the path."
        raise UsageError(f"The key file {path} cannot be read: {error.strerror}.", hint=hint) from error
    if len(passphrase) < MIN_PASSPHRASE:
        raise UsageError(
            f"The passphrase in {path} has {len(passphrase)} bytes, and {MIN_PASSPHRASE} are the least.",
            hint="Make one: openssl rand -hex 24",
        )
    return passphrase


def find_prefix(store: DurableStore, name: str) -> Prefix:
    """The prefix of an id that `ls` shows, or of its beginning. Raises UsageError where none or several are, or where
    so little of it was given that it may as well have been meant for something else."""
    if len(name.removeprefix("doc-")) < MIN_ID:
        hint = f"Give {MIN_ID} characters of it at least, beside doc-: `packhorse cache ls` shows ids."
        raise UsageError(f"{name!r} is too little of an id.", hint=hint)
    found = [p for p in store.prefixes() if (p.document or p.key.hex()).startswith(name)]
    if len(found) != 1:
        raise UsageError(
            f"{len(found) or 'No'} stored prefix{'es begin' if found else ' begins'} with {name!r}.",
            hint="`packhorse cache ls` shows their ids.",
        )
    return found[0]


def describe(store: DurableStore, prefix: Prefix) -> dict[str, Any]:
    """A prefix as a JSON-ready document. bytes: of all that it needs, shared or not. stored_tokens: of its tokens
    those whose pages are there; lost_tokens: those whose pages are not, none where it is text_only, too short to have
    any. computes_in, kv: how it was read. for_a_key: it is a server's, read for a bearer key."""
    records = store.records_of(prefix)
    page_bytes = store.page_bytes(prefix.model)
    whole = len(prefix.tokens) // page_bytes * page_bytes // 4  # what pages hold
    stored = min(whole, max((r.stop for r in records), default=0))
    about, text_only = store.models()[prefix.model], not stored and whole < MIN_TOKENS
    return {
        "id": prefix.document or prefix.key.hex()[:12],
        "label": prefix.label,
        "model": about["name"],
        **{name: about[name] for name in ("computes_in", "kv") if name in about},
        "tokens": len(prefix.tokens) // 4,
        "stored_tokens": stored,
        "lost_tokens": 0 if text_only else whole - stored,
        "text_only": text_only,
        "bytes": sum(r.num_bytes for r in records),
        "pinned": bool(prefix.pinned),
        "for_a_key": prefix.root != root_of(store, prefix.model, ""),
        "asked": prefix.hits + 1,
        "last_used": time.strftime("%Y-%m-%d %H:%M", time.localtime(prefix.used)),
    }


def stored_text(store: DurableStore, prefix: Prefix) -> str:
    """How the prefix begins and ends, where its model's tokenizer is still there."""
    try:
        tokenizer = Tokenizer.load(read_model(Path(store.models()[prefix.model]["path"])))
    except PackhorseError as error:
        note(f"The text is not shown: {error}")
        return ""
    return shortened(tokenizer.decode(list(array("I", prefix.tokens)), skip_special=False))


def shortened(text: str) -> str:
    """How a long text begins and ends."""
    half = SHOWN_CHARS // 2
    return text if len(text) <= SHOWN_CHARS else f"{text[:half]} [...] {text[-half:]}"


def read_request(store: DurableStore, file: Path) -> dict[str, Any]:
    """Messages and tools of a chat request's body, with documents of the store where they are named, whoever's they
    are. Raises CorruptFileError where the file cannot be read or holds none."""
    from packhorse.engine.documents import as_text
    from packhorse.server.attach import attach
    from packhorse.server.errors import ApiError
    from packhorse.server.prompt import ask_for_quotes, plain_message
    from packhorse.server.schema import TokenizeRequest, validate

    def find(name: str) -> Document:
        found = find_document(store, None, name)
        if found is None:
            raise UsageError(f"{store.folder} has no document {name!r}.", hint="See `packhorse cache ls`.")
        return as_text(found)

    try:
        body = loads(file.read_bytes())
        asked, _ = validate(TokenizeRequest, {name: body.get(name) for name in ("messages", "tools")})
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        messages, _, cite = attach([plain_message(m) for m in asked.messages or ()], find)
        if cite or body.get("citations"):
            ask_for_quotes(messages)
        return {"messages": messages, "tools": tools or None}
    except OSError as error:
        raise CorruptFileError(f"{file} cannot be read: {error.strerror}.", hint="Check the path.") from error
    except (ValueError, AttributeError, ApiError) as error:
        reason = getattr(error, "message", "it holds no JSON object.")
        raise CorruptFileError(
            f"{file} is no chat request: {reason}", hint="Give its body as JSON."
        ) from error


def why(store: DurableStore, path: Path, chat: dict[str, Any]) -> dict[str, Any]:
    """The stored prefix that a chat goes furthest with, whoever's it is and however it was computed, where and how
    they part, and how it, and others that go as far, were computed. chat: messages and tools."""
    facts = read_model(path)
    tokenizer = Tokenizer.load(facts)
    template = ChatTemplate.load(facts, tokenizer, None)
    ids, _ = mark_positions(template, tokenizer, **chat)
    agreed: dict[int, list[Prefix]] = {}
    for prefix in store.prefixes():
        if store.models()[prefix.model]["name"] == facts.name:
            pairs = zip(ids, array("I", prefix.tokens), strict=False)
            length = next((i for i, (a, b) in enumerate(pairs) if a != b), len(prefix.tokens) // 4)
            agreed.setdefault(min(len(ids), length), []).append(prefix)
    if not agreed:
        reason = f"nothing of {facts.name} is stored"
        return {"tokens": len(ids), "agreed_tokens": 0, "reused_tokens": 0, "reason": reason}
    length = max(agreed)
    counts = [reusable(store, prefix, ids, facts.is_hybrid) for prefix in agreed[length]]
    prefix = agreed[length][counts.index(max(counts))]
    described, page_len = describe(store, prefix), store.page_bytes(prefix.model) // 4
    prompt = tokenizer.decode(ids, skip_special=False)
    position = len(tokenizer.decode(ids[:length], skip_special=False))
    line = prompt[prompt.rfind("\n", 0, position) + 1 :].partition("\n")[0]
    kind = volatile_kind(line)
    stored = array("I", prefix.tokens)
    reason = "the texts differ" if kind is None else f"a line that changes each time ({kind})"
    if length == len(stored):
        reason = "all that is stored agrees"
    if not any(counts):
        cause = (
            f"no page of {page_len} tokens agrees" if length < page_len else "no page or state of it is there"
        )
        cause = f"under {MIN_TOKENS} tokens the text alone is stored" if described["text_only"] else cause
        reason += f", and nothing is reused: {cause}"
    abouts = [store.models()[other.model] for other in agreed[length]]
    ways = {f"{about.get('computes_in', '?')}, K and V in {about.get('kv', '?')}" for about in abouts}

    def text(tokens: Any) -> str:
        return tokenizer.decode(list(tokens), skip_special=False)

    return {
        **described,
        "tokens": len(ids),
        "agreed_tokens": length,
        "reused_tokens": max(counts),
        "position": position,
        "volatile": [f"{v.kind} at {v.position}: {v.text}" for v in find_volatile(prompt)],
        "reason": reason,
        "only_for": f"requests in {', or in '.join(sorted(ways))}",
        "after": text(ids[max(0, length - 24) : length]),
        "asked_text": text(ids[length : length + 24]),
        "stored_text": text(stored[length : length + 24]),
    }


def reusable(store: DurableStore, prefix: Prefix, ids: list[int], hybrid: bool) -> int:
    """Tokens of a prompt that a request of a prefix's model and key goes on from; hybrid: where a state is."""
    walked = store.walk(prefix.model, prefix.root, array("I", ids[:-1]).tobytes())
    there = store.states(walked.keys) if hybrid else {walked.keys[-1]}
    pages = max((page for page, key in enumerate(walked.keys) if key in there), default=0)
    return pages * store.page_bytes(prefix.model) // 4


def show(found: dict[str, Any]) -> None:
    """Print a document as lines for people."""
    prefixes = (*found.get("documents", ()), *found.get("prefixes", ()))
    if prefixes:
        print(f"{'id':<36}  {'tokens':>9}  {'size':>11}  {'last used':<16}  model (computes in; KV)  name")
    for prefix in prefixes:
        lost = f"  {prefix['lost_tokens']:,} tokens of it are not stored" if prefix["lost_tokens"] else ""
        lost = f"  text only (under {MIN_TOKENS} tokens)" if prefix["text_only"] else lost
        print(
            f"{prefix['id']:<36}  {prefix['tokens']:>9,}  {format_bytes(prefix['bytes']):>11}  "
            f"{prefix['last_used']}  {'pinned  ' if prefix['pinned'] else ''}{prefix['model']} "
            f"({prefix.get('computes_in', '?')}; {prefix.get('kv', '?')})  {prefix['label']}{lost}"
        )
    if prefixes:
        print("What several of these share is in the size of each.")
    for name, value in found.items():
        if name == "damaged":
            print(f"damaged: {len(value)}")
        elif name not in ("documents", "prefixes"):
            print(f"{name}: {format_bytes(value) if name.endswith('bytes') else value}")
