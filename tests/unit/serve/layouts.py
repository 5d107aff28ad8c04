"""Small tokenizers of each layout that published models have, made here."""

from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxspec.checkpoint.text.codec import Text

CORPUS = [
    "the cat is in the house . it 's hot , isn't it ?",
    "    return x\n\n",
    "Grüße, 漢字 und 🙂🙃 “quoted”",
    "123 4567",
]
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
WORDS = ["▁", "▁▁", "▁Paris", "▁is", "▁the", "▁b", "is", *"abcx.", "é", "漢", "ab"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def fast(tokenizer: Tokenizer, end: str = "</s>", **names: str) -> Text:
    tokenizer.add_special_tokens([AddedToken(end, normalized=False), AddedToken("<“tool”>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<think> ", normalized=False), AddedToken("漢漢", normalized=False)])
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, **names))


def byte_level() -> Text:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer)


def tiktoken_like() -> Text:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GPT4), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ])  # fmt: skip
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return trained(tokenizer)


def trained(tokenizer: Tokenizer) -> Text:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return fast(tokenizer, "<|end|>")


def byte_fallback(strip: bool = True) -> Text:
    """The layout of Mixtral's and Llama 2's tokenizer.json; without a strip Gemma's."""
    words = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return fast(tokenizer, bos_token="<s>", unk_token="<unk>")


def gemma_like() -> Text:
    return byte_fallback(strip=False)


def unigram() -> Text:
    words = ["<unk>", *WORDS, "##s", "é▁x"]
    tokenizer = Tokenizer(models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return fast(tokenizer, unk_token="<unk>")


def word_piece() -> Text:
    words = ["[UNK]", "the", "cat", "##s", "##", ".", ",", "?", "do", "n't", "'", "'s", "##é", "漢", "a"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return fast(tokenizer, "[SEP]", unk_token="[UNK]")


def words() -> Text:
    """Whole words and no decoder: they are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["a", "b", "漢", "<unk>"])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast(tokenizer, unk_token="<unk>")


def word_ends() -> Text:
    """The layout of GPT-1 and CLIP, where a token's text depends on whether another follows."""
    names = ["a", "b</w>", "</w>", "é</w>", "x"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(names)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return fast(tokenizer)


KNOWN: dict[str, Callable[[], Text]] = {
    f.__name__: cache(f)
    for f in (byte_level, tiktoken_like, byte_fallback, gemma_like, unigram, word_piece, words)
}  # fmt: skip
ALL = KNOWN | {"word_ends": cache(word_ends)}
