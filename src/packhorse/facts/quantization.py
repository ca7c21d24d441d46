"""What a checkpoint folder says of its packed weights: `quantization_config`, and the tensors it speaks of.

Sources: the declarations and tensors of GPTQModel and AutoGPTQ (gptq), AutoAWQ (awq), compressed-tensors, the FP8
checkpoints of Qwen (fp8), and docs/formats.md for ours (packhorse). Every value that would change the arithmetic
is one of those listed here, or is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packhorse.core.errors import UnsupportedModelError, WeightsError
from packhorse.core.formats import PACKED
from packhorse.core.units import ceil_div
from packhorse.facts.fields import Fields, is_whole
from packhorse.facts.model import StoredMatrix, TensorFacts
from packhorse.facts.names import text_name

_GROUPS = (16, 32, 64, 128)
_CLOSEST = (
    "Use the model's BF16 checkpoint, a GGUF file, or one in GPTQ, AWQ (gemm), compressed-tensors (4 or 8 bits, FP8)"
    " or FP8 blocks; `packhorse convert` packs a BF16 checkpoint."
)
_HALF = ("F16", "BF16", "F32")
Tensors = Mapping[str, TensorFacts]
Needed = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Shape and allowed types of a module's tensors, by role."""


@dataclass(frozen=True)
class Scheme:
    """How a module is packed. group_len: columns that share a scale, 0 for whole rows."""

    bits: int
    group_len: int
    symmetric: bool
    permuted: bool = False
    kind: str = "int"

    def format_name(self) -> str:
        """The packed format: long groups are groups of 128 with equal scales."""
        if self.kind == "float":
            return "fp8-g128"
        group_len = self.group_len if self.group_len in _GROUPS else 128
        return f"int{self.bits}{'' if self.symmetric else 'z'}-g{group_len}"


def stored_matrices(quant: Fields | None, tensors: Tensors) -> dict[str, StoredMatrix]:
    """The packed matrices of a folder by the name transformers gives their weight.

    quant: the fields of quantization_config, None where there is none. Raises UnsupportedModelError for a method
    or a value of one that is not built, WeightsError where tensors are missing, or do not fit each other.
    """
    if quant is None:
        return {}
    method = quant.text("quant_method")
    read = _METHODS.get(method or "")
    if read is None:
        raise refused(quant, "quant_method", method, f"one of {', '.join(_METHODS)}")
    found: dict[str, StoredMatrix] = {}
    for matrix in read(quant, tensors).values():
        name = text_name(matrix.name)
        if name is not None:
            found[name] = matrix
    return found


def refused(fields: Fields, name: str, value: object, known: str) -> UnsupportedModelError:
    """The error for a declared value that is not built."""
    return UnsupportedModelError(
        f"{fields.file}: {fields.prefix}{name} of the packed weights is {value!r}; supported is {known}.",
        hint=_CLOSEST,
        field=name,
        value=repr(value),
    )


def _one_of(fields: Fields, name: str, value: Any, known: tuple[Any, ...]) -> Any:
    # `1 == True`: a number is not taken for a flag.
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in known):
        raise refused(fields, name, value, " or ".join(repr(item) for item in known))
    return value


def _group_len(fields: Fields, value: Any) -> int:
    """Columns of a group, 0 for a whole row."""
    if value in (-1, None):
        return 0
    if not is_whole(value) or value <= 0 or not (value in _GROUPS or value % 128 == 0):
        raise refused(fields, "group_size", value, "16, 32, 64, a multiple of 128, or -1")
    return int(value)


@dataclass
class _Modules:
    """Tensors of a folder by module and role: `model.layers.0.mlp.up_proj` -> {"qweight": ...}."""

    tensors: Tensors
    by_module: dict[str, dict[str, TensorFacts]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            module, _, role = name.rpartition(".")
            self.by_module.setdefault(module, {})[role] = tensor

    def matrix(
        self,
        module: str,
        layout: str,
        scheme: Scheme,
        shape: tuple[int, ...],
        needed: Needed,
        *,
        zero_shift: int = 0,
        weight: str = ".weight",
    ) -> StoredMatrix:
        """The matrix of a module."""
        here = self.by_module[module]
        for role, (wanted, types) in needed.items():
            tensor = here.get(role)
            if tensor is None:
                raise WeightsError(
                    f"{module} has no tensor {role}, which its packed weight needs.",
                    hint="The download may be incomplete: fetch it again.",
                    tensor=f"{module}.{role}",
                )
            if tensor.shape != wanted or tensor.format.name not in types:
                raise WeightsError(
                    f"{tensor.name} is {tensor.format.name} {list(tensor.shape)}; the declaration asks for"
                    f" {' or '.join(types)} {list(wanted)}.",
                    hint="The declaration and the tensors are of different files: fetch both again.",
                    tensor=tensor.name,
                )
        if layout != "fp8" and "weight" in here:
            hint = "Remove one of them."
            raise WeightsError(f"{module} has a packed weight and a plain one.", hint=hint, tensor=module)
        form = PACKED[scheme.format_name()]
        if not form.fits(shape[-1]):
            raise UnsupportedModelError(
                f"{module} has {shape[-1]} inputs, which {form.name} cannot hold.",
                hint=f"They must be a multiple of 64 or of {form.group_len}. {_CLOSEST}",
                tensor=module,
            )
        tensors = {role: here[role] for role in needed}
        group_len = scheme.group_len or shape[-1]
        return StoredMatrix(
            module + weight, form, shape, layout, tensors, group_len, scheme.permuted, zero_shift
        )


def _gptq(quant: Fields, tensors: Tensors) -> dict[str, StoredMatrix]:
    version = _one_of(
        quant, "checkpoint_format", quant.text("checkpoint_format", "gptq"), ("gptq", "gptq_v2")
    )
    _one_of(quant, "pack_dtype", quant.text("pack_dtype", "int32"), ("int32",))
    dynamic = quant.table("dynamic")
    found = {}
    modules = _Modules(tensors)
    for module, here in modules.by_module.items():
        if "qweight" not in here:
            continue
        own = Fields({**quant.values, **_override(module, dynamic)}, quant.file)
        bits = _one_of(own, "bits", own.get("bits"), (4, 8))
        scheme = Scheme(
            bits, _group_len(own, own.get("group_size")), own.flag("sym", True), own.flag("desc_act", False)
        )
        words, N = _matrix_shape(here["qweight"])
        K = words * 32 // bits
        groups = ceil_div(K, scheme.group_len or K)
        found[module] = modules.matrix(
            module, "gptq", scheme, (N, K),
            {
                "qweight": ((K * bits // 32, N), ("I32",)),
                "qzeros": ((groups, ceil_div(N * bits, 32)), ("I32",)),
                "scales": ((groups, N), _HALF),
                **({"g_idx": ((K,), ("I32",))} if "g_idx" in here or scheme.permuted else {}),
            },
            zero_shift=1 if version == "gptq" else 0,
        )  # fmt: skip
    return found


def _override(module: str, dynamic: Fields | None) -> dict[str, Any]:
    """What GPTQModel's `dynamic` says of a module: the first pattern that matches counts."""
    for pattern, values in ({} if dynamic is None else dynamic.values).items():
        if re.match(_pattern(dynamic, pattern.removeprefix("+:")), module) and isinstance(values, dict):
            return dict(values)
    return {}


def _pattern(fields: Fields | None, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        assert fields is not None
        raise fields.wrong("pattern", pattern, "a regular expression") from error


def _matrix_shape(tensor: TensorFacts) -> tuple[int, int]:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise WeightsError(
            f"{tensor.name} has the shape {list(tensor.shape)}, and must be a matrix.",
            hint="The file is damaged: fetch it again.",
            tensor=tensor.name,
        )
    return tensor.shape[0], tensor.shape[1]


def _awq(quant: Fields, tensors: Tensors) -> dict[str, StoredMatrix]:
    _one_of(quant, "version", (quant.text("version") or "gemm").lower(), ("gemm",))
    bits = _one_of(quant, "bits", quant.get("bits") or quant.get("w_bit"), (4,))
    has_zeros = _one_of(quant, "zero_point", quant.get("zero_point"), (True, False))
    size = quant.get("group_size")
    group_len = _group_len(quant, quant.get("q_group_size") if size is None else size)
    scheme = Scheme(bits, group_len, symmetric=not has_zeros)  # qzeros are there, and the midpoint, even so
    found = {}
    modules = _Modules(tensors)
    for module, here in modules.by_module.items():
        if "qweight" not in here:
            continue
        K, words = _matrix_shape(here["qweight"])
        groups = ceil_div(K, scheme.group_len or K)
        found[module] = modules.matrix(
            module, "awq", scheme, (8 * words, K),
            {
                "qweight": ((K, words), ("I32",)),
                "qzeros": ((groups, words), ("I32",)),
                "scales": ((groups, 8 * words), _HALF),
            },
        )  # fmt: skip
    return found


def _compressed(quant: Fields, tensors: Tensors) -> dict[str, StoredMatrix]:
    _one_of(quant, "quantization_status", quant.text("quantization_status", "compressed"), ("compressed",))
    sparsity = quant.table("sparsity_config")
    if sparsity is not None and sparsity.values:
        _one_of(sparsity, "sparsity_config.format", sparsity.text("format", "dense"), ("dense",))
    groups = _config_groups(quant)
    found = {}
    modules = _Modules(tensors)
    for module, here in modules.by_module.items():
        packed, plain = here.get("weight_packed"), here.get("weight")
        if packed is not None:
            scheme = _scheme_of(quant, groups, module)
            N, words = _matrix_shape(packed)
            K = _declared_columns(here, words, scheme)
            found[module] = modules.matrix(
                module, "compressed", scheme, (N, K), _pack_quantized(here, scheme, N, K)
            )
        elif plain is not None and "weight_scale" in here and plain.format.name in ("F8_E4M3", "I8"):
            scheme = _scheme_of(quant, groups, module)
            _one_of(quant, "type", scheme.kind, ("float" if plain.format.name == "F8_E4M3" else "int",))
            if scheme.kind == "int":
                raise refused(quant, "format", "int-quantized", "'pack-quantized' or 'float-quantized'")
            found[module] = _fp8_matrix(modules, module, "weight_scale", scheme, None)
    return found


def _config_groups(quant: Fields) -> list[tuple[list[str], Scheme]]:
    """Targets and scheme of each config group; the scheme is checked here, so that no group is half known."""
    table = quant.table("config_groups")
    found = []
    for name, group in (table.values if table is not None else {}).items():
        fields = Fields(group if isinstance(group, dict) else {}, quant.file)
        weights = fields.table("weights")
        if weights is None:
            raise quant.wrong(f"config_groups.{name}", group, "a group with weights")
        form = fields.text("format") or quant.text("format") or ""
        _one_of(quant, "format", form, ("pack-quantized", "float-quantized", "naive-quantized"))
        kind = _one_of(weights, "type", weights.text("type", "int"), ("int", "float"))
        bits = _one_of(weights, "num_bits", weights.get("num_bits"), (4, 8) if kind == "int" else (8,))
        strategies = ("group", "channel") if kind == "int" else ("channel", "tensor", "block")
        strategy = _one_of(weights, "strategy", weights.text("strategy", "tensor"), strategies)
        size = weights.get("group_size") if strategy == "group" else None
        if strategy == "group" and size is None:
            raise weights.wrong("group_size", size, "given for the strategy group")
        order = _one_of(
            weights, "actorder", weights.get("actorder"), (None, False, "static", "weight", "group")
        )
        targets = fields.items("targets") or []
        if not all(isinstance(target, str) for target in targets):
            raise fields.wrong("targets", targets, "a list of names")
        scheme = Scheme(
            bits, _group_len(weights, size), weights.flag("symmetric", True), order == "group", kind
        )
        found.append((targets, scheme))
    return found


def _scheme_of(quant: Fields, groups: list[tuple[list[str], Scheme]], module: str) -> Scheme:
    """The scheme of the group that targets a module: by name, else by pattern, else by class."""
    ways = (
        lambda target: target == module or module.endswith("." + target),
        lambda target: target.startswith("re:") and re.match(_pattern(quant, target[3:]), module) is not None,
        lambda target: target == "Linear",
    )
    for matches in ways:
        for targets, scheme in groups:
            if any(matches(target) for target in targets):
                return scheme
    raise WeightsError(
        f"{module} is packed, and no group of the quantization_config targets it.",
        hint="config.json and the weights are of different models: fetch both again.",
        tensor=module,
    )


def _declared_columns(here: Tensors, words: int, scheme: Scheme) -> int:
    """Inputs of a pack-quantized matrix: its scales bound them from below where words hold more."""
    scale = here.get("weight_scale")
    most = words * 32 // scheme.bits
    if scale is None or len(scale.shape) != 2 or not scheme.group_len:
        return most
    return min(most, scale.shape[1] * scheme.group_len)


def _pack_quantized(here: Tensors, scheme: Scheme, N: int, K: int) -> Needed:
    groups = ceil_div(K, scheme.group_len or K)
    needed: Needed = {
        "weight_packed": ((N, ceil_div(K * scheme.bits, 32)), ("I32",)),
        "weight_scale": ((N, groups), _HALF),
        "weight_shape": ((2,), ("I64", "I32")),
    }
    if not scheme.symmetric:
        needed["weight_zero_point"] = ((ceil_div(N * scheme.bits, 32), groups), ("I32",))
    if scheme.permuted or "weight_g_idx" in here:
        needed["weight_g_idx"] = ((K,), ("I32",))
    return needed


def _fp8(quant: Fields, tensors: Tensors) -> dict[str, StoredMatrix]:
    _one_of(quant, "fmt", quant.text("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    blocks = quant.items("weight_block_size")
    if blocks is not None:
        sizes = all(is_whole(size) and size > 0 for size in blocks)
        if len(blocks) != 2 or not sizes or blocks[1] % 128:
            raise refused(quant, "weight_block_size", blocks, "[rows, a multiple of 128 columns]")
    found = {}
    modules = _Modules(tensors)
    for module, here in modules.by_module.items():
        role = next((role for role in ("weight_scale_inv", "weight_scale") if role in here), None)
        if "weight" in here and here["weight"].format.name == "F8_E4M3" and role is not None:
            found[module] = _fp8_matrix(modules, module, role, Scheme(8, 0, True, kind="float"), blocks)
    return found


def _fp8_matrix(
    modules: _Modules, module: str, role: str, scheme: Scheme, blocks: list[int] | None
) -> StoredMatrix:
    """An FP8 weight with one scale, one a row, or one a block of [rows, columns]."""
    here = modules.by_module[module]
    N, K = _matrix_shape(here["weight"])
    shape = here[role].shape
    rows, cols = blocks or (128, 128)
    allowed: list[tuple[int, ...]] = [(ceil_div(N, rows), ceil_div(K, cols))]
    if blocks is None:
        allowed += [(), (1,), (1, 1), (N, 1), (N,)]
    wanted = shape if shape in allowed else allowed[0]
    scale = (wanted, _HALF)
    matrix = modules.matrix(module, "fp8", scheme, (N, K), {"weight": ((N, K), ("F8_E4M3",)), role: scale})
    blocked = len(shape) == 2 and shape == allowed[0] and shape not in ((N, 1), (1, 1))
    return StoredMatrix(
        matrix.name, matrix.form, matrix.shape, "fp8",
        {"weight": here["weight"], "scale": here[role]}, cols if blocked else K, row_block=rows if blocked else 0,
    )  # fmt: skip


def _packhorse(quant: Fields, tensors: Tensors) -> dict[str, StoredMatrix]:
    version = quant.get("version")
    _one_of(quant, "version", version, (1,))
    table = quant.table("modules")
    patterns = list((table.values if table is not None else {}).items())
    known = [
        name for name, form in PACKED.items() if form.kind in ("symmetric", "zero") and form.bits in (4, 8)
    ]
    found = {}
    modules = _Modules(tensors)
    for module, here in modules.by_module.items():
        if "q" not in here:
            continue
        name = next(
            (form for pattern, form in patterns if re.fullmatch(_pattern(quant, pattern), module)), None
        )
        _one_of(quant, f"modules: the format of {module}", name, tuple(known))
        form = PACKED[str(name)]
        shape = here["q"].shape
        if len(shape) not in (2, 3):
            _matrix_shape(here["q"])
        K = shape[-1] * 8 // form.bits
        scales = (*shape[:-1], ceil_div(K, form.group_len))
        needed: Needed = {"q": (shape, ("U8",)), "scale": (scales, ("F16",))}
        if form.kind == "zero":
            needed["zero"] = (scales, ("F16",))
        scheme = Scheme(form.bits, form.group_len, form.kind == "symmetric")
        weight = "" if len(shape) == 3 else ".weight"
        found[module] = modules.matrix(module, "packhorse", scheme, (*shape[:-1], K), needed, weight=weight)
    return found


_METHODS = {
    "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8, "packhorse": _packhorse,
}  # fmt: skip
