"""Sixteen engines that follow one store: while some hang, die and come late, the others go on.

Four programs hold four engines each. One is stopped, one is killed, one comes when the store has
long been in use. In a soak, with figures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import time
from pathlib import Path

import pytest

import dbuffer
from tests.programs.vllm_many import NUM_ENGINES, NUM_PROGRAMS
from tests.support.engines import preforked
from tests.support.engines.tiny_models import make_model, revealing_weights, token_of
from tests.support.engines.vllm_engines import (
    NEEDS_VLLM,
    PROGRAMS,
    TIMEOUT_S,
    environment,
    kill_group,
)
from tests.support.soak import IN_SOAKS_ALONE
from tests.support.waiting import until

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(TIMEOUT_S)]
READER_TIMEOUT_S = 3.0
NUM_VERSIONS = 20
"""In each of the times that are told apart."""
PUBLISH_EVERY_S = 0.5


class Program:
    """Four engines in a process of their own, each switched and asked again and again."""

    def __init__(self, number: int, directory: Path) -> None:
        self._seen = directory / f"seen-{number}.jsonl"
        self._log = (directory / f"log-{number}.txt").open("wb")
        self._seen.touch()
        self.process = preforked.start(
            [str(PROGRAMS / "vllm_many.py"), str(directory), str(number)],
            env=environment(processes=False),
            output=self._log,
            new_session=True,
        )

    def seen(self) -> list[tuple[int, int, list[int]]]:
        """Engine, version and tokens of each answer so far."""
        whole = self._seen.read_text().rpartition("\n")[0]
        return [tuple(json.loads(line)) for line in whole.splitlines()]

    def versions(self) -> list[int]:
        """What each of its engines has answered from last; 0: nothing yet."""
        last = dict.fromkeys(range(NUM_ENGINES), 0) | {one: v for one, v, _ in self.seen()}
        return list(last.values())

    def wait_for(self, version: int) -> None:
        """Until all of its engines answer from this version or a later one."""

        def is_so() -> bool:
            assert self.process.poll() is None, Path(self._log.name).read_text()[-4000:]
            return min(self.versions()) >= version

        until(f"all answer from version {version}", is_so, TIMEOUT_S / 3, 0.1)

    def end(self) -> None:
        kill_group(self.process)
        self._log.close()


@IN_SOAKS_ALONE
def test_others_go_on_while_engines_hang_die_and_come_late(directory, record_property):
    make_model("qwen3", 0).save_pretrained(directory / "model")
    took_s: dict[str, list[float]] = {}
    versions = itertools.count(1)
    with (
        contextlib.ExitStack() as ends,
        dbuffer.WeightSender(directory / "store", reader_timeout_s=READER_TIMEOUT_S) as sender,
    ):

        def publish(when: str, count: int = NUM_VERSIONS) -> int:
            for version in itertools.islice(versions, count):
                started = time.monotonic()
                sender.send(revealing_weights(version), version=version)
                took_s.setdefault(when, []).append(time.monotonic() - started)
                time.sleep(PUBLISH_EVERY_S)
            return version

        def start(number: int) -> Program:
            program = Program(number, directory)
            ends.callback(program.end)
            return program

        publish("nobody there", 1)
        live, hung, killed = programs = [start(number) for number in range(NUM_PROGRAMS - 1)]
        for program in programs:
            program.wait_for(1)
        last = publish("all live")
        for program in programs:
            program.wait_for(last)
        hung.process.send_signal(signal.SIGSTOP)
        live.wait_for(publish("four of them stopped"))
        killed.process.kill()
        killed.process.wait()
        live.wait_for(publish("four more killed"))
        late = start(NUM_PROGRAMS - 1)
        programs.append(late)
        hung.process.send_signal(signal.SIGCONT)
        late.wait_for(1)
        last = publish("stopped ones go on, late ones have come")
        for program in (live, hung, late):
            program.wait_for(last)
        answers = [answer for program in programs for answer in program.seen()]
    for when, each_s in took_s.items():
        each_ms = sorted(round(1e3 * one) for one in each_s)
        print(f"{when}: a publish took {each_ms[len(each_ms) // 2]} ms, {each_ms[-1]} at most")
        # A reader that hangs is waited for once, and not at each version.
        assert sum(one > READER_TIMEOUT_S for one in each_s) <= NUM_ENGINES
    assert answers
    for _, version, tokens in answers:
        assert set(tokens) == {token_of(version)}
    record_property("answers of sixteen engines of one store", len(answers))
