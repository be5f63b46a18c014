"""Records which chat template vLLM takes of a model's files, with and without tools; see scripts/template-choice."""

import itertools
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
logging.disable(logging.CRITICAL)

from vllm.renderers import hf  # noqa: E402
from vllm.tokenizers import get_tokenizer  # noqa: E402

CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {"model_type": "llama", "hidden_size": 64, "vocab_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURES = {
    "model_type": "llava",
    "vision_config": CLIP | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    "text_config": TEXT,
    "image_token_index": 5,
}
# What kind of model it is: vLLM asks the processor of a model for pictures, which a text model does not have.
MODELS = {
    "text": {"config.json": TEXT | {"architectures": ["LlamaForCausalLM"]}},
    "pictures": {
        "config.json": PICTURES | {"architectures": ["LlavaForConditionalGeneration"]},
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"},
    },
}
LIST = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "list tools"}]
TOKENIZER = [{}, {"chat_template": "config"}, {"chat_template": LIST}, {"chat_template": LIST[1:]}]
JINJA = [{}, {"chat_template.jinja": "jinja"}]
LEGACY = [{}, {"chat_template.json": {"chat_template": "json"}}]
ADDITIONAL = [
    {f"additional_chat_templates/{name}.jinja": f"additional {name}" for name in names}
    for names in [[], ["tool_use"], ["default"], ["rag"], ["tool_use", "default"]]
]
PROCESSOR = [{}, {"processor_config.json": {"processor_class": "LlavaProcessor", "chat_template": "processor"}}]


class Model:
    tokenizer_revision = code_revision = tokenizer = model = None
    trust_remote_code = False

    class hf_config:
        model_type = "tiny"


def write(directory: Path, files: dict) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def choice(directory: Path, tools: list | None) -> str | None:
    hf._PROCESSOR_CHAT_TEMPLATES.clear()
    tokenizer = get_tokenizer(str(directory), truncation_side="left")
    try:
        template = hf.resolve_chat_template(tokenizer, None, tools, model_config=Model)
    except Exception:
        return None
    # Several templates of a processor stay a table, which is no template: vLLM fails where it would render.
    return template if isinstance(template, str) else None


def main(root: Path) -> None:
    tokenizer = (root / "src/prompt/tiny/tokenizer.json").read_text(encoding="utf-8")
    cases = []
    for model, config, *others in itertools.product(MODELS, TOKENIZER, JINJA, LEGACY, ADDITIONAL, PROCESSOR):
        if others[-1] and (model == "text" or others[-2]):
            continue
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {"image_token": "<|im_start|>"}}
        files = {"tokenizer_config.json": tokenizer_config | config}
        files |= MODELS[model]
        for other in others:
            files |= other
        with tempfile.TemporaryDirectory() as made:
            write(Path(made), files | {"tokenizer.json": tokenizer})
            chosen = [choice(Path(made), tools) for tools in (None, [{"type": "function"}])]
        cases.append([files, *chosen])
    lines = ",\n".join(json.dumps(case) for case in cases)
    (root / "tests/fixtures/templates/choice.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


main(Path(sys.argv[1]))
