"""Families and features in real SGLang engines: each token as a fresh one answers.

Each case is a program of its own. They run in soaks; by hand,
`DBUFFER_SOAK=1 python3 dev.py sglang tests/test_sglang_breadth.py -k gemma`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CONFIGURATIONS, save_family
from sglang_engines import NEEDS_SGLANG, WAIT_S, greedy, observe, start_engine
from support import in_soaks_alone

import dbuffer

pytestmark = [*NEEDS_SGLANG, pytest.mark.timeout(3 * WAIT_S)]

ORDER = (1, 0, 1, 0)
"""Of the two checkpoints, as they are published: where switches are copies, the last ones are."""


@dataclass(frozen=True)
class Case:
    """An engine, and what it is to follow."""

    model_type: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    architectures: tuple[str, ...] = ()
    """SGLang's files of models that the family needs, beside the one of its own name."""
    embeds: bool = False


CASES = {name: Case(name) for name in sorted(CONFIGURATIONS)}


@in_soaks_alone
@pytest.mark.parametrize("name", CASES)
def test_switched_engine_answers_as_a_fresh_one(tmp_path: Path, name: str) -> None:
    seen = observe(__file__, tmp_path, name)
    first, second = seen["fresh"]
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert seen["switched"] == [seen["fresh"][number] for number in ORDER]


# The program.


def run(directory: Path, case: Case) -> dict[str, Any]:
    from dbuffer.integrations.sglang import follow

    pair = [save_family(case.model_type, directory, seed, embeds=case.embeds) for seed in (0, 1)]
    arguments = {"dtype": "float32"} | case.arguments
    other = start_engine(pair[1], **arguments)
    fresh = [answers(other, case)]
    other.shutdown()
    engine = start_engine(pair[0], **arguments)
    fresh.insert(0, answers(engine, case))
    switched = []
    with dbuffer.WeightSender(directory / "store") as sender:
        with follow(engine, directory / "store") as follower:
            for number in ORDER:
                sender.send(pair[number])
                follower.sync()
                switched.append(answers(engine, case))
    return {"fresh": fresh, "switched": switched}


def answers(engine: Any, case: Case) -> list[Any]:
    return greedy(engine)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    torch.set_num_threads(1)
    (target / "observed.json").write_text(json.dumps(run(target, CASES[sys.argv[2]])))
