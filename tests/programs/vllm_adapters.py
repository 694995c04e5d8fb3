"""A vLLM server that follows two stores of adapters.

Twenty streams ask it while a trainer publishes a version of each adapter a second. The trainer is
killed, and another one goes on. An engine that loads the version as peft saves it generates the
same tokens. (`integrations/peft/test_sharded.py` has trainers whose ranks shard the model.)
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dbuffer
from dbuffer.integrations.peft import send_adapter
from dbuffer.testing.waiting import until
from tests.support.engines import preforked
from tests.support.engines.tiny_models import make_model, save_model
from tests.support.engines.vllm_engines import (
    PROMPTS,
    greedy_answers,
    judge,
    start_llm,
)
from tests.support.engines.vllm_servers import WAIT_S, Clients, Server
from tests.support.soak import is_soak
from tests.support.stores import newest_version
from tests.support.waiting import error_of

ADAPTERS = ("one", "two")
FAMILY = "tied-qwen2"
RANK = 8
NUM_STREAMS = 20
NUM_TOKENS = 100
EVERY_S = 1.0
"""Time between two versions of an adapter."""
NUM_VERSIONS = 60 if is_soak() else 6
"""Versions of an adapter until its trainer is killed."""
NUM_ANSWERED = 5
"""Versions of each adapter that answers must name, however slow the machine is."""


def model_of(name: str, rank: int = RANK) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "gate_proj"] if name == "one" else ["o_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    return get_peft_model(make_model(FAMILY, 0), config)


def train(model: Any, name: str, version: int) -> None:
    """Make the adapter's weights depend on nothing but its name and version."""
    generator = torch.Generator().manual_seed(1000 * ADAPTERS.index(name) + version)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def publish(sender: dbuffer.WeightSender, model: Any, name: str, version: int) -> None:
    train(model, name, version)
    send_adapter(sender, model, version=version, metadata={"step": 10 * version})


def publish_in_turn(directory: Path) -> None:
    """A trainer of the adapters: publish a version of each a second until it is killed."""
    one, two = (dbuffer.WeightSender(directory / name) for name in ADAPTERS)
    with one, two:
        for name, sender in itertools.cycle(zip(ADAPTERS, (one, two), strict=True)):
            publish(sender, model_of(name), name, newest_version(directory / name) + 1)
            time.sleep(EVERY_S / len(ADAPTERS))


@dataclass(frozen=True)
class Answer:
    """A streamed answer, and the version in its headers."""

    name: str
    prompt: int
    tokens: list[int]
    version: int
    newest: int
    """Version of the adapter's newest answer that had begun when this one ended."""


class Streams(Clients):
    """Clients of which each asks for one stream after the other."""

    def __init__(self, server: Server) -> None:
        self._servers = [server.connected_anew() for _ in range(NUM_STREAMS)]
        self._newest = dict.fromkeys(ADAPTERS, 0)
        self._answered: dict[str, set[int]] = {name: set() for name in ADAPTERS}
        super().__init__(NUM_STREAMS, self._stream)

    def _stream(self, number: int) -> Answer:
        name, prompt = ADAPTERS[number % 2], number // 2 % len(PROMPTS)
        least = self._newest[name]
        response = stream(self._servers[number], name, prompt, NUM_TOKENS, least)
        version, tokens = next(response)
        assert version >= least, "it went back"
        self._newest[name] = max(version, self._newest[name])
        for _, more in response:
            tokens = tokens + more
        self._answered[name].add(version)
        return Answer(name, prompt, tokens, version, self._newest[name])

    def have_met_versions(self) -> bool:
        return all(len(versions) >= NUM_ANSWERED for versions in self._answered.values())


def stream(
    server: Server, name: str, prompt: int, num_tokens: int, least: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield the version of an answer and each chunk's tokens; check its headers and span."""
    question = question_of(name, prompt, num_tokens) | {"stream": True}
    headers = {"X-Weight-Versions": "true"}
    if least:
        # It waits, because the number is of the newest run, also before a version of it is loaded.
        headers |= {"X-Weight-Min-Version": str(least), "X-Weight-Wait-S": "60"}
    path = "/v1/completions"
    with server.client.stream("POST", path, json=question, headers=headers) as response:
        assert response.status_code == 200, response.read()
        told, count = response.headers, 0
        version = int(told["x-weight-version"])
        assert json.loads(told["x-weight-metadata"]) == {"step": 10 * version}
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert chunk["model"] == name
            [choice] = chunk["choices"]
            yield version, list(choice["token_ids"] or ())
            count += len(choice["token_ids"] or ())
            if choice["finish_reason"] is not None:
                [span] = choice["weight_versions"]
                assert (span["start"], span["end"]) == (0, count) == (0, num_tokens)
                assert span["version"] == str(version)
                assert span["run"] == told["x-weight-run"]


def question_of(name: str, prompt: int, num_tokens: int) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": PROMPTS[prompt],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }


def start(directory: Path, *, max_loras: int, **options: Any) -> Server:
    adapters = {name: directory / name for name in ADAPTERS}
    flags = ["--enable-lora", "--max-loras", str(max_loras), "--max-lora-rank", str(RANK)]
    flags += ["--max-num-seqs", str(NUM_STREAMS)]
    checkpoint = save_model(FAMILY, 0, directory)
    return Server(checkpoint, directory, *flags, adapters=adapters, **options)


def follow_adapters(directory: Path) -> None:
    publish_first("two", directory)
    server = start(directory, max_loras=3, engine_id="e")
    server.wait_ready()
    assert server.status_of("GET", "/ready?min_version=1&model=two") == 200
    follow_first_version(server, directory)
    answers = stream_while_trainers_publish(server, directory)
    answers += keep_old_version_in_place_of_a_bad_one(server, directory)
    assert server.terminate() == (0, [])
    compare(answers, directory)


def publish_first(name: str, directory: Path, *, waits: bool = False) -> None:
    with dbuffer.WeightSender(directory / name) as sender:
        publish(sender, model_of(name), name, 1)
        if waits:
            sender.wait_applied(1, receivers=["e"], timeout_s=WAIT_S)


def follow_first_version(server: Server, directory: Path) -> None:
    """Before its first version, an adapter is no model of the server."""
    base = server.client.post("/v1/completions", json=question_of("policy", 0, 4))
    assert (base.status_code, base.headers["x-weight-version"]) == (200, "default")
    question = question_of("one", 0, 4)
    assert server.client.post("/v1/completions", json=question).status_code == 404
    needed = {"X-Weight-Min-Version": "1"}
    refused = server.client.post("/v1/completions", json=question, headers=needed)
    assert refused.status_code == 409, refused.text
    assert (
        refused.json()["error"]["message"]
        == "this engine has version unknown, and not yet version 1"
    )
    assert server.status_of("GET", "/ready?min_version=1&model=one") == 503
    assert server.status_of("GET", "/ready") == 200
    with ThreadPoolExecutor(1) as pool:
        patient = needed | {"X-Weight-Wait-S": "60"}
        waiting = pool.submit(server.client.post, "/v1/completions", json=question, headers=patient)
        publish_first("one", directory, waits=True)
        assert waiting.result().headers["x-weight-version"] == "1"
    assert server.status_of("GET", "/ready?min_version=1&model=one") == 200
    assert server.status_of("GET", "/ready?min_version=2&model=one") == 503
    assert {card["id"] for card in server.get("/v1/models")["data"]} == {"policy", *ADAPTERS}


def stream_while_trainers_publish(server: Server, directory: Path) -> list[Answer]:
    """Two trainers, one after the other, both killed while they publish."""
    streams = Streams(server)
    try:
        for goal in (NUM_VERSIONS, 2 * NUM_VERSIONS):
            command = [__file__, str(directory), "publish"]
            trainer = preforked.start(command, env=dict(os.environ), output=directory / "t.log")
            try:
                for name in ADAPTERS:
                    wait_ready(server, name, goal)
                if goal > NUM_VERSIONS:
                    until("answers of several versions", streams.have_met_versions, WAIT_S)
            finally:
                trainer.kill()
                trainer.wait(WAIT_S)
    finally:
        answers = [answer for of_one in streams.stop() for answer in of_one]
    for name in ADAPTERS:
        versions = {answer.version for answer in answers if answer.name == name}
        assert len(versions) >= NUM_ANSWERED, "there were few versions to take for another"
    overtaken = [answer for answer in answers if answer.newest > answer.version]
    assert len(overtaken) >= 5, "few requests were in flight when a version came"
    return answers


def wait_ready(server: Server, name: str, version: int) -> None:
    path = f"/ready?model={name}&min_version={version}"
    until(path, lambda: server.status_of("GET", path) == 200, WAIT_S, 0.05)


def keep_old_version_in_place_of_a_bad_one(server: Server, directory: Path) -> list[Answer]:
    """The engine refuses a version; the sender is told so, and the next version is served."""
    last = newest_version(directory / "one")
    with dbuffer.WeightSender(directory / "one") as sender:
        publish(sender, model_of("one", 2 * RANK), "one", last + 1)
        error = error_of(lambda: sender.wait_applied(last + 1, receivers=["e"], timeout_s=WAIT_S))
        assert error is not None
        assert "the engine refuses the adapter: ValueError: LoRA rank 16" in error, error
        answers = [answer_of(server, "one", last)]
        publish(sender, model_of("one"), "one", last + 2)
        sender.wait_applied(last + 2, receivers=["e"], timeout_s=WAIT_S)
        answers.append(answer_of(server, "one", last + 2))
    return answers


def answer_of(server: Server, name: str, version: int) -> Answer:
    chunks = list(stream(server, name, 3, NUM_TOKENS, 0))
    assert {told for told, _ in chunks} == {version}
    return Answer(name, 3, [token for _, some in chunks for token in some], version, version)


def compare(answers: list[Answer], directory: Path) -> None:
    """Compare all tokens with those of an engine that loads the versions as peft saves them."""
    from vllm.lora.request import LoRARequest

    versions = sorted({(answer.name, answer.version) for answer in answers})
    fresh = start_llm(
        save_model(FAMILY, 0, directory),
        how="none",
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras=4,
        enable_prefix_caching=False,
    )
    expected: dict[tuple[str, int], list[list[int]]] = {}
    for number, (name, version) in enumerate(versions, 1):
        model, path = model_of(name), directory / f"{name}-{version}-of-peft"
        train(model, name, version)
        model.save_pretrained(path)
        request = LoRARequest(path.name, number, str(path))
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        expected[name, version] = greedy_answers(
            fresh, prompts, max_tokens=NUM_TOKENS, lora_request=request
        )
    for answer in answers:
        assert answer.tokens == expected[answer.name, answer.version][answer.prompt], answer
    assert len({str(tokens) for tokens in expected.values()}) == len(expected)


def require_refused(directory: Path) -> None:
    """Start a server with as many slots as adapters, which must not come up."""
    server = start(directory, max_loras=2)
    assert server.wait_end() > 0
    [line] = [line for line in server.log().splitlines() if "this server does not start" in line]
    assert "--enable-lora --max-loras 3" in line


def run(directory: Path, role: str) -> None:
    match role:
        case "follow":
            follow_adapters(directory)
        case "refused":
            require_refused(directory)
        case "publish":
            publish_in_turn(directory)


if __name__ == "__main__":
    judge(run)
