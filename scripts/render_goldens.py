"""Records the texts that vLLM makes of request bodies by the templates of tests/fixtures; see scripts/render-goldens."""

import copy
import json
import logging
import sys
from pathlib import Path

logging.disable(logging.CRITICAL)

from transformers import PreTrainedTokenizerFast  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.renderers import hf  # noqa: E402
from vllm.renderers.chat_utils import parse_chat_messages  # noqa: E402
from vllm.renderers.params import merge_kwargs  # noqa: E402


class Model:
    """What the renderer asks of a model's configuration."""

    multimodal_config = None
    enable_prompt_embeds = False
    trust_remote_code = False
    tokenizer_revision = code_revision = revision = None
    tokenizer = model = "tiny"
    max_model_len = 100_000

    class hf_config:
        model_type = "tiny"


def render(template: str, body: dict, tokenizer: PreTrainedTokenizerFast) -> str:
    """The steps of `OnlineRenderer.preprocess_chat` up to the text."""
    request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    params = request.build_chat_params(template, "auto").with_defaults(merge_kwargs({}, {"tools": tools, "tokenize": False}))
    content_format = hf.resolve_chat_template_content_format(
        chat_template=params.chat_template,
        tools=params.chat_template_kwargs.get("tools"),
        given_format="auto",
        tokenizer=tokenizer,
        model_config=Model,
    )
    conversation, _, _ = parse_chat_messages(request.messages, Model, content_format=content_format)
    return hf.safe_apply_chat_template(Model, tokenizer, conversation, **params.get_apply_chat_template_kwargs())


def main(root: Path) -> None:
    fixtures = root / "tests/fixtures/templates"
    hf._try_get_processor_chat_template = lambda *_, **__: None
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(root / "src/prompt/tiny/tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    bodies = json.loads((fixtures / "bodies.json").read_text(encoding="utf-8"))
    texts: dict[str, dict[str, str | None]] = {}
    for template in sorted(fixtures.glob("*.jinja")):
        texts[template.stem] = {}
        for case, body in bodies.items():
            try:
                texts[template.stem][case] = render(template.read_text(encoding="utf-8"), body, tokenizer)
            except Exception:  # the engine answers 400
                texts[template.stem][case] = None
    written = json.dumps(texts, ensure_ascii=False, indent=0)
    (fixtures / "texts.json").write_text(written + "\n", encoding="utf-8")


main(Path(sys.argv[1]))
