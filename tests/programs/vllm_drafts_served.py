"""Program of `test_drafts.py`: a server under load, whose target and draft follow trainers.

Trainers publish the target with its draft, or each into a store of its own, and are killed; so are
the server's follower, if it is another process, and the server. All tokens reveal their version. A
draft proposes the target's next token, or never does; so the share of accepted tokens tells which
draft the server has.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dbuffer
from dbuffer.testing.waiting import until
from tests.programs.vllm_drafts import (
    CASES,
    HIDDEN,
    NUM_HEADS,
    VOCABULARY,
    Weights,
    eagle,
    medusa,
    mimo,
    save_draft,
)
from tests.programs.vllm_server import FollowProgram
from tests.support.engines import preforked
from tests.support.engines.tiny_models import (
    revealing_weights,
    save_revealing,
    token_of,
    weights_in,
)
from tests.support.engines.vllm_engines import judge
from tests.support.engines.vllm_servers import (
    API_KEY,
    BACKEND_FLAGS,
    WAIT_S,
    Clients,
    Server,
    following,
    question,
    tokens_of,
)
from tests.support.ports import free_port
from tests.support.stores import newest_version, number_in, receiver_records

ID = "engine"
EVERY_S = 0.5
"""Time between two versions of a trainer."""
NUM_SWITCHES = 5
"""Of target and draft each, before their trainers are killed."""
NUM_ANSWERS = 5
"""Answers of which the accepted tokens are counted."""


def passing_first() -> torch.Tensor:
    """A projection of two vectors that returns the first one."""
    return torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)


class Case:
    """Weights of a target and of its draft, by a number that the target's tokens reveal.

    ``is_good``: whether the draft proposes the token of this number.
    """

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind = kind
        self.speculates = dict(CASES[kind].speculates)
        self.checkpoint = directory / ("untied" if kind == "mtp" else "revealing-0")
        if kind != "mtp":
            draft = kind if kind in ("eagle", "medusa") else "revealing-0"
            self.speculates["model"] = str(directory / draft)

    def save(self) -> None:
        """Save the checkpoints with which an engine starts."""
        directory = self.checkpoint.parent
        if self.kind == "mtp":
            path = mimo(directory, 0)
            config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": False}
            weights = weights_in(path) | {"lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)}
            save_draft(self.checkpoint, config, revealing_mtp(weights, 0, is_good=False))
            return
        save_revealing(0, directory)
        if self.kind == "eagle":
            eagle(directory, 0)
        elif self.kind == "medusa":
            medusa(directory, 0)

    def target(self, number: int, *, is_good: bool) -> Weights:
        if self.kind == "mtp":
            return revealing_mtp(weights_in(self.checkpoint), number, is_good=is_good)
        return revealing_weights(number)

    def draft(self, number: int, *, is_good: bool) -> Weights | None:
        """Return the draft's weights, or None if they are the target's."""
        weights = revealing_weights(number)
        head = weights["lm_head.weight"] * is_good
        match self.kind:
            case "mtp":
                return None
            case "eagle":  # it passes the embedding of a token on to the target's head
                draft = weights_in(Path(self.speculates["model"]))
                return draft | {"fc.weight": passing_first() * is_good}
            case "medusa":
                blocks = {
                    f"blocks.{n}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN)
                    for n in range(NUM_HEADS)
                }
                return blocks | {f"lm_heads.{n}.weight": head.clone() for n in range(NUM_HEADS)}
            case _:
                return weights | {"lm_head.weight": head}


def revealing_mtp(shapes: Weights, number: int, *, is_good: bool) -> Weights:
    """Weights of these names and shapes, among them those of the draft."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in shapes.items()}
    shown = revealing_weights(number).items()
    weights |= {name: tensor for name, tensor in shown if tensor.count_nonzero()}
    draft = "model.mtp_layers.0."
    for name, tensor in weights.items():
        if name.startswith(draft) and "norm" in name:
            tensor.fill_(1)
    if is_good:  # it passes the target's hidden state on to the head
        weights[f"{draft}input_proj.weight"] = passing_first()
    return weights


def publish(
    sender: dbuffer.WeightSender, case: Case, what: str, number: int, *, is_good: bool
) -> int:
    """Publish a ``target``, a ``draft`` or ``both``; return the version."""
    draft = case.draft(number, is_good=is_good)
    if what == "draft":
        return sender.send(draft).version
    weights = case.target(number, is_good=is_good)
    return sender.send(weights, draft=draft if what == "both" else None).version


def train(directory: Path, kind: str, what: str) -> None:
    """Publish versions with good and with bad drafts until killed."""
    case, store = Case(directory, kind), directory / what
    with dbuffer.WeightSender(store) as sender:
        for number in itertools.count(newest_version(store) + 1):
            publish(sender, case, what, number, is_good=number % 2 == 0)
            time.sleep(EVERY_S)


class Program:
    """The program for a server that follows by itself (``inside``), or that a follower drives."""

    def __init__(self, directory: Path, kind: str, how: str, stores: str, num_ranks: str) -> None:
        self.directory, self.kind, self.num_ranks = directory, kind, int(num_ranks)
        self.case = Case(directory, kind)
        self.case.save()
        self.is_inside = how == "inside"
        self.trained = ("target", "draft") if stores == "two stores" else ("both",)
        self.stores = {what: directory / what for what in self.trained}
        self.store = self.stores[self.trained[0]]
        self.options = {"engine_id": ID, "poll_interval_s": 0.05}
        if "draft" in self.stores:
            self.options["draft_store"] = str(self.stores["draft"])
        self.num_servers = 0
        self.follower: FollowProgram | None = None

    def run(self) -> dict[str, float]:
        for what in self.trained:
            with dbuffer.WeightSender(self.stores[what]) as sender:
                publish(sender, self.case, what, 1, is_good=False)
        self.server = self.start_server()
        self.follow()
        self.wait_applied(dict.fromkeys(self.trained, 1))
        for kill in (self.kill_follower, lambda: None):
            self.load_while_trainers_are_killed(kill)
        trainers = self.start_trainers()
        self.wait_more_versions()
        self.server.kill()
        self.server = self.start_server()
        self.wait_more_versions()
        self.kill_trainers(trainers)
        return self.compare_acceptance()

    def start_server(self) -> Server:
        self.num_servers += 1
        flags = ["--speculative-config", json.dumps(self.case.speculates), "--api-key", API_KEY]
        flags += BACKEND_FLAGS
        if self.is_inside:
            flags += following(self.store, **self.options)
        server = Server(
            self.case.checkpoint,
            self.directory / f"server-{self.num_servers}.log",
            *flags,
            port=free_port() if self.num_servers == 1 else self.port,
            tp=self.num_ranks,
            development=not self.is_inside,
        )
        self.port = int(server.url.rpartition(":")[2])
        server.wait_ready()
        return server

    def follow(self) -> None:
        if not self.is_inside:
            self.follower = FollowProgram(
                self.store, self.server.url, self.directory, pause="keep", **self.options
            )

    def kill_follower(self) -> None:
        if self.follower is not None:
            self.follower.process.kill()
            self.follower.process.wait(WAIT_S)
            self.follow()

    def start_trainers(self) -> list[preforked.Process]:
        return [
            preforked.start(
                [__file__, str(self.directory), "train", self.kind, what],
                env=dict(os.environ),
                output=self.directory / f"{what}.log",
            )
            for what in self.trained
        ]

    def kill_trainers(self, trainers: list[preforked.Process]) -> None:
        for trainer in trainers:
            assert trainer.poll() is None, "a trainer failed"
            trainer.kill()
            trainer.wait(WAIT_S)

    def load_while_trainers_are_killed(self, kill: Callable[[], None]) -> None:
        clients = Clients(3, self.ask)
        try:
            trainers = self.start_trainers()
            self.wait_more_versions()
            kill()
            self.wait_more_versions()
            self.kill_trainers(trainers)
            self.wait_applied({what: newest_version(store) for what, store in self.stores.items()})
        finally:
            answers = clients.stop()
        for of_one in answers:
            versions = [version for answer in of_one for version in answer]
            assert versions == sorted(versions), "it went back"
            assert len(set(versions)) >= NUM_SWITCHES, "there were few switches to go wrong at"

    def ask(self, number: int) -> list[int]:
        """Return the version of each token of an answer."""
        body = question(5 + 40 * number) | {"max_tokens": 40}
        response = self.server.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        versions = {token_of(v): v for v in range(newest_version(self.store) + 1)}
        tokens = response.json()["choices"][0]["token_ids"]
        assert len(tokens) == 40
        return [versions[token] for token in tokens]

    def applied(self) -> dict[str, int]:
        """Versions that the engine has acknowledged, of each store."""
        applied = {}
        for what, store in self.stores.items():
            record = receiver_records(store).get(f"{ID}.draft" if what == "draft" else ID, {})
            applied[what] = number_in(record, "applied") or 0
        return applied

    def wait_applied(self, goals: dict[str, int]) -> None:
        until(
            f"{goals} are applied",
            lambda: all(self.applied()[what] >= goal for what, goal in goals.items()),
            WAIT_S,
            0.02,
        )

    def wait_more_versions(self) -> None:
        """Wait until the engine has switched to some more versions of each store."""
        seen: dict[str, set[int]] = {what: {number} for what, number in self.applied().items()}

        def has_switched() -> bool:
            for what, number in self.applied().items():
                seen[what].add(number)
            return all(len(numbers) > NUM_SWITCHES for numbers in seen.values())

        until("it has switched often", has_switched, WAIT_S, 0.02)

    def compare_acceptance(self) -> dict[str, float]:
        """Publish good and bad drafts; then one that does not fit, which changes nothing."""
        shares: dict[str, float] = {}
        number = newest_version(self.store) + 1
        for is_good in (True, False, True):
            goals = {}
            for name, store in self.stores.items():
                with dbuffer.WeightSender(store) as sender:
                    goals[name] = publish(sender, self.case, name, number, is_good=is_good)
            self.wait_applied(goals)
            share = self.acceptance(number)
            shares["of good drafts" if is_good else "of bad drafts"] = share
            assert share > 0.9 if is_good else share < 0.1, (is_good, share)
            number += 1
        self.refuse_misfit(number)
        assert self.acceptance(number - 1) > 0.9
        return shares

    def refuse_misfit(self, number: int) -> None:
        """Publish a draft of which a tensor has another shape."""
        what = self.trained[-1]
        target = self.case.target(number, is_good=True)
        draft = self.case.draft(number, is_good=True)
        misfit = target if draft is None else draft
        name = max(name for name in misfit if "input_proj" in name or draft is not None)
        misfit[name] = misfit[name][:-1].clone()
        with dbuffer.WeightSender(self.stores[what]) as sender:
            if what == "both":
                version = sender.send(target, draft=draft).version
            else:
                version = sender.send(misfit).version
            receiver = f"{ID}.draft" if what == "draft" else ID
            with pytest.raises(dbuffer.ReceiverFailedError, match=name):
                sender.wait_applied(version, receivers=receiver, timeout_s=WAIT_S)

    def acceptance(self, number: int) -> float:
        """Return the share of proposed tokens that the server accepts."""
        before = self.counts()
        for _ in range(NUM_ANSWERS):
            assert self.server.answer() == tokens_of(number)
        proposed, accepted = (b - a for a, b in zip(before, self.counts(), strict=True))
        return accepted / proposed

    def counts(self) -> list[float]:
        metrics = self.server.client.get("/metrics").text
        names = [f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
        return [
            sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", metrics, re.MULTILINE)))
            for name in names
        ]


def run(directory: Path, role: str, *arguments: str) -> dict[str, float] | None:
    if role == "served":
        return Program(directory, *arguments).run()
    train(directory, *arguments)
    return None


if __name__ == "__main__":
    judge(run)
