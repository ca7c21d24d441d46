"""One tree of errors. Each carries what was wrong, with both numbers or names, and what to change.

`exit_code` is the command line's exit code: 1 failure, 2 usage, 3 does not fit, 4 model or file refused,
5 network. `facts` holds the numbers and names for `--json` and the server.
"""

from __future__ import annotations

from typing import ClassVar


class PackhorseError(Exception):
    """Base of every error that a user can cause.

    `reason` says what is wrong, `hint` what to change. Both are whole sentences.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "failure"
    usual_hint: ClassVar[str] = ""
    """What to change where nothing else is said."""

    def __init__(self, reason: str, *, hint: str = "", **facts: object) -> None:
        hint = hint or self.usual_hint
        super().__init__(f"{reason} {hint}".strip())
        self.reason = reason
        self.hint = hint
        self.facts = facts


class UsageError(PackhorseError):
    """An option or a request field holds a value that means nothing."""

    exit_code = 2
    kind = "usage"


class InvalidRequestError(UsageError):
    """A request that no engine could serve: empty prompt, NaN temperature, bad role."""

    kind = "invalid_request"


class DoesNotFitError(PackhorseError):
    """More was asked for than there is. Carries `asked` and `available` in `unit`."""

    exit_code = 3
    kind = "does_not_fit"

    def __init__(
        self, reason: str, *, asked: int, available: int, unit: str = "bytes", hint: str = ""
    ) -> None:
        super().__init__(reason, hint=hint, asked=asked, available=available, unit=unit)
        self.asked = asked
        self.available = available
        self.unit = unit


class PromptTooLongError(DoesNotFitError):
    """The prompt, or the prompt and what may be generated, is longer than the window."""

    kind = "prompt_too_long"


class RefusedError(PackhorseError):
    """A model or a file that Packhorse will not use."""

    exit_code = 4
    kind = "refused"


class CorruptFileError(RefusedError):
    """A file whose bytes contradict themselves or its size."""

    kind = "corrupt_file"
    usual_hint = "The file is damaged or was not fetched whole: fetch it again."


class NotAuthenticError(RefusedError):
    """A file that whoever holds the secret has not written, or that was changed since."""

    kind = "not_authentic"


class UnsupportedModelError(RefusedError):
    """A model, or a feature of one, that is not built."""

    kind = "unsupported_model"
    usual_hint = "Choose another model."


class WeightsError(RefusedError):
    """Missing, left-over, misshapen or non-finite tensors."""

    kind = "weights"


class TokenizerError(RefusedError):
    """A tokenizer or chat template that is missing, broken or made for another vocabulary."""

    kind = "tokenizer"


class DocumentError(RefusedError):
    """A document that cannot be read as text."""

    kind = "document"


class NetworkError(PackhorseError):
    """Something has to be fetched and cannot be."""

    exit_code = 5
    kind = "network"


class ComputeError(PackhorseError):
    """The model produced numbers that are none: NaN or infinite logits."""

    kind = "compute"


class CardLostError(PackhorseError):
    """The card computes nothing any more for this process: a kernel broke its context, it was reset or has gone."""

    kind = "card_lost"


class KernelError(PackhorseError):
    """A GPU kernel cannot be had."""

    kind = "kernel"


class CompilerMissingError(KernelError):
    """NVRTC or CUDA's headers are not installed."""

    kind = "compiler_missing"


class CompileError(KernelError):
    """NVRTC or the driver refuses a kernel."""

    kind = "compile"


class DriverTooOldError(KernelError):
    """The compiler writes code that the driver cannot read."""

    kind = "driver_too_old"


class UnsupportedCardError(KernelError):
    """A card that is too old for the kernels, or for one of them."""

    kind = "unsupported_card"


class CancelledRequestError(PackhorseError):
    """The request was cancelled by its owner."""

    kind = "cancelled"
