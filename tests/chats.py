"""Tiny checkpoints that can chat: a tokenizer of bytes, a template in the manner of Qwen's, a drawn model."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import oracle
from packhorse.engine.sample import Sampled

VOCAB = 320
EOS = 260
SPECIAL = ("<|im_start|>", "<|im_end|>")
# Thoughts of earlier turns are left out, as Qwen's templates do.
THINKING = """
{%- for m in messages %}
    {%- if m.role == 'critic' %}{{ raise_exception('No critics here.') }}{% endif %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' }}
    {{- m.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- ('(' ~ reasoning_effort ~ ')' if reasoning_effort else '') ~ '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token a byte, the two marks of ChatML, <think> and </think> as plain added tokens, the eos token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    assert tokenizer.token_to_id("<|end|>") == EOS
    return tokenizer


@cache
def model_of(family: str) -> object:
    """A model of the family that never ends its answer by itself, one a process."""
    model = oracle.make_model(family, vocab_size=VOCAB, eos_token_id=EOS, bos_token_id=None)
    with torch.no_grad():
        # A logit of 0 is never the greatest of 320.
        model.lm_head.weight[256:] = 0
    return model


@cache
def shared_folder(family: str, template: str = PLAIN) -> Path:
    """The checkpoint folder of `model_of(family)`, one a process; nobody may change it."""
    return make_folder(Path(tempfile.mkdtemp(prefix=f"packhorse-{family}-")), family, template)


def make_folder(folder: Path, family: str, template: str | None = PLAIN) -> Path:
    """Write a checkpoint folder with tokenizer and template."""
    oracle.save(model_of(family), folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let every model say `text`, again and again, whatever its logits are."""
    ids = byte_tokenizer().encode(text).ids

    def say(logits: torch.Tensor, samplers: list) -> list[Sampled]:
        tokens = [Sampled(ids[sampler.num_drawn % len(ids)]) for sampler in samplers]
        for sampler in samplers:
            sampler.num_drawn += 1
        return tokens

    monkeypatch.setattr("packhorse.engine.engine.sample", say)


def plain_prompt(*turns: tuple[str, str]) -> str:
    """What PLAIN renders of (role, content) pairs, written out by hand."""
    said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return said + "<|im_start|>assistant\n"


def greedy_text(family: str, prompt: str, count: int) -> str:
    """What transformers continues the prompt with."""
    tokenizer = byte_tokenizer()
    ids = oracle.oracle_greedy(model_of(family), tokenizer.encode(prompt).ids, count)
    return tokenizer.decode(ids)
