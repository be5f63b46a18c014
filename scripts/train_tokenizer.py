"""Trains a small byte-level BPE on the text of the repository; see scripts/train-tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 2048  # keeps tokenizer.json below 100 KB
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The split of the Qwen family: words, single digits, punctuation, newlines.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = {".rs", ".md", ".toml", ".py", ".cfg", ".conf", ".sh", ""}


def corpus(root: Path) -> list[str]:
    listed = subprocess.run(["git", "-C", root, "ls-files"], check=True, capture_output=True, text=True).stdout
    own = [root / name for name in sorted(listed.splitlines()) if not name.startswith(("src/prompt/tiny/", "tests/fixtures/"))]
    return [file.read_text(encoding="utf-8") for file in own if file.suffix in TEXT and file.name != "Cargo.lock"]


def main(root: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(root), trainer)
    tiny = root / "src/prompt/tiny"
    tiny.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (tiny / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False}
    (tiny / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


main(Path(sys.argv[1]))
