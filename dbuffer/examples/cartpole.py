"""PPO on CartPole with TorchRL: two workers collect, and get every new policy through a store.

``python -m dbuffer.examples.cartpole``. The return is that of the workers' own episodes: it cannot
rise unless the weights reach them. With ``--broken-sync`` they never leave the trainer, and the
return stays that of the first policy, which acts by chance.
"""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from dbuffer.examples.common import run_example, say
from dbuffer.integrations.torchrl import DoubleBufferSyncScheme

FRAMES_PER_BATCH = 1024
NUM_BATCHES = 15
SOLVED_RETURN = 150.0
"""An episode ends after 500 frames at the latest, each worth 1; a random policy lasts about 22."""


class BrokenSyncScheme(DoubleBufferSyncScheme):
    """Workers get the first weights and no others: what this example must not work with."""

    def send(self, weights: Any = None, worker_ids: Any = None) -> None: ...


def run(directory: Path, *, broken_sync: bool) -> bool:
    """Train a policy whose weights go through a store; whether it balances the pole."""
    torch.manual_seed(0)
    scheme = BrokenSyncScheme if broken_sync else DoubleBufferSyncScheme
    learner = PPO()
    say("starting 2 workers")
    collector = MultiSyncCollector(
        [make_env] * 2,
        learner.actor,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=NUM_BATCHES * FRAMES_PER_BATCH,
        weight_sync_schemes={"policy": scheme(directory)},
        track_policy_version=True,
    )
    recent: deque[float] = deque(maxlen=20)
    try:
        collector.set_seed(0)
        for number, batch in enumerate(collector):
            recent.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
            frames, mean = (number + 1) * FRAMES_PER_BATCH, statistics.fmean(recent)
            lag = number - int(batch["next", "policy_version"].min())
            say(f"{frames:6} frames: return {mean:5.1f}, policy lag {lag}")
            learner.update(batch)
            collector.update_policy_weights_()  # returns when both workers act by the new weights
    finally:
        collector.shutdown()
    is_solved = mean >= SOLVED_RETURN
    say(f"{'solved' if is_solved else 'not solved'}: a return of {SOLVED_RETURN:.0f} is asked for")
    return is_solved


def make_env() -> TransformedEnv:
    """CartPole, which sums up its rewards."""
    return TransformedEnv(GymEnv("CartPole-v1"), RewardSum())


class PPO:
    """A small actor and critic, TorchRL's clipped loss and advantages, and Adam."""

    def __init__(self) -> None:
        self.actor = ProbabilisticActor(
            TensorDictModule(make_network(2), in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=OneHotCategorical,
            spec=make_env().action_spec,
            return_log_prob=True,
        )
        critic = ValueOperator(make_network(1), in_keys=["observation"])
        self._advantages = GAE(gamma=0.98, lmbda=0.9, value_network=critic, average_gae=True)
        self._loss = ClipPPOLoss(self.actor, critic, clip_epsilon=0.2, entropy_coeff=0.001)
        self._optimizer = torch.optim.Adam(self._loss.parameters(), 2e-3)

    def update(self, batch: Any) -> None:
        """Train on one batch of the workers' frames, ten times over."""
        for _ in range(10):
            with torch.no_grad():
                self._advantages(batch)
            frames = batch.reshape(-1)
            for rows in torch.randperm(len(frames)).view(-1, 128):
                losses = self._loss(frames[rows])
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._loss.parameters(), 0.5)
                self._optimizer.step()


def make_network(out_features: int) -> MLP:
    """Of the four numbers that describe the cart and its pole."""
    return MLP(4, out_features, num_cells=[64, 64], activation_class=nn.Tanh)


if __name__ == "__main__":
    run_example(__doc__, run)
