"""A 16-bit checkpoint folder to few bits, as compressed-tensors declares it, one tensor at a time.

    source tensor -> [copied | rounded to groups of GROUP_LEN, one matrix an expert] -> its place in a shard

What is in each shard is decided from the headers. A shard that is there is not made again, so a conversion that was
cut goes on where it was, and its bytes are those of one that was not. Peak memory is the largest source tensor and
what becomes of it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse.core.errors import RefusedError, UsageError, WeightsError
from packhorse.core.units import GIB
from packhorse.facts.fields import read_object
from packhorse.facts.model import ModelFacts, TensorFacts
from packhorse.facts.recipes import CONVERTED, GROUP_LEN, PRODUCTS
from packhorse.facts.safetensors_header import INDEX
from packhorse.facts.weights import class_of
from packhorse.models import writer
from packhorse.models.raw import read_plain
from packhorse.models.writer import TensorSpec
from packhorse.quant.rounding import nibbles, round_groups

SHARD_BYTES = 2 * GIB
_SLICE_LEN = 1 << 18
"""Values rounded at a time: what is tried on them stays in cache."""
STATE = "convert.json"
"""There while a conversion is under way: what it converts, and how."""
# Small, and errors of theirs reach far: gates of experts and of the delta rule, convolutions.
_KEPT = re.compile(r"\.(in_proj_a|in_proj_b|in_proj_ba|conv1d|shared_expert_gate|gate)\.weight$")
_IGNORE = [
    "lm_head", r"re:.*\.mlp\.gate$", r"re:.*shared_expert_gate$", r"re:.*\.in_proj_(a|b|ba)$", r"re:.*visual.*",
    r"re:.*mtp.*",
]  # fmt: skip
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Conversion:
    """What a conversion does, known from headers. shards: source tensors of each file. kept: matrices that stay in
    16 bits although they are of a class that is packed."""

    facts: ModelFacts
    bits: int
    shards: tuple[tuple[TensorFacts, ...], ...]
    kept: tuple[str, ...]

    def specs(self, index: int) -> list[TensorSpec]:
        """The tensors of a shard, in order."""
        return [spec for tensor in self.shards[index] for spec in _specs(tensor, self)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(writer.shard_bytes(self.specs(index)) for index in range(len(self.shards)))


def plan_conversion(facts: ModelFacts, recipe: str) -> Conversion:
    """What becomes of a checkpoint folder. Raises UsageError for a recipe that is not known, RefusedError for a
    model that is packed already, or is no folder of safetensors."""
    if recipe not in CONVERTED:
        meant = f"{recipe}-rtn" if f"{recipe}-rtn" in CONVERTED else " or ".join(CONVERTED)
        hint = f"Choose {meant}: products are packed, embeddings and output head stay as they are."
        raise UsageError(f"The recipe {recipe!r} is not one that is converted to.", hint=hint)
    if facts.container != "safetensors" or facts.stored:
        what = "is packed already" if facts.stored or facts.container == "gguf" else "holds no weights"
        raise RefusedError(f"{facts.path} {what}.", hint="Give a folder with BF16 or FP16 safetensors files.")
    draft = Conversion(facts, CONVERTED[recipe], (), ())
    shards = writer.in_shards(facts.tensors.values(), lambda tensor: _specs(tensor, draft), SHARD_BYTES)
    kept = tuple(
        tensor.name for tensor in facts.tensors.values()
        if _is_matrix(tensor, facts) and not _is_packed(tensor, draft)
    )  # fmt: skip
    return Conversion(facts, draft.bits, tuple(tuple(shard) for shard in shards), kept)


def convert(
    facts: ModelFacts,
    out: Path,
    recipe: str,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Conversion:
    """Write the packed checkpoint to the folder `out`. progress(done, total): bytes of shards, matrix by matrix.
    note: told what a cut conversion has left.

    Raises what `plan_conversion` raises; UsageError where `out` holds something else, or all of it already,
    DoesNotFitError where the disk is too small, WeightsError for values that are not finite.
    """
    conversion = plan_conversion(facts, recipe)
    with writer.writing(out):
        there = _claim(conversion, out, recipe)
        if there and note is not None:
            count = sum(len(conversion.shards[index]) for index in there)
            note(f"{count:,} of {len(facts.tensors):,} tensors were there already")
        total, done = conversion.num_bytes, 0
        for index, tensors in enumerate(conversion.shards):
            specs = conversion.specs(index)
            if index not in there:
                made = (value for tensor in tensors for value in _values(tensor, conversion))
                file = out / writer.shard_name(index, len(conversion.shards))
                writer.write_shard(file, specs, _shown(made, done, total, progress))
            done += writer.shard_bytes(specs)
            if progress is not None:
                progress(done, total)
        writer.write_index(out, [conversion.specs(index) for index in range(len(conversion.shards))])
        _copy_rest(facts.path, out)
        writer.write_json(out / "config.json", _config(conversion))
        (out / STATE).unlink()
    return conversion


def _shown(
    values: Iterable[Tensor], done: int, total: int, progress: Callable[[int, int], None] | None
) -> Iterator[Tensor]:
    """`values`, with the progress before each."""
    for value in values:
        if progress is not None:
            progress(done, total)
        yield value
        done += value.nbytes


def _claim(conversion: Conversion, out: Path, recipe: str) -> set[int]:
    """Make sure that `out` is ours: new, or of the same conversion, cut. Returns the shards that are there."""
    facts, count = conversion.facts, len(conversion.shards)
    there = {index for index in range(count) if (out / writer.shard_name(index, count)).is_file()}
    seed = hashlib.blake2b(digest_size=16)
    for tensor in facts.tensors.values():
        seed.update(repr((tensor.name, tensor.shape, tensor.format.name, tensor.offset)).encode())
        stat = tensor.file.stat()
        seed.update(repr((stat.st_size, stat.st_mtime_ns)).encode())
    state = {"source": str(facts.path.resolve()), "recipe": recipe, "tensors": seed.hexdigest()}
    if out.exists() and any(out.iterdir()):
        file = out / STATE
        made = out / "config.json"
        if len(there) == count and made.is_file() and read_object(made) == _config(conversion):
            raise UsageError(
                f"{out} holds a finished conversion to {recipe} with the config of {facts.path}; whether of its "
                "weights is not known.",
                hint="Use it if you made it of this model, or give a folder that is not there yet.",
            )
        if not file.is_file() or read_object(file) != state:
            raise UsageError(
                f"{out} is not empty, and holds no cut conversion of {facts.path} to {recipe}.",
                hint="Give a folder that is not there yet.",
            )
    else:
        out.mkdir(parents=True, exist_ok=True)
        writer.write_json(out / STATE, state)
    for part in out.glob("*.part"):
        part.unlink()
    missing = sum(writer.shard_bytes(conversion.specs(index)) for index in range(count) if index not in there)
    writer.check_space(out, missing)
    return there


def _is_matrix(tensor: TensorFacts, facts: ModelFacts) -> bool:
    """Whether a tensor is of what recipes pack."""
    matrix = len(tensor.shape) == 3 or (len(tensor.shape) == 2 and tensor.name.endswith(".weight"))
    return matrix and class_of(tensor.name, facts) in PRODUCTS and not _KEPT.search(tensor.name)


def _is_packed(tensor: TensorFacts, conversion: Conversion) -> bool:
    fits = tensor.shape[-1:] != () and tensor.shape[-1] % GROUP_LEN == 0 and tensor.format.name in _FLOATS
    return fits and _is_matrix(tensor, conversion.facts)


def _matrices(tensor: TensorFacts) -> list[tuple[str, slice | None, int | None, int]]:
    """The modules that a tensor's matrices are: name, rows, expert and number of rows of each."""
    if len(tensor.shape) == 2:
        return [(tensor.name.removesuffix(".weight"), None, None, tensor.shape[0])]
    experts, rows, _ = tensor.shape
    prefix, _, leaf = tensor.name.rpartition(".")
    if leaf == "gate_up_proj":
        halves = [("gate_proj", slice(0, rows // 2)), ("up_proj", slice(rows // 2, rows))]
        return [(f"{prefix}.{e}.{name}", half, e, rows // 2) for e in range(experts) for name, half in halves]
    return [(f"{prefix}.{e}.{leaf}", None, e, rows) for e in range(experts)]


def _specs(tensor: TensorFacts, conversion: Conversion) -> list[TensorSpec]:
    """What a source tensor becomes."""
    if not _is_packed(tensor, conversion):
        return [TensorSpec(tensor.name, tensor.format.name, tensor.shape)]
    K = tensor.shape[-1]
    specs = []
    for module, _, _, N in _matrices(tensor):
        specs += [
            TensorSpec(f"{module}.weight_packed", "I32", (N, K * conversion.bits // 32)),
            TensorSpec(f"{module}.weight_scale", "F16", (N, K // GROUP_LEN)),
            TensorSpec(f"{module}.weight_shape", "I64", (2,)),
        ]
    return specs


def _values(tensor: TensorFacts, conversion: Conversion) -> Iterator[Tensor]:
    """The tensors of `_specs`, made one matrix at a time."""
    value = read_plain(tensor)
    if not _is_packed(tensor, conversion):
        for part in value.flatten().split(_SLICE_LEN):
            _check_finite(tensor, part)
        yield value
        return
    bits = conversion.bits
    for _, rows, expert, N in _matrices(tensor):
        matrix = value if expert is None else value[expert]
        matrix = matrix if rows is None else matrix[rows]
        words = torch.empty(N, matrix.shape[1] * bits // 8, dtype=torch.uint8)
        scales = torch.empty(N, matrix.shape[1] // GROUP_LEN, dtype=torch.float16)
        step = max(1, _SLICE_LEN // matrix.shape[1])
        for start in range(0, N, step):
            part = matrix[start : start + step]
            _check_finite(tensor, part)
            codes, scales[start : start + step] = round_groups(part, bits, GROUP_LEN)
            words[start : start + step] = nibbles(codes) if bits == 4 else codes
        yield words.view(torch.int32)
        yield scales
        yield torch.tensor(matrix.shape)


def _check_finite(tensor: TensorFacts, part: Tensor) -> None:
    if not part.isfinite().all():
        hint = "The file is damaged or was exported from a broken run: fetch or export it again."
        raise WeightsError(f"{tensor.name} holds values that are not finite.", hint=hint, tensor=tensor.name)


def _config(conversion: Conversion) -> dict[str, Any]:
    """config.json of the result, which compressed-tensors reads."""
    weights = {
        "num_bits": conversion.bits, "type": "int", "symmetric": True, "strategy": "group",
        "group_size": GROUP_LEN, "dynamic": False,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    kept = [name.removesuffix(".weight") for name in conversion.kept]
    declaration = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [*_IGNORE, *kept],
    }  # fmt: skip
    return read_object(conversion.facts.path / "config.json") | {"quantization_config": declaration}


def _copy_rest(source: Path, out: Path) -> None:
    """Tokenizer, template and what else is small and no weights."""
    for file in sorted(source.iterdir()):
        weights = file.suffix == ".safetensors" or file.name in ("config.json", INDEX)
        if file.is_file() and not weights and file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(file, out / file.name)
