"""verl over a store: its actor under FSDP2 on two ranks, its rollout workers, a real vLLM server.

One program configures verl with the lines of ``docs/integrations/verl.md``, and syncs: with
dbuffer's manager, with verl's own, with publishes that fail, with an actor that is killed and
started again.
The tests judge what the program saw. (Which version a worker takes is in ``test_verl_sync``.)
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dbuffer
from tests.support import ROOT
from tests.support.engines.tiny_models import make_model, save_revealing, save_tokenizer, token_of
from tests.support.engines.vllm_engines import (
    PROMPTS,
    TIMEOUT_S,
    engine_arguments,
    environment,
    greedy,
    leave,
    observe,
)

pytestmark = [
    pytest.mark.verl,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None, reason="needs verl: python3 dev.py verl"
    ),
    pytest.mark.timeout(TIMEOUT_S + 60),
]

PAGE = ROOT / "docs" / "integrations" / "verl.md"
PLACE = "/dev/shm/policy"

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_platform_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # FSDP's engine is registered for that, and asks the platform
    "VLLM_TARGET_DEVICE": "cpu",  # else vLLM looks at its package's name
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore",
}

STEPS = [1, 1, None]
"""Of the first syncs: one repeats."""


@pytest.fixture(scope="module")
def observed(directory: Path) -> Any:
    env = environment(processes=True, PYTHONPATH=str(ROOT), **ENVIRONMENT)
    # Sockets of Ray's have a path of their own: theirs may not be long.
    with tempfile.TemporaryDirectory(prefix="dbuffer-ray-", ignore_cleanup_errors=True) as session:
        return observe(__file__, directory, session, env=env, imports_anew=True)


def test_verl_knows_the_backend_by_configuration_alone(observed: Any) -> None:
    assert observed["backend"] == "dbuffer.integrations.verl.checkpoint_engine"
    assert observed["manager"] == "dbuffer.integrations.verl.manager"
    assert observed["bases"] == "verl.checkpoint_engine.base"


class TestSyncs:
    def test_the_engine_answers_with_the_weights_of_each(self, observed: Any) -> None:
        assert observed["before"] == [token_of(0)]
        answers = [seen["answer"] for seen in observed["syncs"]]
        assert answers == [[token_of(version)] for version in (1, 2, 3)]

    def test_each_is_a_version_with_its_step(self, observed: Any) -> None:
        found = [(seen["version"], seen["global_steps"]) for seen in observed["syncs"]]
        assert found == [(1, 1), (2, 1), (3, None)]

    def test_verl_is_told_what_it_may_log(self, observed: Any) -> None:
        for seen in observed["syncs"]:
            assert seen["metrics"]["dbuffer/version"] == seen["version"]
            assert seen["metrics"]["dbuffer/bytes"] > 100_000
            assert seen["metrics"]["dbuffer/publish_s"] > 0

    def test_workers_acknowledge_what_their_engine_has_loaded(self, observed: Any) -> None:
        assert [seen["applied"] for seen in observed["syncs"]] == [[1], [2], [3]]

    def test_the_engine_serves_until_its_worker_has_the_version(self, observed: Any) -> None:
        for seen in observed["syncs"]:
            version = seen["version"]
            assert seen["at pause"] == {
                "newest": version,
                "held": [version],
                "answer": [token_of(version - 1)],
            }

    def test_the_server_says_the_step_with_each_answer(self, observed: Any) -> None:
        assert [seen["told step"] for seen in observed["syncs"]] == [1, 1, 1]

    def test_the_engine_answers_as_a_fresh_one_on_the_same_weights(self, observed: Any) -> None:
        seen = observed["random"]
        assert seen["answers"] == seen["expected"]
        assert len({tuple(tokens) for tokens in seen["answers"]}) == len(PROMPTS)


def test_verls_own_manager_brings_them_too_and_pauses_first(observed: Any) -> None:
    seen = observed["verl's manager"]
    assert (seen["version"], seen["answer"], seen["applied"]) == (4, [token_of(4)], [4])
    assert seen["at pause"] == {"newest": 3, "held": [None], "answer": [token_of(3)]}


@pytest.mark.parametrize("how", ["gathering", "publishing"])
class TestFailedPublish:
    def test_it_is_raised(self, observed: Any, how: str) -> None:
        error = observed[how]["error"]
        wanted = {"gathering": "ZeroDivisionError", "publishing": "InvalidWeightsError"}[how]
        assert wanted in error

    def test_the_engine_was_not_touched(self, observed: Any, how: str) -> None:
        seen = observed[how]
        assert not seen["was paused"]
        assert seen["answer"] == seen["answer before"]
        assert seen["newest"] == seen["newest before"]

    def test_the_next_sync_works(self, observed: Any, how: str) -> None:
        seen = observed[how]["next"]
        assert seen["answer"] == [token_of(seen["version"])]


def test_engines_go_on_with_what_an_actor_published_that_died_while_they_load(
    observed: Any,
) -> None:
    seen = observed["actor lost"]
    assert (seen["version"], seen["answer"], seen["applied"]) == (7, [token_of(7)], [7])


def test_an_actor_that_is_started_again_goes_on(observed: Any) -> None:
    seen = observed["restarted"]
    assert (seen["version"], seen["answer"], seen["applied"]) == (8, [token_of(8)], [8])


# From here on what runs in the program.


class Rig:
    """verl's parts, and what they are seen to do."""

    def __init__(self, directory: Path) -> None:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.utils.import_utils import load_class_from_fqn

        from tests.support import verl_parts

        self.parts = verl_parts
        self.store = directory / "store"
        self.watcher = dbuffer.WeightReceiver(self.store, receiver_id="watcher")
        self.checkpoint = save_revealing(0, directory)
        save_tokenizer(self.checkpoint)
        self.config = verl_parts.configured(self.checkpoint, lines_of_the_page(self.store))
        self.engine_config = omega_conf_to_dataclass(self.config.rollout.checkpoint_engine)
        self.manager_class = load_class_from_fqn(self.config.rollout.checkpoint_manager_class)
        self.actor = verl_parts.start_actor(self.config)
        self.replica = verl_parts.start_replica(self.config)

    def manager(self, base: Any) -> Any:
        """A manager of verl's or of dbuffer's, that says what was there when it paused."""
        import ray

        rig = self

        class Watched(base):  # type: ignore[misc]
            at_pause: Any = None
            killed_at_pause: Sequence[Any] = ()

            async def abort_replicas(self, reject_request: bool = False) -> None:
                answer, _ = await rig.ask()
                self.at_pause = {
                    "newest": rig.newest()[0],
                    "held": rig.told("held_version"),
                    "answer": sorted(set(answer)),
                }
                for worker in self.killed_at_pause:
                    ray.kill(worker)
                await super().abort_replicas(reject_request)

        return Watched(config=self.engine_config, actor_wg=self.actor, replicas=[self.replica])

    async def ask(self, prompt: tuple[int, ...] = (3, 4, 5)) -> tuple[list[int], int | None]:
        """Tokens of the server's, and the global step that it says they are of."""
        sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
        answer = await self.replica.server_handle.generate.remote(
            prompt_ids=list(prompt), sampling_params=sampling, request_id=str(time.monotonic())
        )
        return list(answer.token_ids), answer.extra_fields["global_steps"]

    def asked(self, prompt: tuple[int, ...] = (3, 4, 5)) -> tuple[list[int], int | None]:
        import asyncio

        return asyncio.run(self.ask(prompt))

    def newest(self) -> tuple[int, dict[str, Any]]:
        """The newest version's number and metadata; (0, {}) before there is one."""
        if self.watcher.wait_for_version(timeout_s=0) is None:
            return 0, {}
        with self.watcher.open(acknowledge=False) as snapshot:
            return snapshot.version, snapshot.metadata

    def told(self, field: str) -> list[Any]:
        """What the rollout workers' records say."""
        records = (self.store / "receivers").glob("*.json")
        found = [json.loads(path.read_text()) for path in records]
        return [record[field] for record in found if record["receiver"] != "watcher"]

    def sync(self, manager: Any, version: int, step: int | None = None) -> dict[str, Any]:
        self.actor.reveal(version)
        metrics = manager.update_weights(step)
        tokens, told_step = self.asked()
        newest, metadata = self.newest()
        return {
            "metrics": metrics,
            "answer": sorted(set(tokens)),
            "told step": told_step,
            "version": newest,
            "global_steps": metadata["global_steps"],
            "applied": self.told("applied_version"),
            "at pause": manager.at_pause,
        }

    def fail(self, manager: Any, how: str) -> dict[str, Any]:
        """A sync that fails, and one more, that does not."""
        manager.at_pause = None
        newest_before, answer_before = self.newest()[0], self.asked()
        self.actor.reveal(newest_before + 1)
        self.actor.stumble(how)
        error = "none"
        try:
            manager.update_weights(newest_before)
        except Exception as raised:
            error = repr(raised)
        if manager.at_pause is not None:  # or the next question would wait for ever
            manager.resume_generation_replicas()
        seen = {
            "error": error,
            "was paused": manager.at_pause is not None,
            "newest before": newest_before,
            "newest": self.newest()[0],
            "answer before": answer_before,
            "answer": self.asked(),
        }
        return seen | {"next": self.sync(manager, newest_before + 1)}

    def restart_actor(self) -> None:
        import ray

        for worker in self.actor.workers:
            ray.kill(worker)
        self.actor = self.parts.start_actor(self.config)

    def close(self) -> None:
        """Let vLLM remove what it has in shared memory, which Ray's end of an actor does not."""
        import ray

        ended = self.replica.server_handle.__ray_call__.remote(
            lambda server: server.engine.shutdown()
        )
        ray.get(ended)


def lines_of_the_page(store: Path) -> list[str]:
    """The lines that switch dbuffer on, for this store."""
    lines = PAGE.read_text().splitlines()
    wanted = [line for line in lines if line.lstrip("+").startswith("actor_rollout_ref.")]
    return [line.replace(PLACE, str(store)) for line in wanted]


def fresh_answers(directory: Path, seed: int) -> list[list[int]]:
    """Of an engine that is started on the weights, in this process."""
    import vllm

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    path = directory / "random"
    make_model("qwen3", seed).save_pretrained(path)
    return greedy(vllm.LLM(**engine_arguments(path, how="none")))


def run(directory: Path) -> dict[str, Any]:
    from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry

    rig = Rig(directory)
    manager = rig.manager(rig.manager_class)
    seen: dict[str, Any] = {
        "backend": CheckpointEngineRegistry.get("dbuffer").__module__,
        "manager": rig.manager_class.__module__,
        "bases": rig.manager_class.__mro__[1].__module__,
        "before": sorted(set(rig.asked()[0])),
    }
    seen["syncs"] = [rig.sync(manager, at, step) for at, step in enumerate(STEPS, start=1)]
    seen["verl's manager"] = rig.sync(rig.manager(CheckpointEngineManager), 4)
    seen |= {how: rig.fail(manager, how) for how in ("gathering", "publishing")}
    manager.killed_at_pause = rig.actor.workers
    seen["actor lost"] = rig.sync(manager, 7)
    rig.restart_actor()
    manager.actor_wg, manager.killed_at_pause = rig.actor, ()
    seen["restarted"] = rig.sync(manager, 8)
    rig.actor.randomize(1)
    manager.update_weights(9)
    answers = [rig.asked(tuple(prompt))[0] for prompt in PROMPTS]
    rig.close()
    seen["random"] = {"answers": answers, "expected": fresh_answers(directory, 1)}
    return seen


if __name__ == "__main__":
    place, session = Path(sys.argv[1]), sys.argv[2]
    import ray

    # Devices are only counted, not looked for; an actor's are not free when it was killed.
    ray.init(num_cpus=8, num_gpus=5, include_dashboard=False, _temp_dir=session)
    try:
        found = run(place)
    finally:
        ray.shutdown()
    leave(place, found)
