"""verl over a store, configured with the lines of docs/integrations/more.md, and its syncs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dbuffer
from tests.support import ROOT
from tests.support.engines.tiny_models import make_model, save_revealing, save_tokenizer
from tests.support.engines.vllm_engines import (
    NUM_TOKENS,
    PROMPTS,
    engine_arguments,
    greedy,
    leave,
)
from tests.support.stores import number_in

PAGE = ROOT / "docs" / "integrations" / "more.md"
PLACE = "/dev/shm/policy"

STEPS = [1, 1, None]


class Rig:
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
                    "held": rig.told("held"),
                    "answer": sorted(set(answer)),
                }
                for worker in self.killed_at_pause:
                    ray.kill(worker)
                await super().abort_replicas(reject_request)

        return Watched(config=self.engine_config, actor_wg=self.actor, replicas=[self.replica])

    async def ask(self, prompt: tuple[int, ...] = (3, 4, 5)) -> tuple[list[int], int | None]:
        sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
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
        records = (self.store / "receivers").glob("*.json")
        found = [json.loads(path.read_text()) for path in records]
        return [number_in(record, field) for record in found if record["receiver"] != "watcher"]

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
            "applied": self.told("applied"),
            "at pause": manager.at_pause,
        }

    def fail(self, manager: Any, how: str) -> dict[str, Any]:
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
    lines = PAGE.read_text().splitlines()
    wanted = [line for line in lines if line.lstrip("+").startswith("actor_rollout_ref.")]
    return [line.replace(PLACE, str(store)) for line in wanted]


def fresh_answers(directory: Path, seed: int) -> list[list[int]]:
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
