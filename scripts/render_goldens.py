"""Records the texts that vLLM makes of request bodies by the templates of tests/fixtures; see scripts/render-goldens."""

import copy
import json
import logging
import sys
from pathlib import Path
from typing import get_args

logging.disable(logging.CRITICAL)

import transformers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from vllm.entrypoints.anthropic.protocol import AnthropicEffort, AnthropicMessagesRequest  # noqa: E402
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: E402
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts  # noqa: E402
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


def render(template: str, tokenizer: PreTrainedTokenizerFast, request, messages: list, tools: list | None) -> str:
    """The steps of `OnlineRenderer.preprocess_chat` up to the text."""
    defaults = merge_kwargs({}, {"tools": tools, "tokenize": False})
    params = request.build_chat_params(template, "auto").with_defaults(defaults)
    content_format = hf.resolve_chat_template_content_format(
        chat_template=params.chat_template,
        tools=params.chat_template_kwargs.get("tools"),
        given_format="auto",
        tokenizer=tokenizer,
        model_config=Model,
    )
    conversation, _, _ = parse_chat_messages(messages, Model, content_format=content_format)
    return hf.safe_apply_chat_template(Model, tokenizer, conversation, **params.get_apply_chat_template_kwargs())


def chat(template: str, body: dict, tokenizer: PreTrainedTokenizerFast) -> str:
    request = ChatCompletionRequest.model_validate(body)
    return of_chat(template, request, tokenizer)


def of_chat(template: str, request: ChatCompletionRequest, tokenizer: PreTrainedTokenizerFast) -> str:
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return render(template, tokenizer, request, request.messages, tools)


def responses(template: str, body: dict, tokenizer: PreTrainedTokenizerFast) -> str:
    request = ResponsesRequest.model_validate(body)
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    return render(template, tokenizer, request, messages, tools)


def messages(template: str, body: dict, tokenizer: PreTrainedTokenizerFast) -> str:
    request = AnthropicMessagesRequest.model_validate(body)
    converted = AnthropicServingMessages.to_chat_completion_request(
        request,
        merge_inline_system=AnthropicServingMessages._detect_merge_inline_system(template),
        disabled_thinking_effort=disabled_effort(template, tokenizer),
    )
    return of_chat(template, converted, tokenizer)


def disabled_effort(template: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """`AnthropicServingMessages._probe_disabled_thinking_effort`, which needs an engine."""

    def probe(effort: str) -> str | None:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort)
        try:
            return of_chat(template, request, tokenizer)
        except Exception:
            return None

    none = probe("none")
    same = none is None or any(probe(effort) == none for effort in get_args(AnthropicEffort))
    return "low" if same else "none"


KINDS = {"": chat, "-messages": messages, "-responses": responses}


def tiny_tokenizer(root: Path) -> PreTrainedTokenizerFast:
    hf._try_get_processor_chat_template = lambda *_, **__: None
    return PreTrainedTokenizerFast(
        tokenizer_file=str(root / "src/prompt/tiny/tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


def bodies_of(root: Path, suffix: str) -> dict[str, dict]:
    return json.loads((root / f"tests/fixtures/templates/bodies{suffix}.json").read_text(encoding="utf-8"))


def release() -> str:
    """Which `transformers` it is, as `pool.prompt.compat` has it."""
    return "transformers-" + ".".join(transformers.__version__.split(".")[:2])


def main(root: Path) -> None:
    fixtures = root / "tests/fixtures/templates"
    of_release = "" if release() == "transformers-5.19" else f"-{release()}"
    tokenizer = tiny_tokenizer(root)
    for suffix, make in KINDS.items():
        bodies = bodies_of(root, suffix)
        texts: dict[str, dict[str, str | None]] = {}
        # The releases differ in what messages are made of.
        for template in sorted(fixtures.glob("fields.jinja" if of_release else "*.jinja")):
            texts[template.stem] = {}
            for case, body in bodies.items():
                try:
                    text = make(template.read_text(encoding="utf-8"), copy.deepcopy(body), tokenizer)
                except Exception:  # the engine answers 400
                    text = None
                texts[template.stem][case] = text
        written = json.dumps(texts, ensure_ascii=False, indent=0)
        (fixtures / f"texts{suffix}{of_release}.json").write_text(written + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
