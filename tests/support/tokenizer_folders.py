"""Folders of small tokenizers of three families, as `save_pretrained` writes them, for tests without a network."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The cat and the dog saw a mouse. The mouse ran, the cat slept! The dog barked at 12 cats and 345 mice.",
    "Naïve cafés serve crème brûlée; a cat, a dog and a mouse eat crème at the café. Привет мир, привет кот.",
] * 3


def _written(folder: Path, tokenizer: Any, **special: str) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def gpt2_like(folder: Path) -> Path:
    """Write a tokenizer as GPT-2's: byte-level BPE, without padding; one special token marks begin and end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _written(folder, tokenizer, bos_token=end, eos_token=end, unk_token=end)


def llama_like(folder: Path) -> Path:
    """Write a tokenizer as Llama 2's: BPE over pieces that begin with a mark for the space; unknown, begin and end."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _written(folder, tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def bert_like(folder: Path) -> Path:
    """Write a tokenizer as BERT's: lower-cased word pieces, padding, and [CLS] and [SEP] for begin and end."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    )
    pad, unk, cls, sep = special
    return _written(folder, tokenizer, pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep)


FAMILIES = {"gpt2": gpt2_like, "llama": llama_like, "bert": bert_like}
