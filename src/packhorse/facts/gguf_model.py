"""GGUF files as ModelFacts: what llama.cpp's converter wrote, read back. Keys: the GGUF specification and
gguf's constants; which values the converter changes: `models/gguf_source.py`, which undoes it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packhorse.core.errors import CorruptFileError, RefusedError, UnsupportedModelError
from packhorse.core.types import LayerKind
from packhorse.core.units import format_bytes
from packhorse.facts.config_json import HYBRID, MAX_LAYERS, MOE, rope_facts
from packhorse.facts.fields import Fields
from packhorse.facts.gguf_header import GgufHeader, read_header
from packhorse.facts.model import DeltaFacts, ModelFacts, MoeFacts, RopeFacts, TensorFacts

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}
_SPLIT_NAME = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")
_CONTROL = 3
"""Token type of control tokens."""
_QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
# Settings whose other values would change the arithmetic. Absent is fine.
_MUST_BE: dict[str, tuple[float, ...]] = {
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "attention.sliding_window": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}


def read_gguf(file: Path) -> ModelFacts:
    """The model in a GGUF file, or in a split one given by its first part.

    Raises what `gguf_header.read_header` raises; UnsupportedModelError for architectures and settings that
    are not built; CorruptFileError for values that cannot be and missing parts.
    """
    header = _join_parts(read_header(file))
    fields = Fields(header.metadata, file)
    if fields.get("general.type") == "adapter":
        hint = "Merge it into its base model and convert the result."
        raise UnsupportedModelError(f"{file} is a LoRA adapter, which is not supported.", hint=hint)
    arch = fields.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file}: the architecture {arch!r} is not supported.",
            hint=f"Packhorse runs {', '.join(ARCHITECTURES)}.",
            architecture=arch,
        )
    return _Reader(file, header, arch).facts()


def is_later_part(file: Path) -> bool:
    """Whether a file name is that of a second or later part of a split GGUF file."""
    match = _SPLIT_NAME.match(file.name)
    return match is not None and int(match[2]) > 1


def split_parts(name: str) -> list[str]:
    """The names of all parts of the split GGUF file that `name` is a part of, the first one first; `name`
    alone where it is not that of a part."""
    match = _SPLIT_NAME.match(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def _join_parts(header: GgufHeader) -> GgufHeader:
    """The header with the tensors of all parts; as it is where the file is not split."""
    fields = Fields(header.metadata, header.file)
    count = fields.integer("split.count", 1, high=100_000)
    if count == 1:
        return header
    match = _SPLIT_NAME.match(header.file.name)
    if fields.integer("split.no", 0, low=0) != 0 or match is None or int(match[3]) != count:
        hint = f"Give the file NAME-00001-of-{count:05d}.gguf, with all parts beside it."
        raise RefusedError(f"{header.file} is one of {count} parts, and not named as the first.", hint=hint)
    tensors = dict(header.tensors)
    for part in map(header.file.with_name, split_parts(header.file.name)[1:]):
        if not part.is_file():
            raise CorruptFileError(
                f"{part.name} is missing beside {header.file}, one of {count} parts.", hint="Fetch all parts."
            )
        for name, tensor in read_header(part).tensors.items():
            if name in tensors:
                raise CorruptFileError(
                    f"The tensor {name!r} is in {tensors[name].file.name} and in {part.name}.",
                    hint="The parts belong to different files: fetch all of them again.",
                    tensor=name,
                )
            tensors[name] = tensor
    return GgufHeader(header.file, header.metadata, tensors)


class _Reader:
    """Metadata of one architecture on the way to ModelFacts."""

    def __init__(self, file: Path, header: GgufHeader, arch: str) -> None:
        self.file = file
        self.header = header
        self.tensors = header.tensors
        self.family = ARCHITECTURES[arch]
        self.own = Fields(header.metadata, file, prefix=f"{arch}.")
        self.all = Fields(header.metadata, file)

    def facts(self) -> ModelFacts:
        own, family = self.own, self.family
        self.refuse_settings()
        blocks = own.integer("block_count", high=MAX_LAYERS)
        num_mtp = own.integer("nextn_predict_layers", 0, low=0, high=blocks - 1)
        num_layers = blocks - num_mtp
        hidden = own.integer("embedding_length")
        heads = own.integer("attention.head_count")
        kv_heads = own.integer("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise own.wrong("attention.head_count_kv", kv_heads, f"a divisor of head_count {heads}")
        head_dim = self.head_dim(hidden, heads)
        self.must_be("attention.scale", (0.0, head_dim**-0.5))
        rope, context = self.rope(head_dim)
        moe_layers = tuple(
            family in MOE and f"blk.{index}.ffn_gate_inp.weight" in self.tensors
            for index in range(num_layers)
        )
        hybrid = family in HYBRID
        interval = own.integer("full_attention_interval", 4) if hybrid else 1
        return ModelFacts(
            family=family,
            name=self.name(),
            path=self.file,
            container="gguf",
            vocab_size=self.vocab_size(hidden),
            hidden_size=hidden,
            layer_kinds=tuple(
                LayerKind.LINEAR if (index + 1) % interval else LayerKind.FULL for index in range(num_layers)
            ),
            moe_layers=moe_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=own.integer("feed_forward_length", 0 if all(moe_layers) else None, low=0),
            rms_eps=own.number("attention.layer_norm_rms_epsilon", low=1e-12, high=1.0),
            rope=rope,
            context=context,
            tied="output.weight" not in self.tensors,
            qkv_bias=family == "qwen2" or self.has("attn_q.bias"),
            o_bias=self.has("attn_output.bias"),
            mlp_bias=self.has("ffn_gate.bias"),
            qk_norm=family not in ("llama", "qwen2"),
            attn_gate=hybrid,
            norm_offset=hybrid,
            delta=self.delta() if hybrid else None,
            moe=self.moe() if any(moe_layers) else None,
            bos_id=self.all.maybe_integer("tokenizer.ggml.bos_token_id", low=0),
            eos_ids=self.eos_ids(),
            chat_template=self.all.text("tokenizer.chat_template"),
            generation=self.generation(),
            tensors=self.tensors,
            metadata=self.header.metadata,
            num_mtp_layers=num_mtp,
            notes=unused_note(
                [t for name, t in self.tensors.items() if is_mtp_block(name, num_layers)],
                "of multi-token prediction are not used yet",
            ),
        )

    def refuse_settings(self) -> None:
        if self.family == "llama" and self.own.integer("expert_count", 0, low=0):
            raise UnsupportedModelError(
                f"{self.file}: llama models with experts (Mixtral) are not supported.",
                hint=f"Packhorse runs {', '.join(ARCHITECTURES)}.",
            )
        for key, known in _MUST_BE.items():
            self.must_be(key, known)

    def must_be(self, key: str, known: tuple[float, ...]) -> None:
        """Refuses a setting of another value than those known, up to the rounding of fp32. Absent is fine."""
        value = self.own.get(key)
        number = isinstance(value, int | float)
        if value is None or (number and any(math.isclose(value, v, rel_tol=1e-6) for v in known)):
            return
        raise UnsupportedModelError(
            f"{self.file}: {self.own.prefix}{key} is {value!r}; only {known[-1]!r} is supported.", field=key
        )

    def has(self, leaf: str) -> bool:
        return any(name.startswith("blk.") and name.endswith("." + leaf) for name in self.tensors)

    def name(self) -> str:
        # Escaped bytes would break whoever prints the name.
        text = self.all.text("general.name") or self.file.stem
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def vocab_size(self, hidden: int) -> int:
        """Rows of the embedding, which may be more than the vocabulary has tokens."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
            found = "missing" if embedding is None else f"of shape {list(embedding.shape)}"
            raise CorruptFileError(
                f"{self.file}: token_embd.weight is {found}, and embedding_length is {hidden}."
            )
        tokens = self.all.items("tokenizer.ggml.tokens")
        if tokens is not None and len(tokens) > embedding.shape[0]:
            raise CorruptFileError(
                f"{self.file} names {len(tokens):,} tokens; its embedding has {embedding.shape[0]:,} rows.",
                hint="The tokenizer belongs to another model: fetch or convert the file again.",
            )
        return embedding.shape[0]

    def head_dim(self, hidden: int, heads: int) -> int:
        head_dim = self.own.maybe_integer("attention.key_length")
        if head_dim is None and self.family == "llama":
            head_dim = self.own.maybe_integer("rope.dimension_count")
        if head_dim is None:
            if hidden % heads:
                raise self.own.wrong("embedding_length", hidden, f"a multiple of head_count {heads}")
            head_dim = hidden // heads
        if head_dim % 2:
            raise self.own.wrong("attention.key_length", head_dim, "even")
        value_dim = self.own.integer("attention.value_length", head_dim)
        if value_dim != head_dim:
            raise UnsupportedModelError(
                f"{self.file}: heads of keys have {head_dim} values, those of values {value_dim}.",
                hint="Both must be the same: choose another model.",
            )
        return head_dim

    def rope(self, head_dim: int) -> tuple[RopeFacts, int]:
        own = self.own
        rotary_dim = own.integer("rope.dimension_count", head_dim, high=head_dim)
        if rotary_dim % 2 or (rotary_dim != head_dim and self.family not in HYBRID):
            raise own.wrong("rope.dimension_count", rotary_dim, f"the head dimension {head_dim}")
        theta = own.number("rope.freq_base", 10_000.0, low=1.0)
        context = own.integer("context_length")
        kind = own.text("rope.scaling.type") or "none"
        raw: dict[str, Any] = {
            "factor": own.get("rope.scaling.factor"),
            "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
            "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
        }
        old_factor = own.maybe_number("rope.scale_linear", low=1.0)
        if kind == "none" and old_factor not in (None, 1.0):
            kind, raw["factor"] = "linear", old_factor
        factors = self.tensors.get("rope_freqs.weight")
        if factors is not None:
            if kind != "none":
                raise UnsupportedModelError(f"{self.file} scales rope by {kind} and by rope_freqs.weight.")
            kind, found = self.llama3_scaling(factors, theta, rotary_dim)
            raw |= found
        kind = "default" if kind == "none" else kind
        return rope_facts(Fields(raw, self.file), kind, theta, rotary_dim, context)

    def llama3_scaling(
        self, factors: TensorFacts, theta: float, rotary_dim: int
    ) -> tuple[str, dict[str, float | int]]:
        """The kind and parameters of Llama 3.1's scaling. A GGUF file keeps only the result, what each
        frequency is divided by; all models that use it have three of the four numbers in common."""
        half = rotary_dim // 2
        if factors.shape != (half,) or factors.format.name != "F32":
            raise UnsupportedModelError(
                f"{self.file}: rope_freqs.weight is {factors.format.name} {list(factors.shape)}, not F32"
                f" [{half}]."
            )
        with factors.file.open("rb") as stream:
            stream.seek(factors.offset)
            stored = struct.unpack(f"<{half}f", stream.read(4 * half))
        factor, low, high, original = max(stored), 1.0, 4.0, 8192
        if all(value == 1.0 for value in stored):
            return "none", {}
        for index, value in enumerate(stored):
            turns = original / (2 * math.pi * theta ** (2 * index / rotary_dim))
            smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
            expected = 1 / ((1 - smooth) / max(1.0, factor) + smooth)
            # NaN fails the comparison too.
            if not abs(value - expected) <= 1e-3 * expected:
                raise UnsupportedModelError(
                    f"{self.file}: rope_freqs.weight is not Llama 3.1's scaling (value {index} is {value:g},"
                    f" not {expected:g}).",
                    hint="Use the model's safetensors folder.",
                )
        return "llama3", {
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def delta(self) -> DeltaFacts:
        own = self.own
        k_heads, v_heads = own.integer("ssm.group_count"), own.integer("ssm.time_step_rank")
        if v_heads % k_heads:
            raise own.wrong("ssm.time_step_rank", v_heads, f"a multiple of ssm.group_count {k_heads}")
        inner = own.integer("ssm.inner_size")
        if inner % v_heads:
            raise own.wrong("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank {v_heads}")
        return DeltaFacts(
            num_k_heads=k_heads,
            num_v_heads=v_heads,
            k_head_dim=own.integer("ssm.state_size"),
            v_head_dim=inner // v_heads,
            conv_kernel=own.integer("ssm.conv_kernel", low=2, high=64),
        )

    def moe(self) -> MoeFacts:
        own = self.own
        num_experts = own.integer("expert_count")
        top_k = own.integer("expert_used_count")
        if top_k > num_experts:
            raise own.wrong("expert_used_count", top_k, f"at most expert_count {num_experts}")
        return MoeFacts(
            num_experts=num_experts,
            top_k=top_k,
            expert_dim=own.integer("expert_feed_forward_length", self.inner_dim("ffn_up_exps.weight")),
            shared_dim=own.integer(
                "expert_shared_feed_forward_length", self.inner_dim("ffn_up_shexp.weight") or 0, low=0
            )
            if self.family in HYBRID
            else 0,
            # No key says so; llama.cpp normalises for all of these architectures.
            norm_topk=own.flag("expert_weights_norm", True),
        )

    def inner_dim(self, leaf: str) -> int | None:
        """Rows of the first tensor with this leaf name: older files do not state them elsewhere."""
        shapes = (tensor.shape for name, tensor in self.tensors.items() if name.endswith("." + leaf))
        return next((shape[-2] for shape in shapes if len(shape) >= 2), None)

    def eos_ids(self) -> tuple[int, ...]:
        """End of text, of turn and of message; for Qwen both tokens that its generation_config stops at."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self.all.maybe_integer(f"tokenizer.ggml.{key}", low=0) for key in keys]
        tokens = self.all.items("tokenizer.ggml.tokens") or []
        types = self.all.items("tokenizer.ggml.token_type") or []
        if self.family != "llama" and len(types) == len(tokens):
            controls = [index for index, kind in enumerate(types) if kind == _CONTROL]
            by_text = {tokens[index]: index for index in controls}
            ids += [by_text.get(text) for text in _QWEN_STOPS]
        return tuple(dict.fromkeys(index for index in ids if index is not None))

    def generation(self) -> dict[str, Any]:
        """Sampling defaults, where the file has some."""
        own = Fields(self.header.metadata, self.file, prefix="general.sampling.")
        found: dict[str, Any] = {name: own.maybe_number(name) for name in ("top_p", "min_p")}
        found |= {"temperature": own.maybe_number("temp"), "top_k": own.maybe_integer("top_k", low=0)}
        found["repetition_penalty"] = own.maybe_number("penalty_repeat")
        return {name: value for name, value in found.items() if value is not None}


def unused_note(tensors: Sequence[TensorFacts], why: str) -> tuple[str, ...]:
    """What to say of tensors that are in the files and not used, if there are any."""
    total = format_bytes(sum(tensor.num_bytes for tensor in tensors))
    return (f"{len(tensors)} tensors ({total}) {why}.",) if tensors else ()


def is_mtp_block(name: str, num_layers: int) -> bool:
    """Whether a GGUF tensor belongs to a block after the model's own layers."""
    match = re.match(r"^blk\.(\d+)\.", name)
    return match is not None and int(match[1]) >= num_layers
