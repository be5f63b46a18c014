"""Asks vLLM's own front end, from its HTTP layer to the door of its engine, what becomes of request bodies; see
scripts/request-goldens and scripts/request-matrix."""

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
logging.disable(logging.CRITICAL)

import httpx  # noqa: E402
from request_bodies import BATCH, COMPLETIONS, Bodies, Row, grid  # noqa: E402
from vllm import AsyncEngineArgs  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: E402
from vllm.entrypoints.launchers.app import build_app  # noqa: E402
from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.renderers import renderer_from_config  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.engine.input_processor import InputProcessor  # noqa: E402

FLAGS = ["--served-model-name", "m", "--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
TASKS = ("generate",)


class Engine:
    """Stands where the engine does: checks a request by vLLM's own code, keeps its prompt and answers one token."""

    errored = is_stopped = False
    is_running = True
    dead_error = RuntimeError()

    def __init__(self, config: VllmConfig):
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self.prompts: list[list[int]] = []

    def check_admission(self, *_, **__):
        pass

    async def get_supported_tasks(self):
        return TASKS

    async def is_tracing_enabled(self):
        return False

    async def abort(self, *_, **__):
        pass

    async def notify_kv_transfer_request_rejected(self, *_, **__):
        pass

    async def generate(
        self, prompt, params, request_id, *, prompt_text=None, reasoning_ended=None, reasoning_parser_kwargs=None, **others
    ):
        request = self.input_processor.process_inputs(request_id, prompt, params, TASKS, **others)
        self.prompts.append(list(request.prompt_token_ids))
        answers = [CompletionOutput(at, "x", [0], None, None, finish_reason="stop") for at in range(params.n)]
        yield RequestOutput(request_id, prompt_text, request.prompt_token_ids, None, answers, True)


class FrontEnd:
    """`vllm serve` without its engine and its socket."""

    def __init__(self, engine: Engine, http: httpx.AsyncClient):
        self.engine, self.http = engine, http

    @staticmethod
    async def start(model: Path, context: int) -> "FrontEnd":
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(["--model", str(model), "--max-model-len", str(context), *FLAGS])
        engine_args = AsyncEngineArgs.from_cli_args(args)
        outputs = engine_args.create_structured_outputs_config()
        config = VllmConfig(model_config=engine_args.create_model_config(), structured_outputs_config=outputs)
        engine = Engine(config)
        app = build_app(args, TASKS, config.model_config)
        await init_app_state(engine, app.state, args, TASKS)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        return FrontEnd(engine, httpx.AsyncClient(transport=transport, base_url="http://engine"))

    async def ask(self, path: str, body: dict) -> tuple[list[list[int]] | None, str]:
        """The prompts that reached the engine, or why none did."""
        self.engine.prompts = []
        content = json.dumps(body, ensure_ascii=False).encode()
        answer = await self.http.post(path, content=content, headers={"content-type": "application/json"})
        prompts = body.get("messages") if path == BATCH else body.get("prompt") if path == COMPLETIONS else None
        is_several = isinstance(prompts, list) and not any(isinstance(item, int) for item in prompts)
        if self.engine.prompts and len(self.engine.prompts) == (len(prompts) if is_several else 1):
            return self.engine.prompts, ""
        return None, f"{answer.status_code} {answer.text[:400]}"


SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
CONFIG = SIZES | dict(head_dim=32, hidden_act="silu", rms_norm_eps=1e-6, torch_dtype="bfloat16", max_position_embeddings=4096)


def write_config(directory: Path, architecture: str, model_type: str, vocabulary: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"architectures": [architecture], "model_type": model_type, "vocab_size": vocabulary}
    (directory / "config.json").write_text(json.dumps(config))


# What the tokenizer puts before and behind a text, by the models of the fixture.
AROUND = {
    "plain": ([], []),
    "begins": (["<|endoftext|>"], []),
    "both": (["<|endoftext|>"], ["<|im_end|>"]),
    "twice": (["<|endoftext|>", "<|im_start|>"], []),
}
TINY_CONTEXT = 48


def tiny_models(root: Path, directory: Path) -> Iterator[tuple[str, Path]]:
    """The embedded tokenizer, with tokens put around a text; tests/prompts_golden.rs makes the same."""
    tokenizer = json.loads((root / "src/prompt/tiny/tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = lambda token: {"SpecialToken": {"id": token, "type_id": 0}}  # noqa: E731
    text = lambda name: {"Sequence": {"id": name, "type_id": 0}}  # noqa: E731
    for name, (before, after) in AROUND.items():
        made = directory / name
        write_config(made, "Qwen3ForCausalLM", "qwen3", 3000)
        if before:
            tokenizer["post_processor"] = {
                "type": "TemplateProcessing",
                "single": [*map(special, before), text("A"), *map(special, after)],
                "pair": [text("A"), text("B")],
                "special_tokens": {x: {"id": x, "ids": [ids[x]], "tokens": [x]} for x in before + after},
            }
        (made / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        (made / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        shutil.copy(root / "tests/fixtures/templates/chatml.jinja", made / "chat_template.jinja")
        yield name, made


async def fixture(root: Path, directory: Path) -> None:
    rows = grid()
    outcomes: list[dict] = [{} for _ in rows]
    for name, model in tiny_models(root, directory / "models"):
        front = await FrontEnd.start(model, TINY_CONTEXT)
        for outcome, (path, body) in zip(outcomes, rows):
            outcome[name], _ = await front.ask(path, body)
    written = {"context": TINY_CONTEXT, "around": AROUND, "rows": []}
    for (path, body), outcome in zip(rows, outcomes):
        same = all(prompts == outcome["plain"] for prompts in outcome.values())
        written["rows"].append([path, body, outcome["plain"] if same else outcome])
    lines = [json.dumps(row, ensure_ascii=False) for row in written.pop("rows")]
    head = json.dumps(written)[:-1]
    text = head + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n"
    (root / "tests/fixtures/requests.json").write_text(text, encoding="utf-8")


REAL_CONTEXT = 512
REAL = {
    "qwen3": ("Qwen3ForCausalLM", "qwen3", 151_936),
    "qwen2_5": ("Qwen2ForCausalLM", "qwen2", 151_936),
    "llama3_1": ("LlamaForCausalLM", "llama", 128_256),
    "llama3_2": ("LlamaForCausalLM", "llama", 128_256),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", 262_208),
    "mistral_nemo": ("MistralForCausalLM", "mistral", 131_072),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3", 129_280),
}


async def matrix(tokenizers: Path, directory: Path, seed: int, count: int, names: list[str]) -> None:
    bodies = Bodies(seed)
    rows: list[Row] = [bodies.row() for _ in range(count)]
    for name in names:
        if not (tokenizers / name / "tokenizer.json").exists():
            print(f"{name}: scripts/fetch-tokenizers {name} fetches its tokenizer")
            continue
        model = directory / "models" / name
        write_config(model, *REAL[name])
        for file in (tokenizers / name).iterdir():
            shutil.copy(file, model / file.name)
        front = await FrontEnd.start(model, REAL_CONTEXT)
        started = time.monotonic()
        written = []
        for path, body in rows:
            prompts, error = await front.ask(path, body)
            written.append([path, body, prompts, error])
        made = {"context": REAL_CONTEXT, "rows": written}
        (directory / f"{name}.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
        answered = sum(row[2] is not None for row in written)
        print(f"{name}: {answered} of {count} bodies reach the engine ({time.monotonic() - started:.0f} s)", flush=True)


def main(root: Path, directory: Path, *more: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if more:
        tokenizers, seed, count, *names = more
        asyncio.run(matrix(Path(tokenizers), directory, int(seed), int(count), names or list(REAL)))
    else:
        asyncio.run(fixture(root, directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
