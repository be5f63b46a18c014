"""Records the prompts that vLLM makes of request bodies for gpt-oss, whose chat template it does not run; see
scripts/harmony-goldens."""

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["VLLM_SYSTEM_START_DATE"] = "2026-03-05"

from render_goldens import Model, bodies_of  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding  # noqa: E402
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: E402
from vllm.renderers.online_renderer import OnlineRenderer  # noqa: E402


def renderer() -> OnlineRenderer:
    """vLLM's own, without the engine that it does not need for this."""
    made = OnlineRenderer.__new__(OnlineRenderer)
    made.parser, made.model_config = None, Model
    made.renderer = SimpleNamespace(tokenizer=None)
    made.supports_browsing = made.supports_code_interpreter = False
    made.create_error_response = lambda message, **_: ValueError(message)
    return made


def chat(body: dict) -> list[int]:
    request = ChatCompletionRequest.model_validate(body)
    _, inputs = renderer()._make_request_with_harmony(request, request.tools is not None)
    return inputs[0]["prompt_token_ids"]


def responses(body: dict) -> list[int]:
    request = ResponsesRequest.model_validate(body)
    made = renderer()
    made.render_responses_harmony_messages = lambda messages, **_: OnlineRenderer.render_responses_harmony_messages(
        made, messages, cache_salt=None
    )
    result = made._render_responses_with_harmony(
        request, previous_messages=None, previous_response_outputs=None, tool_server=None
    )
    return result.engine_input["prompt_token_ids"]


def digest(ids: list[int]) -> str:
    """FNV-1a, 64 bits, over the ids as little-endian 32-bit numbers."""
    value = 0xCBF29CE484222325
    for byte in b"".join(number.to_bytes(4, "little") for number in ids):
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{value:016x}"


def main(root: Path) -> None:
    fixtures = root / "tests/fixtures/templates"
    encoding = get_encoding()
    made: dict[str, dict[str, dict | None]] = {}
    for kind, make, suffixes in [("chat", chat, ["", "-harmony"]), ("responses", responses, ["-responses", "-harmony-responses"])]:
        made[kind] = {}
        for suffix in suffixes:
            for case, body in bodies_of(root, suffix).items():
                try:
                    ids = make(copy.deepcopy(body))
                    made[kind][case] = {"text": encoding.decode(ids), "ids": digest(ids)}
                except Exception as error:  # the engine answers 400
                    print(kind, case, type(error).__name__, str(error)[:150].replace("\n", " "))
                    made[kind][case] = None
    written = json.dumps(made, ensure_ascii=False, indent=0)
    (fixtures / "texts-harmony.json").write_text(written + "\n", encoding="utf-8")


main(Path(sys.argv[1]))
