"""PPO on CartPole with TorchRL: two workers collect, and get each new policy through a store.

    python examples/torchrl_cartpole.py

The return of the workers' episodes rises only if the weights reach the workers. Exit code 1 if the
return stays below 150. An episode has at most 500 frames, each worth 1; with a random policy it has
about 22. Needs gymnasium and torchrl; takes half a minute on two cores.
"""

import os

# One core for each process; torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import tempfile
from collections import deque
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

FRAMES_PER_BATCH = 1024
NUM_BATCHES = 15
SOLVED_RETURN = 150.0


def main(store: str) -> bool:
    """Train; return whether the policy balances the pole."""
    torch.manual_seed(0)
    learner = PPO()
    collector = MultiSyncCollector(
        [make_env] * 2,
        learner.actor,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=NUM_BATCHES * FRAMES_PER_BATCH,
        weight_sync_schemes={"policy": DoubleBufferSyncScheme(store)},
        track_policy_version=True,
    )
    recent: deque[float] = deque(maxlen=20)
    try:
        collector.set_seed(0)
        for number, batch in enumerate(collector):
            recent.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
            mean = statistics.fmean(recent)
            lag = number - int(batch["next", "policy_version"].min())
            print(f"batch {number + 1:2}: return {mean:5.1f}, policy lag {lag}", flush=True)
            learner.update(batch)
            collector.update_policy_weights_()  # returns when both workers have the weights
    finally:
        collector.shutdown()
    return mean >= SOLVED_RETURN


def make_env() -> TransformedEnv:
    """Return a CartPole environment that sums up its rewards."""
    return TransformedEnv(GymEnv("CartPole-v1"), RewardSum())


class PPO:
    """Small actor and critic with TorchRL's clipped loss."""

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
        """Train on one batch of frames for ten epochs."""
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
    """Return a network on the four numbers that describe the cart and its pole."""
    return MLP(4, out_features, num_cells=[64, 64], activation_class=nn.Tanh)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dbuffer-") as directory:
        is_solved = main(directory)
    sys.exit(None if is_solved else f"the return stayed below {SOLVED_RETURN:g}")
