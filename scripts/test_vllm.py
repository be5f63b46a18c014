"""Drives the test of scripts/test-vllm; run by it with vLLM's own Python."""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

BLOCK_TOKENS = 32  # The smallest that vLLM's CPU attention takes.
GPU_BLOCKS = 161  # One is set aside; few enough that the chats evict each other.
MODEL = "tiny-qwen3"
CHATS, TURNS = 64, 3
START_SECONDS = 1200

parser = argparse.ArgumentParser()
parser.add_argument("--tokenizer", type=Path, required=True)
parser.add_argument("--work", type=Path, required=True)
parser.add_argument("--kvspoa", type=Path, required=True)
parser.add_argument("--haproxy", default="/usr/sbin/haproxy")
args = parser.parse_args()


def make_model(directory):
    """A Qwen3 of random weights: what it says does not matter, what it caches does."""
    import torch
    from safetensors.torch import save_file

    hidden, heads, kv_heads, head, inner, vocabulary, layers = 64, 2, 1, 32, 128, 151936, 2
    torch.manual_seed(0)

    def normal(*shape):
        return (torch.randn(*shape) * 0.05).to(torch.bfloat16)

    def ones(size):
        return torch.ones(size, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(vocabulary, hidden), "model.norm.weight": ones(hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": normal(heads * head, hidden),
            at + "self_attn.k_proj.weight": normal(kv_heads * head, hidden),
            at + "self_attn.v_proj.weight": normal(kv_heads * head, hidden),
            at + "self_attn.o_proj.weight": normal(hidden, heads * head),
            at + "self_attn.q_norm.weight": ones(head),
            at + "self_attn.k_norm.weight": ones(head),
            at + "mlp.gate_proj.weight": normal(inner, hidden),
            at + "mlp.up_proj.weight": normal(inner, hidden),
            at + "mlp.down_proj.weight": normal(hidden, inner),
            at + "input_layernorm.weight": ones(hidden),
            at + "post_attention_layernorm.weight": ones(hidden),
        }
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocabulary,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / name, directory / name)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def call(url, body=None, timeout=120):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.headers, answer.read()


def wait(what, probe, seconds, processes):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if (value := probe()) is not None:
                return value
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        for process in processes:
            if process.poll() is not None:
                sys.exit(f"a process ended while waiting until {what}: see {logs}")
        time.sleep(0.05)
    sys.exit(f"never happened: {what}; see {logs}")


class Replica:
    def __init__(self, name):
        self.name, self.http, self.events, self.replay = name, free_port(), free_port(), free_port()

    def start(self, model):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
        }
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}", "topic": f"kv@{self.name}",
        }
        command = [
            Path(sys.executable).parent / "vllm", "serve", model, "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", self.http, "--enforce-eager", "--dtype", "bfloat16",
            "--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048",
            "--enable-prefix-caching", "--enable-prompt-tokens-details", "--block-size", BLOCK_TOKENS,
            "--num-gpu-blocks-override", GPU_BLOCKS, "--kv-events-config", json.dumps(events),
        ]
        return start(self.name, command, environment)

    def is_up(self):
        call(f"http://127.0.0.1:{self.http}/health", timeout=5)
        return True


def start(name, command, environment=None):
    log = open(logs / f"{name}.log", "wb")
    # A session of its own, so that its children can be ended with it.
    process = subprocess.Popen(
        [str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env=environment, start_new_session=True,
    )
    started.append(process)
    return process


def stop_all():
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def start_haproxy(directory, http, spop, log, replicas):
    def form(name):
        options = ["--agent", f"127.0.0.1:{spop}", "--log-to", f"127.0.0.1:{log}"]
        options += ["--spoe-file", str(directory / "kvspoa.spoe.conf")]
        command = [str(args.kvspoa), "haproxy-config", name, *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    (directory / "kvspoa.spoe.conf").write_text(form("spoe"))
    (directory / "agent.cfg").write_text(form("agent"))
    servers = "".join(f"    server {r.name} 127.0.0.1:{r.http}\n" for r in replicas)
    (directory / "haproxy.cfg").write_text(
        "global\n    tune.bufsize 1048576\n"
        "defaults\n    mode http\n    timeout client 120s\n    timeout server 120s\n    timeout connect 2s\n"
        f"frontend fe\n    bind 127.0.0.1:{http}\n    option httplog\n{form('frontend')}\n    default_backend be_llm\n"
        "backend be_llm\n    balance leastconn\n    http-response set-header x-served-by %s\n"
        f"{form('backend')}\n{servers}"
    )
    files = [directory / "haproxy.cfg", directory / "agent.cfg"]
    return start("haproxy", [args.haproxy, "-db", "-f", files[0], "-f", files[1]])


def start_agent(directory, spop, admin, log, model, replicas):
    text = f'spop.listen = "127.0.0.1:{spop}"\nadmin.listen = "127.0.0.1:{admin}"\nlog.listen = "127.0.0.1:{log}"\n'
    text += f'[[pool]]\nbackend = "be_llm"\nmodel_dir = "{model}"\n'
    for r in replicas:
        text += f'[[pool.replica]]\nserver = "{r.name}"\nhttp = "127.0.0.1:{r.http}"\n'
        text += f'events = "tcp://127.0.0.1:{r.events}"\nreplay = "tcp://127.0.0.1:{r.replay}"\n'
    (directory / "kvspoa.toml").write_text(text)
    return start("kvspoa", [args.kvspoa, "run", "--config", directory / "kvspoa.toml"])


def explain(admin, body):
    return json.loads(call(f"http://127.0.0.1:{admin}/explain?pool=be_llm&path=/v1/chat/completions", body)[1])


def held(explanation, server):
    return next(r["gpu_tokens"] for r in explanation["replicas"] if r["server"] == server)


def chats(http, admin, processes):
    """Sends everything; returns the number of equal predictions, of requests, and the tokens cached and sent."""
    rng = random.Random(1)
    words = "harbour rain copper ledger winter signal bridge orchard engine paper silver tide".split()
    systems = [" ".join(rng.choices(words, k=150 + 60 * n)) for n in range(3)]
    conversations = [[{"role": "system", "content": rng.choice(systems)}] for _ in range(CHATS)]
    equal, requests, cached, prompted, served = 0, 0, 0, 0, {}
    for turn in range(TURNS):
        for messages in conversations:
            messages.append({"role": "user", "content": " ".join(rng.choices(words, k=rng.randint(20, 70)))})
            body = {"model": MODEL, "messages": messages, "max_tokens": 16}
            before = explain(admin, body)
            headers, answer = call(f"http://127.0.0.1:{http}/v1/chat/completions", body)
            answer = json.loads(answer)
            server, usage = headers["x-served-by"], answer["usage"]
            found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            same = (before["prompt_tokens"], held(before, server)) == (usage["prompt_tokens"], found)
            if not same:
                print(f"turn {turn} on {server}: vLLM has {found} of {usage['prompt_tokens']} tokens,", before)
            equal, requests = equal + same, requests + 1
            cached, prompted = cached + found, prompted + usage["prompt_tokens"]
            served[server] = served.get(server, 0) + 1
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})

            whole = (usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS

            def is_applied():
                first = explain(admin, body)
                time.sleep(0.1)
                second = explain(admin, body)
                seqs = [[r["applied_seq"] for r in e["replicas"]] for e in (first, second)]
                return True if held(second, server) >= whole and seqs[0] == seqs[1] else None

            wait("the request's events are applied", is_applied, 30, processes)
    return equal, requests, cached, prompted, served


started = []
logs = Path(tempfile.mkdtemp(prefix="kvspoa-vllm-"))
try:
    model = args.work / MODEL
    if not (model / "tokenizer_config.json").exists():
        make_model(model)
    replicas = [Replica("r1"), Replica("r2")]
    http, spop, admin, log = (free_port() for _ in range(4))
    print(f"starting two replicas, which takes minutes; logs in {logs}", flush=True)
    processes = [replica.start(model) for replica in replicas]
    for replica in replicas:
        wait(f"{replica.name} is up", replica.is_up, START_SECONDS, processes)
    processes.append(start_agent(logs, spop, admin, log, model, replicas))
    wait("the agent is ready", lambda: call(f"http://127.0.0.1:{admin}/readyz") and True, 60, processes)
    processes.append(start_haproxy(logs, http, spop, log, replicas))
    wait("HAProxy answers", lambda: call(f"http://127.0.0.1:{http}/health") and True, 30, processes)
    equal, requests, cached, prompted, served = chats(http, admin, processes)
    print(f"{CHATS} chats, {requests} requests, served by {served}, {cached / prompted:.3f} of the prompt tokens cached")
    print(f"{equal} passed, {requests - equal} failed")
    sys.exit(equal != requests)
finally:
    stop_all()
