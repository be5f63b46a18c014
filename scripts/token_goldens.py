"""Writes a corpus that tokenizers disagree on, and a digest of the ids that Python's `tokenizers` makes of each text."""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer

PROSE = (
    "The quick brown fox can't jump over the lazy dog's 1,234 fences; we've seen it, they'll deny it. "
    "Ein Zug fährt um 7:05 nach Zürich, und niemand weiß warum. « Où es-tu ? » demanda-t-elle. "
)
CODE = (
    'fn main() {\n    let x: u32 = 0xFF_u32 >> 3;\n\tif x != 31 { panic!("{x:?}\\n"); }\n}\r\n'
    'def f(a, *b, **c):\n    return {"a": [a, *b], **c}  # ": "\n\n\nclass A:\n    """doc"""\n'
)
DATA = '{"role": "user", "content": "a\\nb", "n": [1, 2.50, -3e10, null, true], "空": {"k": "\\u00e9"}}\n'
CHINESE = "今天天气很好，我们去公园散步吧。人工智能（AI）正在改变世界！価格は１２３４円です。대한민국 만세"
SCRIPTS = [
    "👩‍👩‍👧‍👦🏳️‍🌈🇨🇭🇩🇪", "é é ﬁ ﬂ ñ ä", "한글 한글", "שָׁלוֹם עולם", "สวัสดีครับ", "தமிழ் மொழி", "العربية ١٢٣",
    "ſ'ſ K'K it'ſ I'LL i'Ll don’t", "Ⅷ ½ ² ３ ٣ ౩", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0001f9ff", "a\u200bb\u200dc\u2060d\ufefff", "\x00\x01\x1f\x7f\x85",
]
BLANKS = [" ", "  ", "\t", "\n", "\r\n", "\r", "\n\n", "\u00a0", "\u2003", "\u2028", "\u2029", "\u0085", "\u3000", "\ufeff", "\x0b", "\x0c"]
TOKENS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|begin_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>",
    "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<start_of_turn>", "<end_of_turn>",
    "<unused12>", "<bos>", "<pad>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<s>", "</s>", "<unk>", "\n\n\n\n", "<table>",
]
SEED = 20260305


def corpus() -> list[str]:
    """Texts in which every kind of piece stands beside every other."""
    chance = random.Random(SEED)
    texts = ["", " ", "a", *SCRIPTS, *BLANKS]
    for source in (PROSE, CODE, DATA, CHINESE):
        texts += [source, source.upper(), source * 3]
        for _ in range(40):
            start = chance.randrange(len(source))
            texts.append(source[start : start + chance.randrange(1, 60)])
    for _ in range(80):
        texts.append("".join(chance.choice(BLANKS + ["x", "1", "é", ".", "你"]) for _ in range(chance.randrange(2, 9))))
    for _ in range(40):
        texts.append("".join(chr(chance.choice([0x20, 0xA0, 0x300, 0x1100, 0x2000]) + chance.randrange(0x60)) for _ in range(12)))
        texts.append("".join(chr(chance.randrange(0x10000, 0x1FFFF)) for _ in range(6)))
    texts += [run * (3000 // len(run)) for run in ("a", " ", "\n", "ab ", "!", "9", "你", "=-", "\t ", "🙂")]
    for token in TOKENS:
        texts += [token, token * 2, token[:-1], token[1:], token.upper(), f"x{token}y", f" {token} ", f"\n{token}\u0301\n", token + token[:3]]
    parts = [*TOKENS, *SCRIPTS, *BLANKS, PROSE, CODE, DATA, CHINESE, "user\n", "1234567", "don't", "<|", "|>", "<"]
    for _ in range(150):
        texts.append("".join(chance.choice(parts)[: chance.choice([2, 7, 99])] for _ in range(chance.randrange(2, 8))))
    return list(dict.fromkeys(texts))


def digest(ids: list[int]) -> str:
    """FNV-1a, 64 bits, over the ids as little-endian 32-bit numbers."""
    value = 0xCBF29CE484222325
    for byte in b"".join(number.to_bytes(4, "little") for number in ids):
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{value:016x}"


def main(root: Path, directory: Path, names: list[str]) -> None:
    out = root / "tests/fixtures/tokens"
    out.mkdir(exist_ok=True)
    texts = corpus()
    (out / "corpus.json").write_text(json.dumps(texts, indent=0) + "\n", encoding="utf-8")
    digests = {}
    for name in names:
        tokenizer = Tokenizer.from_file(str(directory / name / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        digests[name] = [digest(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        print(name, len(texts), "texts", flush=True)
    (out / "digests.json").write_text(json.dumps(digests, indent=0) + "\n", encoding="utf-8")


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
