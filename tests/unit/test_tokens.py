"""A text and its tokens: joined, they are the text that was written, for each kind of tokenizer."""

from __future__ import annotations

import json
import pickle
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

from manyheads import TokenizedText, lm
from manyheads.tokens import count_words, is_boundary, is_mark, is_within_word, printable

TEXTS = {
    "English": "The assertion failed:  assertions aren't convenient, naïve café.",
    "Chinese": "我爱机器学习，机器也爱我。",
    "Arabic": "السَّلامُ عليكم يا عالم، می‌خواهم",
    "Devanagari": "नमस्ते दुनिया, क्षत्रिय हिन्दी।",
    "Hangul": "한국어 \u1112\u1161\u11ab",
    "Thai": "สวัสดีชาวโลก น้ำ",
    "marks": "e\u0301 n\u0303 o\u0302\u0323",
    "emoji": "a 👨‍👩‍👧‍👦 family, 👍🏽 🇩🇪🇫🇷 ❤️!",
    "code": "def f(x):\n\treturn  x['a'] + \"don't\"\r\n\n    pass\n",
    "blanks": "  two  \n\n\t ends \n",
}
SAMPLE = [*TEXTS.values(), "the assert statement is convenient", "我爱机器"]


def byte_level(pattern: str | None = None, trim: bool = False) -> Tokenizer:
    """GPT-2's kind, or with a pattern Llama 3's and Qwen's; RoBERTa trims the offsets of blanks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLE, BpeTrainer(vocab_size=320, initial_alphabet=alphabet, **QUIET))
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: lowercase, without accents, blanks are no tokens; between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        SAMPLE[:1], WordPieceTrainer(vocab_size=80, special_tokens=special, **QUIET)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def unigram() -> Tokenizer:
    """T5's kind: ▁ before words, unknown characters, </s> at the end."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Nmt()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["</s>", "<unk>"]
    trainer = UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", **QUIET)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: SentencePiece's BPE, <s> and ▁ before the text, unknown characters as bytes."""
    words = [
        "<unk>",
        "<s>",
        *(f"<0x{n:02X}>" for n in range(256)),
        "▁",
        *"thefast",
        "th",
        "the",
        "▁the",
        "我",
    ]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {word: n for n, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


QUIET: Any = {"show_progress": False}
LLAMA = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": byte_level,
    "Llama 3": lambda: byte_level(LLAMA),
    "RoBERTa": lambda: byte_level(trim=True),
    "BERT": word_piece,
    "T5": unigram,
    "Llama 2": byte_fallback,
    "ours": lambda: lm.load(None)[1],
}
LOSSLESS = ("GPT-2", "Llama 3", "RoBERTa", "Llama 2", "ours")  # decoding gives the text that was encoded


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def check(tokens: TokenizedText, text: str) -> None:
    """Check that tokens are the text, in each of its forms."""
    assert tokens.text == text
    assert "".join(tokens.piece(n) for n in range(len(tokens))) == text
    units, words = dict.fromkeys(tokens.units), dict.fromkeys(tokens.words)
    for groups in (units, words):  # each token is in one, in order
        assert [n for group in groups for n in group] == list(range(len(tokens)))
    ordinary = [n for n in range(len(tokens)) if n not in tokens.special]
    assert "".join(tokens.characters(unit[0]) for unit in units if unit[0] not in tokens.special) == text
    for unit in units:
        assert is_boundary(text, tokens.starts[unit[0]])  # no character is cut in two
        assert len({tokens[n] for n in unit}) == 1
    for n, label in enumerate(tokens):
        assert label
        assert " " not in label or n in tokens.special
        assert "\ufffd" not in label or "\ufffd" in text
        assert not any(unicodedata.category(c) in ("Cc", "Zs") for c in label)
    # People read their words, apart from blanks.
    read = "".join(name for n, name in enumerate(tokens.names) if n in set(ordinary))
    if text.isprintable() and not set(text) & {*"␣⏎⇥\\"}:
        assert "".join(read.replace("␣", "").split()) == "".join(text.split())
    stored = json.loads(json.dumps({"pieces": tokens.pieces, "special": tokens.special}))
    assert TokenizedText(stored["pieces"], stored["special"]) == tokens == pickle.loads(pickle.dumps(tokens))


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_joined_the_tokens_are_the_text(kind: str, language: str) -> None:
    tokenizer, text = tokenizer_of(kind), TEXTS[language]
    encoding = tokenizer.encode(text)
    tokens = TokenizedText.from_encoding(text, encoding)
    assert len(tokens) == len(encoding.ids)
    check(tokens, text)
    decoded = TokenizedText.from_ids(encoding.ids, tokenizer)
    if kind in LOSSLESS:
        check(decoded, text)
    special = {encoding.ids[n] for n in decoded.special}
    plain = [n for n in encoding.ids if n not in special]
    assert decoded.text == tokenizer.decode(plain, skip_special_tokens=False)


PARTS = st.sampled_from(
    [*"ab' _.,\t\n\r", "the", " the", *"我機ü", "e\u0301", "नम", "स्ते", "ل", "لَ", "👩‍👧", "🇩", "🇪"]
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.lists(PARTS, max_size=12).map("".join) | st.text(max_size=12))
def test_any_text_is_read_as_it_was_written(kind: str, text: str) -> None:
    encoding = tokenizer_of(kind).encode(text)
    tokens = TokenizedText.from_encoding(text, encoding)
    assert len(tokens) == len(encoding.ids)
    if len(tokens) > len(tokens.special):
        check(tokens, text)
    if kind in LOSSLESS and "\ufffd" not in text:
        decoded = TokenizedText.from_ids(encoding.ids, tokenizer_of(kind))
        assert decoded.text == tokenizer_of(kind).decode(encoding.ids)


def test_labels_are_words_and_whole_characters() -> None:
    def names(kind: str, text: str) -> list[str]:
        return TokenizedText.from_encoding(text, tokenizer_of(kind).encode(text)).names

    assert names("GPT-2", " \n\t") == ["␣", "⏎", "⇥"]
    assert names("GPT-2", "é漢") == ["é", "", "漢", "", ""]
    assert names("GPT-2", "👩‍👧") == ["👩‍👧", *[""] * (len(names("GPT-2", "👩‍👧")) - 1)]
    assert names("BERT", "Naïve,  café")[0] == "[CLS]"
    assert "".join(names("BERT", "Naïve,  café")[1:-1]) == "Naïve,café"
    assert names("Llama 2", "the 漢") == ["<s>", "the", "␣", "漢", "", ""]
    assert names("Llama 2", "漢")[:3] == ["<s>", "␣", "漢"]  # Llama 2 puts a space before a text
    assert names("T5", "the 机") == ["the", "机", "</s>"] or names("T5", "the")[-1] == "</s>"


def test_a_word_and_its_pieces() -> None:
    pieces = ("[CLS]", "The", " sta", "tion", "'s", ", 20", "23", " foo", "_", "bar", " 漢", "字", "[SEP]")
    tokens = TokenizedText(pieces, (0, 12))
    assert tokens.text == "The station's, 2023 foo_bar 漢字"
    words = [None, None, *["station's"] * 3, None, None, *["foo_bar"] * 3, None, None, None]
    words[5:7] = [",␣2023"] * 2
    assert [tokens.word(n) for n in range(13)] == words
    assert list(tokens) == [
        "[CLS]",
        "The",
        "sta",
        "tion",
        "'s",
        ",␣20",
        "23",
        "foo",
        "_",
        "bar",
        "漢",
        "字",
        "[SEP]",
    ]
    assert tokens[1:3] == TokenizedText(("The", " sta"))
    assert tokens[:4:3].special == (0,)
    assert "13 tokens" in repr(tokens)


def test_words_in_a_text() -> None:
    def inside(text: str) -> list[int]:
        return [n for n in range(len(text) + 1) if is_within_word(text, n)]

    assert inside("a bc") == [3]
    assert inside("don't 'a'") == [1, 2, 3, 4]
    assert inside("x-y") == inside("漢字") == inside("สวัส") == []
    assert inside("नमः") == [1, 2]
    text = "the other theme, the end: the."
    assert [count_words(text, word) for word in ("the", "e", "theme", ",", "nothing")] == [3, 0, 1, 1, 0]
    assert count_words(text, "the", text.index("the end")) == 1


def test_characters_of_unicode() -> None:
    regex = pytest.importorskip("regex", reason="an independent implementation of the rules")
    for text in TEXTS.values():
        cuts = {0, len(text)} | {found.start() for found in regex.finditer(r"\X", text)}
        assert {n for n in range(len(text) + 1) if is_boundary(text, n)} == cuts, text


def test_what_cannot_be_seen_is_escaped() -> None:
    assert printable(" a\u202eb\x00 ") == "a\\u202eb\\x00"
    assert printable("a\u00a0b\u3000c") == "a␣b␣c"
    assert printable("می\u200cخواهم") == "می\u200cخواهم"
    assert printable("\u200d") == "\\u200d"
    assert printable("\r\n") == "⏎"


def test_a_text_that_was_cut() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokens = TokenizedText.from_encoding("漢 the rest", tokenizer.encode("漢 the rest"))
    assert tokens.text == "漢"
    tokenizer.enable_truncation(4)
    first = tokenizer.encode("the rest of the rest")
    for part in (first, *first.overflowing):  # all parts of it are accepted
        assert TokenizedText.from_encoding("the rest of the rest", part)


def test_ids_of_a_long_text_are_decoded_in_parts() -> None:
    text = "".join(TEXTS.values()) * 3
    for kind in LOSSLESS:
        check(
            TokenizedText.from_ids(torch.tensor(tokenizer_of(kind).encode(text).ids), tokenizer_of(kind)),
            text,
        )


def test_bytes_that_are_no_text_are_replacement_characters() -> None:
    ids = tokenizer_of("GPT-2").encode("a漢b").ids
    broken = TokenizedText.from_ids([ids[0], *ids[2:]], tokenizer_of("GPT-2"))
    assert broken.text == tokenizer_of("GPT-2").decode([ids[0], *ids[2:]])
    assert broken.text.startswith("a\ufffd")


def test_tokenizers_of_transformers() -> None:
    tf = pytest.importorskip("transformers")
    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("BERT"), cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.pad_token, fast.unk_token = "[SEP]", "[UNK]"
    text = TEXTS["English"]
    tokens = TokenizedText.from_encoding(text, fast(text))
    check(tokens, text)
    assert tokens.special == (0, len(tokens) - 1)
    batch = fast([text, "the"], padding=True)
    check(TokenizedText.from_encoding("the", batch.encodings[1]), "the")
    decoded = TokenizedText.from_ids(torch.tensor(fast("The 机 aren")["input_ids"]), fast)
    assert decoded.text == fast.decode(fast("The 机 aren", add_special_tokens=False)["input_ids"])
    assert "[UNK]" in decoded.text
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")  # as GPT-2 has it
    gpt2 = tf.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **end)
    generated = TokenizedText.from_ids([*gpt2("né 机")["input_ids"], gpt2.eos_token_id], gpt2)
    assert (generated.text, generated[-1], generated.special) == (
        "né 机",
        end["eos_token"],
        (len(generated) - 1,),
    )
    slow = tf.ByT5Tokenizer()
    with pytest.raises(TypeError, match=r"fast tokenizer, which has offsets.*TokenizedText.from_ids"):
        TokenizedText.from_encoding(text, slow(text))
    for text in TEXTS.values():
        tokens = TokenizedText.from_ids(slow(text)["input_ids"], slow)
        check(tokens, text)
        assert tokens[-1] == "</s>"


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: TokenizedText("ab"), TypeError, "pieces to be a tuple, got a str"),  # type: ignore[arg-type]
        (lambda: TokenizedText(("a", 1)), TypeError, "only str, got an int"),  # type: ignore[arg-type]
        (lambda: TokenizedText(("a",), (True,)), TypeError, "only int, got a bool"),
        (lambda: TokenizedText(("a", "b"), (2,)), ValueError, r"between 0 and 1, in order, got \(2,\)"),
        (lambda: TokenizedText(("a", "b"), (1, 0)), ValueError, "in order"),
        (lambda: TokenizedText(("a", "b"), (1, 1)), ValueError, "different positions"),
        (lambda: TokenizedText.from_encoding("a", ["a"]), TypeError, "a fast tokenizer, .* got a list"),
        (lambda: TokenizedText.from_ids(["a"], None), TypeError, "ids to be integers"),
        (lambda: TokenizedText.from_ids([1, None], None), TypeError, "got a list of a NoneType"),
        (lambda: TokenizedText.from_ids(torch.ones(1, 2).long(), None), TypeError, r"a list\. .* ids\[0\]"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("kind", ["GPT-2", "BERT"])
def test_the_encoding_of_another_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    with pytest.raises(ValueError, match=r"of 'the', which has 3 characters, got .* ends at character 8"):
        TokenizedText.from_encoding("the", tokenizer.encode("the rest"))
    with pytest.raises(ValueError, match=r"of 'the rest', which has 8 characters, .* character 3\. Pass"):
        TokenizedText.from_encoding("the rest", tokenizer.encode("the"))
    assert TokenizedText.from_encoding("the \n", tokenizer.encode("the")).text == "the \n"


def test_two_texts_in_one_encoding() -> None:
    with pytest.raises(ValueError, match="one text, got several"):
        TokenizedText.from_encoding("a", tokenizer_of("GPT-2").encode("a", "b"))


@given(text=st.lists(PARTS | st.sampled_from(["é", "\u0301", "مُ", "عَلَ", "\u200d", "\u0600"])).map("".join))
def test_marks_that_no_token_covers_belong_to_their_letter(text: str) -> None:
    """BERT's tokenizer drops accents: without them, its tokens would begin within characters."""
    encoding = tokenizer_of("BERT").encode(text)
    tokens = TokenizedText.from_encoding(text, encoding)
    if len(tokens) == len(tokens.special):
        return
    check(tokens, text)
    for unit in tokens.units:
        if len(unit) > 1:  # it has no blanks between its tokens
            covered = text[encoding.offsets[unit[0]][0] : encoding.offsets[unit[-1]][1]]
            assert not any(character.isspace() for character in covered)
    for n, (_, stop) in enumerate(encoding.offsets):
        if n not in tokens.special and stop < len(text) and is_mark(text[stop]):
            assert text[stop] in tokens.characters(n)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cafe\u0301 naïve", ["cafe\u0301", "naïve"]),
        ("عَلَيْكُمْ \nI", ["عَلَيْكُمْ", "I"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
    ],
)
def test_words_with_marks_are_words_in_a_tokenizer_without_marks(text: str, words: list[str]) -> None:
    tokens = TokenizedText.from_encoding(text, tokenizer_of("BERT").encode(text))
    shown = dict.fromkeys((group, "".join(map(tokens.piece, group)).strip()) for group in tokens.words[1:-1])
    assert [word for _, word in shown] == words
