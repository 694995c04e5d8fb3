"""PPO on CartPole with TorchRL: two workers collect, and get every new policy through a store.

``python -m dbuffer.examples.cartpole``. The return is that of the workers' own episodes: it cannot
rise unless the weights reach them. With ``--broken-sync`` they never leave the trainer, and the
return stays that of the first policy, which acts by chance.
"""
# ruff: noqa: T201 - a program prints

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from dbuffer.integrations.torchrl import DoubleBufferSyncScheme

NUM_WORKERS = 2
FRAMES_PER_BATCH = 1024
NUM_BATCHES = 15
EPOCHS = 10
MINIBATCH_FRAMES = 128
LEARNING_RATE = 2e-3
NUM_RECENT_EPISODES = 20
SOLVED_RETURN = 150.0
"""An episode ends after 500 frames at the latest, each worth 1; a random policy lasts about 22."""


class BrokenSyncScheme(DoubleBufferSyncScheme):
    """Workers get the first weights and no others: what this example must not work with."""

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Send nothing, and say nothing about it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One batch."""

    num_frames: int
    """All frames so far."""
    mean_return: float
    """Of the episodes that ended last."""
    lag: int
    """Policies between the trainer's and the oldest that acted in this batch."""


def make_env() -> TransformedEnv:
    """CartPole, which sums up its rewards."""
    return TransformedEnv(GymEnv("CartPole-v1"), RewardSum())


def make_actor_and_critic() -> tuple[ProbabilisticActor, ValueOperator]:
    """Two small networks, in TorchRL's clothes."""
    network = MLP(in_features=4, out_features=2, num_cells=[64, 64], activation_class=nn.Tanh)
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        spec=make_env().action_spec,
        return_log_prob=True,
    )
    values = MLP(in_features=4, out_features=1, num_cells=[64, 64], activation_class=nn.Tanh)
    return actor, ValueOperator(values, in_keys=["observation"])


class PPO:
    """TorchRL's clipped loss and advantages, by Adam."""

    def __init__(self, actor: ProbabilisticActor, critic: ValueOperator) -> None:
        self._advantages = GAE(gamma=0.98, lmbda=0.9, value_network=critic, average_gae=True)
        self._loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.001)
        self._optimizer = torch.optim.Adam(self._loss.parameters(), LEARNING_RATE)

    def update(self, batch: Any) -> None:
        """Train on one batch of the workers' frames, several times over."""
        for _ in range(EPOCHS):
            with torch.no_grad():
                self._advantages(batch)
            frames = batch.reshape(-1)
            for rows in torch.randperm(len(frames)).view(-1, MINIBATCH_FRAMES):
                losses = self._loss(frames[rows])
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._loss.parameters(), 0.5)
                self._optimizer.step()


def train(scheme: DoubleBufferSyncScheme, seed: int) -> Iterator[Progress]:
    """Train a policy whose weights go through ``scheme``, and report after each batch."""
    torch.manual_seed(seed)
    actor, critic = make_actor_and_critic()
    learner = PPO(actor, critic)
    collector = MultiSyncCollector(
        [make_env] * NUM_WORKERS,
        actor,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=NUM_BATCHES * FRAMES_PER_BATCH,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    recent: deque[float] = deque(maxlen=NUM_RECENT_EPISODES)
    try:
        collector.set_seed(seed)
        for number, batch in enumerate(collector):
            recent.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
            yield Progress(
                num_frames=(number + 1) * FRAMES_PER_BATCH,
                mean_return=statistics.fmean(recent),
                lag=number - int(batch["next", "policy_version"].min()),
            )
            learner.update(batch)
            collector.update_policy_weights_()  # returns when both workers act by the new weights
    finally:
        collector.shutdown()


def main() -> int:
    """Train, say how it goes, and return whether it worked as an exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dbuffer.examples.cartpole", description=__doc__
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--broken-sync", action="store_true", help="send no new weights")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the workers need the other core
    scheme_class = BrokenSyncScheme if arguments.broken_sync else DoubleBufferSyncScheme
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dbuffer-cartpole-") as directory:
        print(f"starting {NUM_WORKERS} workers")
        for progress in train(scheme_class(directory), arguments.seed):
            print(
                f"{progress.num_frames:6} frames: return {progress.mean_return:5.1f}, "
                f"policy lag {progress.lag}"
            )
    solved = progress.mean_return >= SOLVED_RETURN
    print(
        f"{'solved' if solved else 'not solved'} in {time.monotonic() - started:.0f} s: "
        f"the last {NUM_RECENT_EPISODES} episodes returned {progress.mean_return:.1f} on average, "
        f"to be {SOLVED_RETURN:.0f} or more"
    )
    return 0 if solved else 1


if __name__ == "__main__":
    sys.exit(main())
