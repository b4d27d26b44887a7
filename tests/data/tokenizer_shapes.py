"""These functions write small tokenizers that look like those of published models."""

import json
from pathlib import Path
from typing import Any

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# DeepSeek V3 splits text in these three steps.
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
TEXT = (
    "Spend 1234567 or 12 3456,   then 日本語の文字123と漢字4567。 it's\t it'LL\r\n\n"
    "  x=10;\n"
    "東京2024年 foo_bar(a, b)  12  a1b22c333  !!abc #tag  ١٢٣٤٥ é e\u0301 ok   \n 9 "
)
SHAPES = ("llama3", "gpt2", "qwen", "deepseek")
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def train(patterns: tuple[str, ...], special: tuple[str, ...] = ()) -> Any:
    """Train a BPE of 400 tokens that splits text by patterns, or as GPT-2 does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    splits = [pre_tokenizers.Split(Regex(x), "isolated") for x in patterns]
    steps = pre_tokenizers.Sequence([*splits, level])
    tokenizer.pre_tokenizer = steps if splits else level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def write_shape(folder: Path, shape: str) -> dict[str, str]:
    """Write the tokenizer of a shape, and return the files that must not change."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _BUILDERS[shape]()
    generation = json.loads(files["generation_config.json"])
    ids = {k: v for k, v in generation.items() if k.endswith("_token_id")}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | ids))
    return files


def _files(tokenizer: Any, settings: dict, generation: dict, **extra: str) -> dict:
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "generation_config.json": json.dumps(generation),
    } | {name.replace("__", "."): text for name, text in extra.items()}


def _llama3() -> dict[str, str]:
    from tokenizers import processors

    tokenizer = train((LLAMA3,))
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    tokenizer.add_special_tokens([*names])
    bos, *ends = (tokenizer.token_to_id(name) for name in names)
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
        special_tokens=[("<|begin_of_text|>", bos)],
    )
    level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([level, template])
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    settings = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "chat_template": _TEMPLATE,
    }
    generation = {"bos_token_id": bos, "eos_token_id": ends, "do_sample": True}
    generation |= {"temperature": 0.6, "top_p": 0.9}
    special_map = json.dumps(special)
    return _files(tokenizer, settings, generation, special_tokens_map__json=special_map)


def _gpt2() -> dict[str, str]:
    tokenizer = train(())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = tokenizer.token_to_id("<|endoftext|>")
    content = json.loads(tokenizer.to_str())["model"]
    merges = ["#version: 0.2", *(" ".join(pair) for pair in content["merges"])]
    settings = {"model_max_length": 1024}
    return _files(
        tokenizer,
        settings,
        {"bos_token_id": end, "eos_token_id": end, "_from_model_config": True},
        vocab__json=json.dumps(content["vocab"]),
        merges__txt="\n".join(merges),
    )


def _qwen() -> dict[str, str]:
    from tokenizers import AddedToken, normalizers

    tokenizer = train((QWEN,))
    tokenizer.normalizer = normalizers.NFC()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([*names])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    end, _, turn_end = (tokenizer.token_to_id(name) for name in names)
    settings = {
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None},
        **{"add_bos_token": False, "model_max_length": 32768},
        "tokenizer_class": "Qwen2Tokenizer",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    generation = {"bos_token_id": end, "eos_token_id": [turn_end, end], "top_k": 20}
    generation["pad_token_id"] = end
    added = json.dumps({name: tokenizer.token_to_id(name) for name in names})
    more = {"chat_template__jinja": _TEMPLATE, "added_tokens__json": added}
    return _files(tokenizer, settings, generation, **more)


def _deepseek() -> dict[str, str]:
    from tokenizers import AddedToken, normalizers, processors

    names = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
    tokenizer = train(DEEPSEEK, names)
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens([AddedToken("<｜User｜>", normalized=True)])
    bos, end, _ = names
    settings = {
        **{"add_bos_token": True, "add_eos_token": False, "legacy": True},
        "bos_token": {"__type": "AddedToken", "content": bos, "normalized": True},
        "eos_token": {"__type": "AddedToken", "content": end, "normalized": True},
        **{"model_max_length": 16384, "tokenizer_class": "LlamaTokenizerFast"},
        "chat_template": _TEMPLATE,
    }
    return _files(tokenizer, settings, {"bos_token_id": 0, "eos_token_id": 1})


_BUILDERS = {
    "llama3": _llama3,
    "gpt2": _gpt2,
    "qwen": _qwen,
    "deepseek": _deepseek,
}
