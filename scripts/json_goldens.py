"""Writes JSON texts and what Python's `json` makes of them, for tests/prompts_golden.rs.

usage: python3 scripts/json_goldens.py tests/fixtures/templates/json.json
"""

import json
import random
import sys

SEED = 20260305
NUMBERS = [
    "0", "-0", "1", "-1", "0.0", "-0.0", "1.0", "1e5", "1E5", "1e+5", "1e-5", "1e-4", "0.0001", "0.00001", "1e15", "1e16",
    "123456789012345678", "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "123456789012345678901234567890", "-9223372036854775808", "-9223372036854775809", "1e308", "1e309", "-1e400", "5e-324",
    "1e-400", "0.1", "0.30000000000000004", "2.675", "1.7976931348623157e308", "100000000000000000000.0", "3.14159265358979",
    "1.0e0", "12345.6789e-3", "NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "1e", "0x10", "- 1", "1_000",
]
TEXTS = [
    r'""', r'"a"', r'"\n\t\r\b\f\\\/\""', r'"\u00e9"', '"é"', r'"\ud83d\ude00"', '"😀"', r'"\ud83d"', r'"\ude00\ud83d"',
    r'"\u0000"', r'"\u001f\u007f\u0080\u2028\u2029\ufeff\uffff"', '"\u2028\u007f\u0080"', r'"<b>&\u0027"', r'"\x41"', r'"\u12"',
    '"a\nb"', '"a\tb"', '"\x7f"', r'"\uD83D\u0041"', '"open', "'a'", r'"\U0001f600"',
]
WORDS = ["null", "true", "false", "None", "True", "nul", "", "[]", "{}", "[1,]", '{"a":1,}', "{a:1}", "[1 2]", "//x", "[" * 60 + "]" * 60]
KEYS = ['"a"', '"b"', r'"\u0061"', '""', r'"\n"', '"é"', r'"\ud83d"', "1"]


def value(chance: random.Random, depth: int) -> str:
    kind = chance.random()
    blank = chance.choice(["", "", " ", "\n", "\t", "\r", "\u00a0"] if chance.random() < 0.05 else ["", " ", "\n"])
    if depth == 0 or kind < 0.5:
        return blank + chance.choice(chance.choice([NUMBERS, TEXTS, WORDS]) if chance.random() < 0.3 else GOOD)
    if kind < 0.75:
        return "[" + ",".join(value(chance, depth - 1) for _ in range(chance.randrange(4))) + blank + "]"
    keys = KEYS if chance.random() < 0.1 else KEYS[:6]
    return "{" + ",".join(f"{chance.choice(keys)}:{value(chance, depth - 1)}" for _ in range(chance.randrange(5))) + "}"


def made(text: str) -> str | None:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


GOOD = [text for text in NUMBERS + TEXTS + WORDS if made(text) is not None and json.loads(text) is not None]


def main(out: str) -> None:
    chance = random.Random(SEED)
    texts = [text for group in (NUMBERS, TEXTS, WORDS) for text in group if text]
    texts += ['{"a":1,"b":2,"a":3}', '{"a":1,"\\u0061":2}', '{"b":1,"a":2}', '[{"z":[1,{"y":{},"x":null}]}]']
    texts += [value(chance, 3) for _ in range(400)]
    cases = [[text, made(text)] for text in dict.fromkeys(texts) if text.strip()]
    # What lone surrogates are in Python no UTF-8 can hold.
    kept = [[text, None if out is None else out.encode("utf-8", "replace").decode()] for text, out in cases]
    with open(out, "w", encoding="utf-8") as file:
        file.write(json.dumps(kept, indent=0) + "\n")
    print(len(kept), "texts,", sum(made is not None for _, made in kept), "are JSON to Python")


main(sys.argv[1])
