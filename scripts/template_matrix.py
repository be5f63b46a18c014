"""Records the texts that vLLM makes of request bodies by the templates of real models; see scripts/template-matrix."""

import copy
import datetime
import json
import sys
from pathlib import Path

from render_goldens import KINDS, bodies_of, release, tiny_tokenizer
from transformers.utils import chat_template_utils

FROZEN = datetime.datetime(2026, 3, 5, 14, 7, 9)


class Frozen(datetime.datetime):
    """The clock of templates that print the date; tests/prompts_golden.rs sets ours to the same time."""

    @classmethod
    def now(cls, tz=None):
        return FROZEN


def templates(directory: Path) -> dict[str, str]:
    """All templates by name; a model with several has one for each of its names."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in directory.glob("llama.cpp/*.jinja")}
    for path in directory.glob("*.json"):
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            found[path.stem] = template
        for named in template if isinstance(template, list) else []:
            found[f"{path.stem}-{named['name']}"] = named["template"]
    return dict(sorted(found.items()))


def main(root: Path, directory: Path) -> None:
    chat_template_utils.datetime = Frozen
    tokenizer = tiny_tokenizer(root)
    out = directory / "texts"
    out.mkdir(exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    for name, template in templates(directory).items():
        texts: dict[str, dict[str, str | None]] = {}
        for suffix, make in KINDS.items():
            texts[suffix] = {}
            for case, body in bodies_of(root, suffix).items():
                try:
                    texts[suffix][case] = make(template, copy.deepcopy(body), tokenizer)
                except Exception:  # the engine answers 400
                    texts[suffix][case] = None
        made = {"template": template, "compat": release(), "texts": texts}
        (out / f"{name}.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
        refused = sum(text is None for cases in texts.values() for text in cases.values())
        print(f"{name}: {sum(map(len, texts.values()))} bodies, vLLM refuses {refused}", flush=True)


main(Path(sys.argv[1]), Path(sys.argv[2]))
